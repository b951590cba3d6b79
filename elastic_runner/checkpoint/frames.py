"""Frames: the bytes that torch.save puts around a tensor's data, known before the data is there.

DCP keeps each chunk of a tensor as one torch.save archive. Made ahead, the archive's head and tail are written once
into a buffer that lives as long as the process, and a save copies nothing but the data between them.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import BinaryIO, cast

import torch
from torch.serialization import skip_data

ALIGNMENT = 64
"""Frames begin at multiples of this in their file, as torch.save lays out the data inside them."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A torch.save archive with a hole where the data goes."""

    head: bytes
    """What comes before the data."""
    hole: int
    """Bytes of data."""
    tail: bytes
    """What comes after it."""

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.hole + len(self.tail)


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """The frame of a contiguous CPU tensor; its checksum of the data is left out, which torch.load does not look at."""
    sink = _Sink()
    with skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), cast(BinaryIO, sink))
    return Frame(head=bytes(sink.head), hole=sink.hole, tail=bytes(sink.tail))


class _Sink(io.RawIOBase):
    """Keeps what is written on either side of the one place that torch.save skips."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.hole = 0
        self.tail = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        (self.tail if self.hole else self.head).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or self.hole:
            raise io.UnsupportedOperation(f"torch.save seeks in a way that this was not made for: {offset}, {whence}")
        self.hole = offset
        return self.tell()

    def tell(self) -> int:
        return len(self.head) + self.hole + len(self.tail)


def data_in(archive: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """The tensor that looks into ``archive``, without a copy; None when it is not a frame as made here."""
    made = frame(dtype, sizes)
    start = len(made.head)
    if len(archive) != made.size or archive[:start] != made.head:
        return None
    if not made.hole:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(archive, dtype=torch.uint8, count=made.hole, offset=start).view(dtype).view(sizes)
