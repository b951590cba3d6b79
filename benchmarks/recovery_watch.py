"""A recovery seen from outside, by the same means whoever recovers: process ids, attempt records, the ledger."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runner import paths
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.data.lineage import effective
from elastic_runner.errors import NotFound
from elastic_runner.storage import LocalStorage
from elastic_runner.worker.attempt import attempts

LOOK_EVERY = 0.02
"""Seconds between looks at a run directory; there is no event to wait for."""
RECOVERY = 240.0
"""Seconds after which a job counts as not recovered."""
SETTLED = 40
"""Steps of an attempt, two checkpoints, before the next fault."""
PARTS = ("ended", "rendezvous", "start", "load", "first_step")
"""What a recovery is made of, in this order."""


class NotRecovered(Exception):
    """The job has ended, or made no step in time."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One fault and what came after it, in seconds."""

    parts: dict[str, float]
    """By name, each from the end of the one before."""
    lost: int
    """Steps that were on the ledger and had to be done again."""
    noticed: float | None = None
    """From the fault to the evidence of it, where that was waited for."""

    @property
    def seconds(self) -> float:
        """From the fault to the next committed step."""
        return sum(self.parts.values())


class RunWatch:
    """Looks at a run directory. ``alive`` says whether the job that should be at work there is."""

    def __init__(self, run_dir: Path, alive: Callable[[], bool]) -> None:
        self.run_dir = run_dir
        self._storage = LocalStorage(run_dir)
        self._alive = alive

    def newest(self) -> int:
        """Number of the newest attempt; 0 before any."""
        return max(attempts(self._storage), default=0)

    def pids(self, attempt: int) -> list[int]:
        """The attempt's workers, in rank order."""
        return [worker["pid"] for worker in self._attempt(attempt)["workers"]]

    def until_settled(self, world: int) -> int:
        """Wait until an attempt of this world size has made ``SETTLED`` steps; returns its number."""
        end = time.monotonic() + RECOVERY
        while True:
            newest = self.newest()
            if newest and self._attempt(newest)["world_size"] == world and len(self._steps(newest)) >= SETTLED:
                return newest
            self._check(end)
            time.sleep(LOOK_EVERY)

    def recovery(self, attempt: int, strike: Callable[[], object], *, evidence: bool = False) -> Recovery:
        """``strike`` at an attempt and wait for the first committed step of a later one. Raises NotRecovered.

        ``evidence``: note when that of a hang appears. Times are of the clock of this machine, as in the records.
        """
        lost = self._lost()
        with _handles(self.pids(attempt) if attempt else []) as old:
            at = time.time()
            strike()
            number, ended, noticed = self._watch(attempt, at, old, evidence=evidence)
        spawned = min(map(_began, self.pids(number)))
        started, first = self._attempt(number)["started"], self._steps(number)[0]["time"]
        loaded = self._lines(number, "start")[0]["time"]
        # Two agents do not end their workers at once: the end of one part is never before that of another.
        moments, latest = [], at
        for moment in (ended, spawned, started, loaded, first):
            latest = max(latest, min(moment, first))
            moments.append(latest)
        parts = {name: b - a for name, a, b in zip(PARTS, [at, *moments], moments, strict=False)}
        return Recovery(parts=parts, lost=self._lost() - lost, noticed=None if noticed is None else noticed - at)

    def _watch(self, attempt: int, at: float, old: list[int], *, evidence: bool) -> tuple[int, float, float | None]:
        """The attempt that made the next step, when the last ``old`` process was gone, when there was evidence."""
        ended, noticed, end = at, None, time.monotonic() + RECOVERY
        while True:
            if old:
                gone = _wait(old, LOOK_EVERY)
                if gone:
                    ended, old = time.time(), [handle for handle in old if handle not in gone]
            else:
                time.sleep(LOOK_EVERY)
            if evidence and noticed is None and any(self.run_dir.glob(f"{paths.evidence(attempt, '*')}/summary.txt")):
                noticed = time.time()
            told = noticed is not None or not evidence
            if told and (newest := self.newest()) > attempt and self._steps(newest):
                return newest, ended, noticed
            self._check(end)

    def _check(self, end: float) -> None:
        if not self._alive():
            raise NotRecovered("the job has ended")
        if time.monotonic() > end:
            raise NotRecovered(f"no step, or no evidence, within {RECOVERY:g} s")

    def _attempt(self, number: int) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self._storage.read(paths.attempt_record(number)))
        return record

    def _steps(self, attempt: int) -> list[Record]:
        # A file may begin with lines of an earlier attempt, which it has found in memory.
        return [line for line in self._lines(attempt, "step") if line["attempt"] == attempt]

    def _lines(self, attempt: int, event: str) -> list[Record]:
        try:
            data = self._storage.read(paths.ledger_segment(attempt, 0))
        except NotFound:
            return []
        lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
        return [line for line in lines if line["event"] == event]

    def _lost(self) -> int:
        return effective(read_records(self._storage))[1]


def _began(pid: int) -> float:
    """When a process began, in seconds since the epoch, to 10 ms. Raises NotRecovered when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        raise NotRecovered("the next attempt ended after its first step") from None
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def _handles(pids: Sequence[int]) -> Iterator[list[int]]:
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended already
            handles.append(os.pidfd_open(pid))
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def _wait(handles: Sequence[int], seconds: float) -> set[int]:
    """Those of the processes that have ended, once one has."""
    ends = select.poll()
    for handle in handles:
        ends.register(handle, select.POLLIN)
    return {handle for handle, _ in ends.poll(seconds * 1000)}
