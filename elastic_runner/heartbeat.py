"""The heartbeat: what a worker is doing, in a page of memory that it shares with its agent.

Written without a system call, and readable at any moment, also while the worker is stopped in the middle of a write:
each lane holds two copies that are written in turn, and a copy counts only when its digest fits.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum

import xxhash

SIZE = 4096
"""Bytes of a worker's page."""

_FORMAT = 2
"""Seed of the digests: another layout is not taken for this one."""
_FIELDS = struct.Struct("<QIiqqqddd?40s")
_FIGURES = struct.Struct("<qqddqqqddd")
_LENGTH = _FIELDS.size + _FIGURES.size
_DIGEST = struct.Struct("<Q")
_TIME = struct.Struct("=d")
_COPY = 256
_LANE = 2 * _COPY

assert _LENGTH + _DIGEST.size <= _COPY


MOVING = frozenset({"save", "load"})
"""Phases that may take as long as bytes of a checkpoint move: their limit counts from the last of them."""


class Lane(IntEnum):
    """A worker does two things at a time."""

    TRAINING = 0
    """What the program does."""
    SAVING = 1
    """The save that goes on beside it."""


_MOVED = len(Lane) * _LANE
"""Where in a page it is said when bytes moved, whichever lane they moved for."""


@dataclass(kw_only=True)
class Figures:
    """What a worker has come to in its attempt: renewed by the worker, told with every beat, read for the metrics."""

    steps: int = 0
    """Optimizer steps."""
    samples: int = 0
    """Samples of the global batches of those steps."""
    step_seconds: float = 0.0
    """Time in phase ``step``, which begins with an attempt's second step; saves are left out."""
    last_rate: float = 0.0
    """Samples per second of the last one of these."""
    saves: int = 0
    """Checkpoints that are durable."""
    saves_failed: int = 0
    """Saves that failed while training went on."""
    saves_skipped: int = 0
    """Saves left out because the one before was still going on."""
    save_seconds: float = 0.0
    """How long the last save took, beside training."""
    save_stall: float = 0.0
    """Seconds in all that training stood still for saves."""
    saved_at: float = 0.0
    """When the newest checkpoint was known to be durable, by time.monotonic; 0: there is none of this attempt."""


_NAMES = tuple(each.name for each in fields(Figures))


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One whole record."""

    number: int
    """Grows by one with every record of a lane."""
    pid: int
    """The process that wrote it."""
    rank: int
    """Its global rank."""
    attempt: int
    """Number of the run's attempt; 0 before it is known."""
    step: int
    """The last finished step; -1 before there is any."""
    progress: int
    """How often the program came on within the phase; comparable between ranks in the same phase of the same step."""
    since: float
    """When the phase began, by time.monotonic; the time spent in phases inside it is left out."""
    limit: float
    """Seconds the phase may take, or stand still (MOVING); 0: for ever."""
    learned: bool
    """Whether the limit comes from the durations of earlier phases rather than from ``timeouts`` itself."""
    phase: str
    """Name of the innermost phase; empty outside of all."""
    at: float = 0.0
    """When this was written, by time.monotonic."""
    figures: Figures = field(default_factory=Figures)
    """What the worker has come to."""


class Heart:
    """Writes one lane of a page. ``position``: attempt and last finished step, as in Beat."""

    def __init__(
        self,
        page: mmap.mmap | bytearray,
        lane: Lane,
        *,
        rank: int,
        position: Callable[[], tuple[int, int]],
        figures: Figures | None = None,
    ) -> None:
        self._page = page
        self._start = lane * _LANE
        self._rank = rank
        self._position = position
        self._figures = figures or Figures()
        self._pid = os.getpid()
        self._number = 0

    def beat(self, phase: str, *, since: float, limit: float, progress: int = 0, learned: bool = False) -> None:
        """Write what the worker is doing from now on; fields as in Beat."""
        self._number += 1
        attempt, step = self._position()
        record = _FIELDS.pack(
            self._number, self._pid, self._rank, attempt, step, progress, since, limit, time.monotonic(), learned,
            phase.encode()[:40],
        ) + _FIGURES.pack(*(getattr(self._figures, name) for name in _NAMES))  # fmt: skip
        record += _DIGEST.pack(xxhash.xxh3_64_intdigest(record, seed=_FORMAT))
        start = self._start + self._number % 2 * _COPY
        self._page[start : start + len(record)] = record


class Moved:
    """When bytes of a checkpoint last moved. Called for every piece of them, from any thread: one word is written."""

    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        """``page``: where the agent looks, too."""
        page = bytearray(SIZE) if page is None else page
        self._at = memoryview(page)[_MOVED : _MOVED + _TIME.size].cast("d")

    def __call__(self) -> None:
        """Now, here or on a rank that this one waits for."""
        self._at[0] = time.monotonic()

    @property
    def at(self) -> float:
        """By time.monotonic; 0 before any."""
        return self._at[0]


def counts_from(phase: str, since: float, moved: float) -> float:
    """When the time began that a phase's limit is for; ``since``: the phase itself, ``moved``: bytes last moved."""
    return max(since, moved) if phase in MOVING else since


def open_page(path: str) -> mmap.mmap:
    """The page that the agent holds ready. Raises OSError or ValueError when it is not there."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


def read(page: mmap.mmap | bytearray, lane: Lane) -> Beat | None:
    """The newest whole record; None when there is none."""
    start = lane * _LANE
    copies = [_whole(bytes(page[at : at + _COPY])) for at in (start, start + _COPY)]
    return max((beat for beat in copies if beat is not None), key=lambda beat: beat.number, default=None)


def moved_at(page: mmap.mmap | bytearray) -> float:
    """What ``Moved`` says there."""
    return float(_TIME.unpack_from(page, _MOVED)[0])


def forget_others(page: mmap.mmap | bytearray, pid: int) -> None:
    """Forget what other processes than ``pid`` have written, which may be writing already."""
    for start in range(0, len(Lane) * _LANE, _COPY):
        beat = _whole(bytes(page[start : start + _COPY]))
        if beat is not None and beat.pid != pid:
            page[start : start + _COPY] = bytes(_COPY)


def _whole(copy: bytes) -> Beat | None:
    record = copy[:_LENGTH]
    if _DIGEST.unpack_from(copy, _LENGTH)[0] != xxhash.xxh3_64_intdigest(record, seed=_FORMAT):
        return None
    number, pid, rank, attempt, step, progress, since, limit, at, learned, phase = _FIELDS.unpack_from(record)
    return Beat(
        number=number, pid=pid, rank=rank, attempt=attempt, step=step, progress=progress, since=since, limit=limit,
        learned=learned, phase=phase.rstrip(b"\0").decode(errors="replace"), at=at,
        figures=Figures(**dict(zip(_NAMES, _FIGURES.unpack_from(record, _FIELDS.size), strict=True))),
    )  # fmt: skip
