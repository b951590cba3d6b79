"""Ways by which a rank gets at the files that the node's other ranks have in memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from elastic_runner.checkpoint.image import SharedBuffer
from elastic_runner.checkpoint.peer_memory import PeerFile, Scratch


class Way(Protocol):
    """How files are shared, decided once for a restore and the same on all ranks."""

    def offer(self, view: memoryview) -> int:
        """Let the others have a file that is in this rank's memory; by what they find it."""
        ...

    def open(self, rank: int, handle: int, size: int) -> memoryview | PeerFile:
        """What another rank offers."""
        ...


class ByReading:
    """Out of each other's memory."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """``pids``: processes by rank."""
        self._pids = pids
        self._scratch = Scratch()

    def offer(self, view: memoryview) -> int:
        """Where it lies."""
        return torch.frombuffer(view, dtype=torch.uint8).data_ptr() if view else 0

    def open(self, rank: int, handle: int, size: int) -> PeerFile:
        """There, in that rank's process."""
        return PeerFile(pid=self._pids[rank], address=handle, size=size, scratch=self._scratch)


class ByMapping:
    """By copies in memory that all of them map. Two of each rank: others are at the last one while it makes the next.

    Direct I/O into shared memory, page by page, takes more than twice the time of direct I/O into huge pages and a
    copy.
    """

    def __init__(self, own: Sequence[SharedBuffer]) -> None:
        self._own = own
        self._next = 0
        self._others: dict[int, list[memoryview]] = {}

    def map(self, rank: int, files: Sequence[str]) -> None:
        """Map another rank's buffers. Raises OSError where that is not allowed."""
        self._others[rank] = [_mapped(Path(file)) for file in files]

    def offer(self, view: memoryview) -> int:
        """Copy it to the buffer that nobody looks at."""
        number, self._next = self._next, (self._next + 1) % len(self._own)
        if view:
            target = self._own[number].view[: len(view)]
            torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8))
        return number

    def open(self, rank: int, handle: int, size: int) -> memoryview:
        """That rank's buffer of this number."""
        return self._others[rank][handle][:size]


SHARED_BUFFERS = 2
"""Of each rank, where files are shared by mapping."""


def _mapped(path: Path) -> memoryview:
    """Another process's buffer."""
    with path.open("r+b") as file:
        found = mmap.mmap(file.fileno(), 0)
    return memoryview(found)
