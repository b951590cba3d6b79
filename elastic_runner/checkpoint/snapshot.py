"""A snapshot: one rank's part of a state, in memory that outlives the rank, sealed by a digest that is written last.

First what is fixed (magic, lengths, digest), at ``DATA`` the tensors' pieces, raw, and behind them what differs in
length from step to step: a head (JSON), the index of the pieces (JSON), the plain data (torch.save), ledger lines.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from elastic_runner.checkpoint.layout import Piece
from elastic_runner.errors import Damaged

DATA = 4096
"""Where the first piece lies, in bytes."""
ALIGNMENT = 64
"""Pieces begin at multiples of this."""

_MAGIC = b"erSnap01"
_FIXED = struct.Struct("<8s5Q")
"""Magic; bytes of pieces, head, index, plain data, lines."""
_DIGEST_BYTES = 16
_UNSEALED = bytes(_DIGEST_BYTES)


class Stored(NamedTuple):
    """A piece and where it lies."""

    piece: Piece
    """What."""
    offset: int
    """Bytes from the file's beginning."""


class Known(NamedTuple):
    """A tensor of the state, whole."""

    dtype: torch.dtype
    """Its type."""
    shape: tuple[int, ...]
    """Its shape."""
    alike: bool
    """Whether whoever holds it, or the same shard of it, holds the same; else it is one rank's word."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Where the state belongs once the memory is given up, and by what rules. Options may hold secrets: never shown."""

    run: str
    """URL of the run directory."""
    url: str
    """The checkpoint URL."""
    options: dict[str, str] = field(repr=False)
    """Of its filesystem."""
    seconds: float
    """For one storage operation."""
    demote_after: int
    """``checkpoint.demote_after``."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Which state it is a part of."""

    run: str
    """What tells the run from others."""
    step: int
    """Optimizer steps that the state has taken."""
    attempt: int
    """The attempt that took it."""
    world_size: int
    """Ranks that took it."""
    rank: int
    """The one that took this part."""
    origin: str | None
    """The newest durable checkpoint behind it: path of the manifest; None: the run's beginning."""
    keep: Keep | None = None
    """Where it belongs; None: nobody but the program itself knows."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A sealed one, as it was found."""

    path: str
    """Where it can be mapped, on its node."""
    head: Head
    """Which state it is a part of."""
    tensors: dict[str, Known]
    """What its rank holds a part of, by key."""
    pieces: tuple[Stored, ...]
    """What is in here."""
    plain: bytes
    """Plain data; empty: kept by another rank of the node."""
    lines: bytes
    """Ledger lines of the steps since a checkpoint, which may not be on record yet."""


def arrange(pieces: Iterable[Piece]) -> list[Stored]:
    """One after the other."""
    result, end = [], DATA
    for piece in pieces:
        result.append(Stored(piece, end))
        end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return result


def end_of(stored: Sequence[Stored]) -> int:
    """Bytes up to the end of the last piece."""
    return max((offset + piece.nbytes for piece, offset in stored), default=DATA)


def encode_index(tensors: Mapping[str, Known], stored: Iterable[Stored]) -> bytes:
    """What is where."""
    table = {key: (str(t.dtype).removeprefix("torch."), t.shape, t.alike) for key, t in tensors.items()}
    places = [(piece.key, piece.offsets, piece.sizes, offset) for piece, offset in stored]
    return json.dumps({"tensors": table, "pieces": places}).encode()


def _decode_index(data: bytes) -> tuple[dict[str, Known], tuple[Stored, ...]]:
    table = json.loads(data)
    tensors = {key: Known(_dtype(name), tuple(shape), alike) for key, (name, shape, alike) in table["tensors"].items()}
    stored = []
    for key, offsets, sizes, offset in table["pieces"]:
        dtype, shape, _ = tensors[key]
        piece = Piece(key=key, dtype=dtype, shape=shape, offsets=tuple(offsets), sizes=tuple(sizes))
        stored.append(Stored(piece, offset))
    return tensors, tuple(stored)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no type of tensors")
    return found


