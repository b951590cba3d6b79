"""The heartbeat: what a worker is doing, in a page of memory that it shares with its agent.

Written without a system call, and readable at any moment, also while the worker is stopped in the middle of a write:
each lane holds two copies that are written in turn, and a copy counts only when its digest fits.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import xxhash

SIZE = 4096
"""Bytes of a worker's page."""

_FORMAT = 1
"""Seed of the digests: another layout is not taken for this one."""
_FIELDS = struct.Struct("<QIiqqqdd?40s")
_DIGEST = struct.Struct("<Q")
_COPY = 128
_LANE = 2 * _COPY

assert _FIELDS.size + _DIGEST.size <= _COPY


class Lane(IntEnum):
    """A worker does two things at a time."""

    TRAINING = 0
    """What the program does."""
    SAVING = 1
    """The save that goes on beside it."""


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
    """Seconds the phase may take; 0: for ever."""
    learned: bool
    """Whether the limit comes from the durations of earlier phases rather than from ``timeouts`` itself."""
    phase: str
    """Name of the innermost phase; empty outside of all."""


class Heart:
    """Writes one lane of a page. ``position``: attempt and last finished step, as in Beat."""

    def __init__(
        self, page: mmap.mmap | bytearray, lane: Lane, *, rank: int, position: Callable[[], tuple[int, int]]
    ) -> None:
        self._page = page
        self._start = lane * _LANE
        self._rank = rank
        self._position = position
        self._pid = os.getpid()
        self._number = 0

    def beat(self, phase: str, *, since: float, limit: float, progress: int = 0, learned: bool = False) -> None:
        """Write what the worker is doing from now on; fields as in Beat."""
        self._number += 1
        attempt, step = self._position()
        record = _FIELDS.pack(
            self._number, self._pid, self._rank, attempt, step, progress, since, limit, learned, phase.encode()[:40]
        )
        record += _DIGEST.pack(xxhash.xxh3_64_intdigest(record, seed=_FORMAT))
        start = self._start + self._number % 2 * _COPY
        self._page[start : start + len(record)] = record


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


def forget_others(page: mmap.mmap | bytearray, pid: int) -> None:
    """Forget what other processes than ``pid`` have written, which may be writing already."""
    for start in range(0, len(Lane) * _LANE, _COPY):
        beat = _whole(bytes(page[start : start + _COPY]))
        if beat is not None and beat.pid != pid:
            page[start : start + _COPY] = bytes(_COPY)


def _whole(copy: bytes) -> Beat | None:
    record = copy[: _FIELDS.size]
    if _DIGEST.unpack_from(copy, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(record, seed=_FORMAT):
        return None
    number, pid, rank, attempt, step, progress, since, limit, learned, phase = _FIELDS.unpack(record)
    return Beat(
        number=number, pid=pid, rank=rank, attempt=attempt, step=step, progress=progress, since=since, limit=limit,
        learned=learned, phase=phase.rstrip(b"\0").decode(errors="replace"),
    )  # fmt: skip
