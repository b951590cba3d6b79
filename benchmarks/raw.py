"""What the machine can do: copying in memory, and writing and reading one file past the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from elastic_runner.storage.direct import open_direct, sync_path

PAGE = 4096
BLOCK = 8 << 20


class Buffer:
    """Page-aligned private memory, of ordinary or huge pages, all there unless it is ``new``."""

    def __init__(self, size: int, *, huge: bool = False, new: bool = False) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        if not new:
            self.tensor.random_()


def write_raw(file: Path, buffer: Buffer) -> None:
    """A new file by O_DIRECT in blocks, then fsync of it and of its directory."""
    handle = open_direct(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for start in range(0, buffer.size, BLOCK):
            block = buffer.view[start : start + BLOCK]
            if os.pwrite(handle, block, start) != len(block):
                raise OSError(f"{file}: short write")
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_path(file.parent)


def read_raw(file: Path, buffer: Buffer) -> None:
    """All of a file by O_DIRECT in blocks."""
    handle = open_direct(file, os.O_RDONLY)
    try:
        for start in range(0, buffer.size, BLOCK):
            block = buffer.view[start : start + BLOCK]
            if os.preadv(handle, [block], start) != len(block):
                raise OSError(f"{file}: short read")
    finally:
        os.close(handle)


def drop_cache(files: Iterable[Path]) -> None:
    """Let the page cache forget these files."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(field)


def forget_peak() -> None:
    """VmHWM starts anew from VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give freed memory of the C heap back."""
    ctypes.CDLL(None).malloc_trim(0)
