"""Snapshots: when they are taken, what each rank copies, and what that means for the steps on record.

A step is committed when its ledger line is on record. So that no committed step is lost with a worker:

- The line of step n waits until every rank has said, in an exchange that comes anyway, that it holds a snapshot of
  step n or of a later one. That is the one at the beginning of step n + 1, or of a save. Only then rank 0 appends it.
- Each snapshot carries the lines since the last checkpoint, its own included. If all ranks hold it and rank 0 is killed
  before it appends, the attempt that restores it puts on record what is missing there, before its own first line.

Of its two buffers a rank never writes over the one with the snapshot that all ranks are known to hold: the newest when
they last spoke, or what this attempt began with.
"""

from __future__ import annotations

import io
import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.capture import Captured, Parts, capture
from elastic_runner.checkpoint.layout import Piece, pieces_of
from elastic_runner.checkpoint.room import available_memory
from elastic_runner.checkpoint.saver import box
from elastic_runner.checkpoint.snapshot import (
    Head,
    Keep,
    Known,
    SnapshotBuffer,
    Stored,
    arrange,
    discard,
    encode_index,
    read_snapshot,
)
from elastic_runner.checkpoint.snapshot_plan import Memory, Wish, every_for, share_out
from elastic_runner.checkpoint.snapshot_source import Found, Offer, newest_common, offers
from elastic_runner.config import SnapshotConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import Damaged

log = logging.getLogger(__name__)

_MEASURED = 16
"""Steps and snapshots of which the median is taken."""


class Lines(Protocol):
    """The ledger lines of steps that are not committed yet; on every rank."""

    def hold(self, on: bool) -> None:
        """Whether lines wait for ``release``; those that wait are released when they no longer need to."""
        ...

    def release(self, step: int) -> None:
        """Steps up to this one are committed."""
        ...

    def recent(self) -> bytes:
        """Those since the last checkpoint, as a ledger has them."""
        ...


class Report(NamedTuple):
    """What a rank tells the others in passing."""

    able: bool
    """Whether it can take snapshots."""
    held: int
    """The newest step of which it has one from this attempt; -1: none."""
    misfit: bool
    """Whether its state has changed its shape, so that all must lay out anew."""
    every: int
    """Steps from one to the next, in its opinion; rank 0's counts."""


class _Plan(NamedTuple):
    stored: list[Stored]
    table: bytes
    leads: bool