class SnapshotBuffer:
    """One of a rank's buffers: laid out once, then written and sealed step after step. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._view = memoryview(b"")
        self._index = b""
        self._targets: list[tuple[Piece, torch.Tensor]] = []
        self.age = _age(self._file)
        """Attempt and step of what is sealed in it; (-1, -1): nothing."""

    @property
    def allocated(self) -> int:
        """Bytes of memory that it takes up."""
        return os.fstat(self._file).st_blocks * 512

    @property
    def targets(self) -> list[tuple[Piece, torch.Tensor]]:
        """The pieces with the memory for their data."""
        return self._targets

    def is_laid_out(self, index: bytes) -> bool:
        """Whether it was laid out for this index."""
        return bool(self._targets) and self._index == index

    def lay_out(self, stored: Sequence[Stored], index: bytes) -> None:
        """Make room and fault it in; what was in it is gone."""
        self.invalidate()
        self._targets, self._view, self._index = [], memoryview(b""), index
        size = end_of(stored)
        os.ftruncate(self._file, size)
        mapping = mmap.mmap(self._file, size)
        with suppress(OSError):  # a kernel without huge pages for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(mapping)
        self._targets = [(piece, _tensor(self._view, piece, offset).zero_()) for piece, offset in stored]

    def invalidate(self) -> None:
        """What is in it does not count from now on."""
        os.pwrite(self._file, _UNSEALED, _FIXED.size)
        self.age = (-1, -1)

    def seal(self, head: Head, plain: bytes, lines: bytes) -> None:
        """The data is in ``targets``: write the rest and, last, the digest that makes it count."""
        parts = (json.dumps(asdict(head)).encode(), self._index, plain, lines)
        fixed = _FIXED.pack(_MAGIC, len(self._view), *map(len, parts))
        tail = b"".join(parts)
        _write(self._file, tail, len(self._view))
        os.pwrite(self._file, fixed, 0)
        os.pwrite(self._file, _digest(fixed, self._view[DATA:], tail), _FIXED.size)
        self.age = head.attempt, head.step

    def close(self) -> None:
        """Let go of it; what is sealed stays."""
        self._targets, self._view = [], memoryview(b"")
        os.close(self._file)


def read_snapshot(path: str) -> Snapshot | None:
    """What is sealed there; None when nothing is. Raises Damaged where it is not what was sealed, or OSError."""
    with map_file(path) as view:
        if len(view) < DATA or view[: len(_MAGIC)] != _MAGIC:
            return None
        digest = view[_FIXED.size : _FIXED.size + _DIGEST_BYTES]
        if digest == _UNSEALED:
            return None
        _, body, *lengths = _FIXED.unpack_from(view)
        end = body + sum(lengths)
        if body < DATA or end > len(view) or digest != _digest(view[: _FIXED.size], view[DATA:body], view[body:end]):
            raise Damaged(f"the snapshot in {path} has other bytes than were sealed")
        parts = []
        for length in lengths:
            parts.append(bytes(view[body : body + length]))
            body += length
        return _decode(path, *parts)


def _decode(path: str, head: bytes, index: bytes, plain: bytes, lines: bytes) -> Snapshot:
    try:
        tensors, pieces = _decode_index(index)
        which = _decode_head(head)
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # sealed by another version of this package
        raise Damaged(f"the snapshot in {path} cannot be read: {error}") from None
    return Snapshot(path=path, head=which, tensors=tensors, pieces=pieces, plain=plain, lines=lines)


def _decode_head(data: bytes) -> Head:
    found = json.loads(data)
    keep = found.pop("keep")
    return Head(**found, keep=None if keep is None else Keep(**keep))


def discard(path: str) -> None:
    """Give its memory back. Raises OSError."""
    os.truncate(path, 0)


def map_file(path: str) -> memoryview:
    """A snapshot's bytes; what is changed in them is nobody else's. Raises OSError."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)) if size else memoryview(b"")


def tensor_in(view: memoryview, stored: Stored) -> torch.Tensor:
    """The tensor that looks into ``view``."""
    return _tensor(view, stored.piece, stored.offset)


def _tensor(view: memoryview, piece: Piece, offset: int) -> torch.Tensor:
    if not piece.nbytes:
        return torch.empty(piece.sizes, dtype=piece.dtype)
    count = math.prod(piece.sizes) * piece.dtype.itemsize
    return torch.frombuffer(view, dtype=torch.uint8, count=count, offset=offset).view(piece.dtype).view(piece.sizes)


def _age(file: int) -> tuple[int, int]:
    """Of what is sealed; whether it is damaged is not looked at."""
    start = os.pread(file, DATA, 0)
    if len(start) < DATA or start[: len(_MAGIC)] != _MAGIC or start[_FIXED.size :][:_DIGEST_BYTES] == _UNSEALED:
        return -1, -1
    _, body, length, *_ = _FIXED.unpack_from(start)
    with suppress(ValueError, TypeError, LookupError, OSError):
        head: dict[str, Any] = json.loads(os.pread(file, length, body))
        return int(head["attempt"]), int(head["step"])
    return -1, -1


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
