"""A run under observation: started as a user would start it, followed by its ledger, its workers killed by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_runner import paths
from elastic_runner.data.ledger import Record, parse
from elastic_runner.launch.processes import descendants, signal_all
from elastic_runner.storage import LocalStorage

_LOOK_EVERY = 0.05
"""Seconds between looks at the ledger of another process; there is no event to wait for."""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A worker that was killed."""

    rank: int
    """Its global rank."""
    pid: int
    """Its process id."""
    at: float
    """When, seconds since the epoch."""


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants; torch's agent starts each worker in a session of its own."""
    signal_all([pid, *descendants(pid)], signal.SIGKILL)


def end_tree(process: subprocess.Popen[Any]) -> None:
    """``kill_tree`` of a process that we have started, unless it has ended, and wait for it."""
    if process.poll() is None:
        kill_tree(process.pid)
        process.wait()


def launch_command(workers: int, *script: str) -> list[str]:
    """``elastic-runner launch`` of ``script`` (``-m MODULE`` or a file, and its arguments) on this node."""
    return [sys.executable, "-m", "elastic_runner", "launch", f"--nproc-per-node={workers}", *script]


class ObservedRun:
    """``command`` in a session of its own, its output in ``launch.log`` in the run directory it is given.

    ``command`` is a launcher with a script that takes ``--run-dir``, for instance what ``launch_command`` makes.
    """

    def __init__(self, run_dir: Path, command: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.log = run_dir / "launch.log"
        self._storage = LocalStorage(run_dir)
        self._command = [*command, "--run-dir", str(run_dir)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ObservedRun:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of the run is left behind."""
        end_tree(self.process)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        assert self._process is not None, "the run is started by entering its context"
        return self._process

    def records(self) -> Iterator[Record]:
        """Ledger records as they appear, until the launcher has ended and all are given."""
        read: dict[Path, int] = {}
        while True:
            ended = self.process.poll() is not None
            for piece in sorted((self.run_dir / paths.LEDGER).glob("*")):
                with piece.open("rb") as file:
                    file.seek(read.get(piece, 0))
                    lines = [line for line in file if line.endswith(b"\n")]
                read[piece] = read.get(piece, 0) + sum(map(len, lines))
                yield from parse(lines)
            if ended:
                return
            time.sleep(_LOOK_EVERY)

    def workers(self) -> list[dict[str, Any]]:
        """Host and pid of each rank of the latest attempt, in rank order."""
        newest = self._storage.list(paths.ATTEMPTS)[-1]
        record = json.loads(self._storage.read(f"{paths.ATTEMPTS}/{newest}"))
        return list(record["workers"])

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> Killed:
        """Send a signal to a worker of the latest attempt."""
        pid = self.workers()[rank]["pid"]
        os.kill(pid, number)
        return Killed(rank=rank, pid=pid, at=time.time())