class Snapshots:
    """This rank's snapshots in ``memory``. ``run``: see ``run_identity``. ``coordinator``: of saving and loading."""

    def __init__(
        self, config: SnapshotConfig, memory: Memory, lines: Lines, coordinator: Coordinator, *, run: str, attempt: int
    ) -> None:
        self._config = config
        self._memory = memory
        self._lines = lines
        self._coordinator = coordinator
        self._run = run
        self._attempt = attempt
        self._able = config.enabled and len(memory.mine) == 2
        self._active = False
        self._plan: _Plan | None = None
        self._signature: tuple[Any, ...] = ()
        self._buffers: list[SnapshotBuffer] = []
        self._due: int | None = None
        self._held = -1
        self._common: tuple[int, int] | None = None
        """Attempt and step of the snapshot that all ranks hold."""
        self._misfit, self._lay_out_next = False, True
        self._every = config.every or 1
        self._costs: deque[float] = deque(maxlen=_MEASURED)
        self._durations: deque[float] = deque(maxlen=_MEASURED)
        self._begun: float | None = None
        self._spent = 0.0

    def report(self) -> Report:
        """What the other ranks have to know; ``hear`` takes everybody's."""
        every = self._config.every or self._every
        if self._config.every is None and self._costs and self._durations:
            cost, step = statistics.median(self._costs), statistics.median(self._durations)
            every = every_for(cost, step, self._config.share)
        return Report(able=self._able, held=self._held, misfit=self._misfit, every=every)

    def hear(self, reports: Sequence[Report], step: int) -> bool:
        """All ranks have finished ``step`` and said how they stand; alike on every rank.

        Returns False where snapshots are taken and not all ranks hold one of this step.
        """
        self._active = all(report.able for report in reports)
        self._lines.hold(self._active)
        if not self._active:
            return True
        held, misfit = min(report.held for report in reports), any(report.misfit for report in reports)
        self._lay_out_next |= misfit
        self._every = reports[0].every
        not_asked_for = not misfit and self._due is not None and self._due <= step  # no maybe_save when it was due
        self._lines.release(step if not_asked_for else held)
        if misfit or not_asked_for or self._due is None:
            self._due = step + 1
        else:
            self._due = max(step + 1, held + self._every)
        if held >= 0:
            self._common = self._attempt, held
        return held == step

    def went_on(self, head: Head) -> None:
        """The attempt begins with this one."""
        self._common = head.attempt, head.step

    def begins(self) -> None:
        """A step begins: measure it."""
        now = time.perf_counter()
        if self._begun is not None:
            self._durations.append(now - self._begun - self._spent)
        self._begun, self._spent = now, 0.0

    def take(
        self,
        parts: Parts,
        phase: AbstractContextManager[None],
        *,
        origin: str | None,
        keep: Keep | None = None,
        forced: bool = False,
    ) -> None:
        """Copy the state after a finished step when that is due, or ``forced``. On every rank alike.

        ``phase``: to be in while ranks wait for each other. ``origin``: the newest durable checkpoint behind it.
        ``keep``: where it belongs. NaN and infinity are not looked for: a step whose loss or gradient has one ends the
        run or changes nothing.
        """
        step = parts.step
        due = forced or self._due is None or step >= self._due
        if not self._active or not due or (step == self._held and not self._lay_out_next):
            return
        began = time.perf_counter()
        captured = capture(parts)
        if self._lay_out_next:
            with phase:
                self._lay_out(captured)
        elif self._is_other(captured):
            self._misfit = True  # the others learn of it when the next step begins
        if self._misfit or self._plan is None:
            return
        as_usual = self._copy(captured, self._plan, step, origin, keep)
        self._held, self._due = step, step + self._every
        self._spent += time.perf_counter() - began
        if as_usual:
            self._costs.append(time.perf_counter() - began)

    def _copy(self, captured: Captured, plan: _Plan, step: int, origin: str | None, keep: Keep | None) -> bool:
        """Whether it was copied into memory that was there."""
        buffer = min((b for b in self._buffers if b.age != self._common), key=lambda b: b.age)
        there = buffer.is_laid_out(plan.table)
        if not there:
            buffer.lay_out(plan.stored, plan.table)
        buffer.invalidate()
        with torch.no_grad():
            for piece, target in buffer.targets:
                target.copy_(box(captured.tensors[piece.key], piece))
        head = Head(
            run=self._run,
            step=step,
            attempt=self._attempt,
            world_size=self._coordinator.world_size,
            rank=self._coordinator.rank,
            origin=origin,
            keep=keep,
        )
        buffer.seal(head, _packed(captured.plain) if plan.leads else b"", self._lines.recent())
        return there

    def _is_other(self, captured: Captured) -> bool:
        """Whether the buffers were made for another state than this one."""
        assert self._plan is not None
        return _kept(captured, leads=self._plan.leads).signature() != self._signature

    def _lay_out(self, captured: Captured) -> None:
        """Agree on who keeps what, and whether there is room. Collective."""
        wishes: list[Wish] = []
        self._coordinator.agree("snapshot: state", lambda: wishes.append(self._wish(captured)))
        tensors = {k: Known(t.dtype, tuple(t.shape), _is_alike(captured, k)) for k, t in captured.tensors.items()}
        pieces, leads, refused = self._coordinator.decide("snapshot: layout", wishes[0], share_out)
        if refused:
            if self._coordinator.is_main:
                log.warning("no snapshots are taken in memory: %s", refused)
            self.clear()
            self._able = self._active = False
            self._lines.hold(False)
            return
        kept = _kept(captured, leads=leads)
        self._signature = kept.signature()
        tensors = {key: tensors[key] for key in kept.tensors}
        stored = arrange(pieces)
        self._plan = _Plan(stored, encode_index(tensors, stored), leads)
        self._misfit = self._lay_out_next = False

    def _wish(self, captured: Captured) -> Wish:
        trouble = ""
        try:
            if not self._buffers:
                self._buffers = [SnapshotBuffer(path) for path in self._memory.mine]
        except OSError as error:
            trouble = f"the launcher's memory cannot be opened: {error}"
        alike: list[Piece] = []
        own: list[Piece] = []
        for piece in pieces_of(captured.tensors):
            (alike if _is_alike(captured, piece.key) else own).append(piece)
        allocated = sum(buffer.allocated for buffer in self._buffers)
        return Wish(
            home=self._memory.home,
            alike=alike,
            own=own,
            allocated=allocated,
            available=available_memory(),
            trouble=trouble,
        )

    def find(self, *, newer_than: int, trusted_after: int) -> list[Offer]:
        """What can be restored from memory, newest first: see ``newest_common``. Collective."""
        looked: list[Found] = []

        def look() -> bool:
            looked.extend(self._look())
            return bool(looked)

        if not any(self._coordinator.agree("restore: look into memory", look)):
            return []

        def choose(told: list[tuple[str, list[Found]]]) -> list[list[Offer]]:
            everything = [found for _, of_rank in told for found in of_rank]
            common, refused = newest_common(everything, newer_than=newer_than, trusted_after=trusted_after)
            # Whole or not, some are always left over; why there is none at all is worth a line.
            for said in refused[: not common]:
                log.warning("snapshot not used: %s", said)
            return offers(common, [home for home, _ in told])

        return self._coordinator.decide("restore: choose in memory", (self._memory.home, looked), choose)

    def _look(self) -> list[Found]:
        """This rank's share of what the node has of this run."""
        result = []
        for path in self._memory.share if self._config.enabled else ():
            try:
                snapshot = read_snapshot(path)
            except (Damaged, OSError) as error:
                log.warning("snapshot not used: %s", error)
                continue
            if snapshot is not None and snapshot.head.run == self._run and snapshot.head.attempt < self._attempt:
                result.append(Found(self._memory.home, snapshot))
        return result

    def clear(self) -> None:
        """Give the memory back; nothing that is in there counts any more."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._plan, self._held, self._common = [], None, -1, None
        self._misfit, self._lay_out_next = False, True
        for path in self._memory.share:
            try:
                discard(path)
            except OSError as error:
                log.debug("%s: %s", path, error)  # its agent is gone, and the memory with it


def _is_alike(captured: Captured, key: str) -> bool:
    """Whether its holders hold the same of it. Buffers (BatchNorm statistics) and others' states are one rank's."""
    return key in captured.trained or isinstance(captured.tensors[key], DTensor)


def _kept(captured: Captured, *, leads: bool) -> Captured:
    """What concerns this rank's snapshots."""
    tensors: Mapping[str, torch.Tensor] = captured.tensors
    return Captured(tensors={k: t for k, t in tensors.items() if leads or _is_alike(captured, k)})


def _packed(plain: Mapping[str, Any]) -> bytes:
    archive = io.BytesIO()
    torch.save(dict(plain), archive)
    return archive.getvalue()
