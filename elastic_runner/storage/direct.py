"""Direct I/O: past the page cache, where memory, offset and length are aligned and the file system can."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ALIGNMENT = 4096
BLOCK_BYTES = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only


def open_direct(path: Path, flags: int) -> int:
    """Open with O_DIRECT, or without where the file system refuses it."""
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)


class DirectWriter:
    """Writes in order to a handle of ``open_direct``; the first block that is not aligned ends direct writing."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._direct = _is_direct(handle)

    def write(self, view: memoryview) -> int:
        """Write all of ``view``."""
        total = len(view)
        while view:
            part = _aligned(view) if self._direct else view
            if not part:
                self._direct = _buffered(self._handle)
                continue
            try:
                done = os.write(self._handle, part)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = _buffered(self._handle)  # a file system with other ideas of alignment
                continue
            view = view[done:]
            self._direct = self._direct and (done % ALIGNMENT == 0 or _buffered(self._handle))
        return total


def read_direct(handle: int, buffer: memoryview) -> Iterator[memoryview]:
    """Fill ``buffer`` from the beginning of a handle of ``open_direct``, block by block; ends early with the file."""
    offset, direct = 0, _is_direct(handle)
    while offset < len(buffer):
        rest = buffer[offset : offset + BLOCK_BYTES]
        part = _aligned(rest) if direct else rest
        if not part:
            direct = _buffered(handle)
            continue
        try:
            done = os.preadv(handle, [part], offset)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _buffered(handle)
            continue
        if not done:
            return
        yield part[:done]
        offset += done
        direct = direct and (done % ALIGNMENT == 0 or _buffered(handle))


def sync_path(path: Path) -> None:
    """fsync of a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aligned(view: memoryview) -> memoryview:
    """The largest part from the beginning that direct I/O takes; empty when it takes none."""
    if np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT:
        return view[:0]
    return view[: len(view) // ALIGNMENT * ALIGNMENT]


def _is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & _DIRECT)


def _buffered(handle: int) -> bool:
    """Go on through the page cache; False, since what follows is not direct."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT)
    return False
