"""Writing contents out again in either format of ours, a few rows in memory at a time."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, BinaryIO, Protocol, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from elastic_runner.checkpoint.frames import frame
from elastic_runner.checkpoint.full import whole_state
from elastic_runner.checkpoint.layout import DataFile, files_of, pieces_of
from elastic_runner.checkpoint.sharded import write_head
from elastic_runner.checkpoint.tools.contents import Contents
from elastic_runner.errors import Damaged
from elastic_runner.storage import Storage, Written

Tick = Callable[[int], None]
"""Told how many bytes more are done."""
Bar = Callable[[str, int], AbstractContextManager[Tick]]
"""Shows progress: told what is done to how many bytes, gives what is to be told of each step."""


@contextmanager
def no_bar(what: str, total: int) -> Iterator[Tick]:
    """Shows nothing."""
    yield lambda more: None


_ENTRY = b"PK\x01\x02"
"""How an entry of a zip's directory begins."""


class Sink(Protocol):
    """A stream to write to in order."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Write all of ``data``."""
        ...


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy())) if tensor.numel() else memoryview(b"")


def write_tensor(contents: Contents, key: str, sink: Sink, tick: Tick) -> None:
    """The bytes of a whole tensor."""
    for band in contents.bands(key):
        sink.write(raw(band))
        tick(band.nbytes)


def write_sharded(storage: Storage, directory: str, contents: Contents, tick: Tick) -> list[Written]:
    """Files in DCP layout, as rank 0 of one would write them; ``.metadata``, which makes them a checkpoint, last."""
    below = f"{directory}/" if directory else ""
    outlines = {k: torch.empty(e.shape, dtype=e.dtype, device="meta") for k, e in contents.tensors.items()}
    files = files_of(0, pieces_of(outlines))
    written = [_write_data(storage, below, file, contents, tick) for file in files]
    return written + write_head(storage, below, files, contents.plain)


def _write_data(storage: Storage, below: str, file: DataFile, contents: Contents, tick: Tick) -> Written:
    with storage.writer(below + file.name) as stream:
        for placed in file.pieces:
            piece, made = placed.piece, frame(placed.piece.dtype, placed.piece.sizes)
            stream.write(bytes(placed.offset - stream.tell()) + made.head)
            first = piece.offsets[0] if piece.offsets else 0
            values = contents.rows(piece.key, first, first + (piece.sizes[0] if piece.sizes else 1))
            stream.write(raw(values))
            stream.write(made.tail)
            tick(values.nbytes)
    return stream.written(below + file.name)


def write_full(sink: Sink, contents: Contents, tick: Tick) -> None:
    """A full checkpoint's file.

    torch.save writes it with holes, from tensors that have no memory; the holes are filled afterwards.
    """
    with FakeTensorMode():
        fakes = {key: torch.empty(entry.shape, dtype=entry.dtype) for key, entry in contents.tensors.items()}
    keys = {id(fake): key for key, fake in fakes.items()}
    tree = whole_state(fakes, contents.plain)
    archive = _Archive()
    with skip_data(materialize_fake_tensors=True):
        torch.save(tree, cast(BinaryIO, archive))
    tensors = {id(tensor): tensor for tensor in _tensors_in(tree) if tensor.numel()}
    if [tensor.nbytes for tensor in tensors.values()] != archive.holes:
        raise Damaged("torch.save left holes of other sizes than the tensors have: not the torch we know")
    sums: list[int] = []
    for before, tensor in zip(archive.parts, tensors.values(), strict=False):
        sink.write(bytes(before))
        summing = _Summing(sink)
        if id(tensor) in keys:
            write_tensor(contents, keys[id(tensor)], summing, tick)
        else:  # a learning rate kept as a tensor, inside plain data
            summing.write(raw(tensor.detach().contiguous()))
        sums.append(summing.sum)
    sink.write(archive.end(sums))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in the order in which a pickler meets them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


class _Archive(io.RawIOBase):
    """Keeps what torch.save writes around the holes."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.holes: list[int] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self.parts[-1] += data
        self._size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation(f"torch.save seeks in a way that this was not made for: {offset}, {whence}")
        if offset:
            self.holes.append(offset)
            self.parts.append(bytearray())
        self._size += offset
        return self._size

    def tell(self) -> int:
        return self._size

    def end(self, sums: Iterable[int]) -> bytes:
        """What follows the last hole, its zip directory with the checksums of the holes.

        torch does not look at them; other programs that read zip files do.
        """
        end, left = self.parts[-1], iter(sums)
        at = end.find(_ENTRY)
        while end[at : at + 4] == _ENTRY:
            size, name, extra, comment = struct.unpack_from("<IHHH", end, at + 24)
            if b"/data/" in end[at + 46 : at + 46 + name] and size:
                struct.pack_into("<I", end, at + 16, next(left))
            at += 46 + name + extra + comment
        return bytes(end)


class _Summing:
    """Passes on and computes zip's checksum."""

    def __init__(self, sink: Sink) -> None:
        self.sum = 0
        self._sink = sink

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._sink.write(data)
