"""Images: files made in memory before they are written, in buffers that are allocated and faulted in once."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from elastic_runner.checkpoint.frames import frame
from elastic_runner.checkpoint.layout import DataFile, Piece
from elastic_runner.errors import SaveFailed

BLOCK_BYTES = 8 << 20
"""Bytes handed to the storage at a time."""


class SharedBuffer:
    """Page-aligned memory of this machine that other processes of it can map by ``path``."""

    _fd = -1

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("elastic_runner", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.view = memoryview(mmap.mmap(self._fd, size))
        """All of it."""

    @property
    def path(self) -> Path:
        """The same bytes as a file, for as long as the buffer lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        """Give the memory back; tensors that look into it keep the mapping until they go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.view = memoryview(b"")

    def __del__(self) -> None:
        self.close()


class PrivateBuffer:
    """Page-aligned memory of this process, in huge pages where the kernel has them: direct I/O goes in larger pieces,
    at up to twice the speed. Loader processes do not inherit it, or each save would copy it for them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # a kernel without it
                self._map.madvise(advice)
        self.view = memoryview(self._map)
        """All of it."""


class Filling:
    """Data that one thread brings and another waits for, anew for each save."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._failed = False

    def expect(self) -> None:
        """A new save begins: what is there is of the last one."""
        self._over.clear()
        self._failed = False

    def filled(self, *, failed: bool = False) -> None:
        """The data is there, or will not come."""
        self._failed = failed
        self._over.set()

    def wait(self) -> None:
        """Until the data is there. Raises SaveFailed when it will not come."""
        self._over.wait()
        if self._failed:
            raise SaveFailed("the state could not be copied")


class FileImage(Filling):
    """One data file: its frames are there from the beginning, each save fills in the data.

    ``shared``: also a file, by ``path``, for a storage that uploads from one; the memory is slower then.
    """

    def __init__(self, file: DataFile, *, shared: bool) -> None:
        super().__init__()
        self.file = file
        self._buffer = SharedBuffer(file.size) if shared else PrivateBuffer(file.size)
        self._pinned = 0
        view = self._buffer.view
        self._targets: list[tuple[Piece, torch.Tensor]] = []
        end = 0
        for placed in file.pieces:
            piece, made = placed.piece, frame(placed.piece.dtype, placed.piece.sizes)
            view[end : placed.offset] = bytes(placed.offset - end)
            data = placed.offset + len(made.head)
            end = placed.offset + made.size
            view[placed.offset : data] = made.head
            view[data + made.hole : end] = made.tail
            if made.hole:
                raw = torch.frombuffer(view, dtype=torch.uint8, count=made.hole, offset=data)
                self._targets.append((piece, raw.zero_().view(piece.dtype).view(piece.sizes)))  # faults it in

    @property
    def path(self) -> Path:
        """The image as a file, for uploaders; only when it is shared."""
        assert isinstance(self._buffer, SharedBuffer), "made for a storage that takes memory"
        return self._buffer.path

    @property
    def targets(self) -> list[tuple[Piece, torch.Tensor]]:
        """The pieces with the memory for their data."""
        return self._targets

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from the device run at full speed."""
        address = torch.frombuffer(self._buffer.view, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, self._buffer.size, 0)))
        self._pinned = address

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._pinned)))
            self._pinned = 0
        self._targets = []
        if isinstance(self._buffer, SharedBuffer):
            self._buffer.close()

    def blocks(self) -> Iterator[memoryview]:
        """The bytes in order, once they are there. Raises SaveFailed when they will not come."""
        self.wait()
        for start in range(0, self.file.size, BLOCK_BYTES):
            yield self._buffer.view[start : min(start + BLOCK_BYTES, self.file.size)]
