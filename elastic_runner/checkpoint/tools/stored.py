"""Tensors that still lie in a file: read by rows when they are wanted, never all at once.

``torch.load`` to the meta device reads a torch.save archive's directory and pickle only, and leaves at each storage
where its bytes are (``_checkpoint_offset``). Before 2.11 it does so under FakeTensorMode only, which takes a second to
import. tests/contract/test_checkpoint_export.py fails when torch stops doing so.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from elastic_runner.checkpoint.archive import load_plain, only_data
from elastic_runner.errors import Damaged, StateError
from elastic_runner.storage import Storage

BLOCK = 4 << 20
"""Smaller reads come out of blocks of this size, so that a thousand small tensors are not as many requests."""
_BLOCKS = 4
_OFFSETS_ON_META = torch.__version__ >= "2.11"  # compared as versions, not as text


class RangeFile(io.RawIOBase):
    """A part of a stored file as a stream to seek in; the last blocks are kept."""

    def __init__(self, storage: Storage, path: str, offset: int = 0, length: int | None = None) -> None:
        self.path = path
        self.size = storage.size(path) - offset if length is None else length
        self._storage = storage
        self._offset = offset
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read_at(self, offset: int, length: int) -> bytearray:
        """Exactly ``length`` bytes from ``offset``. Raises Damaged where the file ends before."""
        if length >= BLOCK:
            data = bytearray(self._storage.read_range(self.path, self._offset + offset, length))
        else:
            data = bytearray()
            while len(data) < length:
                number, skip = divmod(offset + len(data), BLOCK)
                part = self._block(number)[skip : skip + length - len(data)]
                if not part:
                    break
                data += part
        if len(data) != length:
            raise Damaged(
                f"{self.path} gave {len(data)} bytes instead of {length}, from byte {offset}: it is cut short"
            )
        return data

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * BLOCK
            length = max(0, min(BLOCK, self.size - start))
            self._blocks[number] = self._storage.read_range(self.path, self._offset + start, length)
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        """Where it stands."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; 0 at the end."""
        length = max(0, min(len(buffer), self.size - self._place))
        buffer[:length] = self.read_at(self._place, length)
        self._place += length
        return length


class Rows(Protocol):
    """Something that has a tensor's rows."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the tensor, contiguous; one that has no dimension is one row."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in an uncompressed file."""

    file: RangeFile
    """Where."""
    offset: int
    """Where its first element is, in bytes."""
    dtype: torch.dtype
    """Its type."""
    shape: tuple[int, ...]
    """Its shape."""
    strides: tuple[int, ...]
    """In elements."""
    conjugated: bool = False
    """Whether what is stored is its conjugate."""
    negated: bool = False
    """Whether what is stored is its negative."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the tensor, contiguous; one that has no dimension is one row."""
        shape, strides = (self.shape, self.strides) if self.shape else ((1,), (1,))
        shape = (stop - start, *shape[1:])
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=self.dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        width = self.dtype.itemsize
        raw = self.file.read_at(self.offset + start * strides[0] * width, span * width)
        values = torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype).as_strided(shape, strides)
        values = values.conj().resolve_conj() if self.conjugated else values
        return (values.neg() if self.negated else values).contiguous()


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor in memory: a small one, or one from a file that can only be read as a whole."""

    tensor: torch.Tensor
    """It."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the tensor, contiguous; one that has no dimension is one row."""
        tensor = self.tensor.detach()
        whole = tensor if tensor.dim() else tensor.reshape(1)
        return whole[start:stop].resolve_conj().resolve_neg().contiguous()


def load_outline(file: RangeFile, where: str) -> Any:
    """What a torch.save archive holds, weights-only, its tensors without their data. Raises NotData, Damaged."""
    stream = cast(Any, io.BufferedReader(file, 1 << 16))
    with only_data(where), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        if _OFFSETS_ON_META:
            return torch.load(stream, map_location="meta", weights_only=True)
        with FakeTensorMode():
            return torch.load(stream, map_location="cpu", weights_only=True)


def stored(file: RangeFile, tensor: torch.Tensor, where: str) -> Rows:
    """A tensor that ``load_outline`` gave. Raises StateError for a kind that has no rows of bytes."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise StateError(f"{where} is a {kind} tensor; only dense ones are read")
    if not is_outline(tensor):
        return HeldTensor(tensor=tensor)
    offset = storage_offset(tensor)
    if offset is None and tensor.numel():
        raise Damaged(f"{where}: {file.path} does not say where its bytes are")
    return StoredTensor(
        file=file,
        offset=(offset or 0) + int(tensor.storage_offset()) * tensor.dtype.itemsize,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        strides=tuple(map(int, tensor.stride())),
        conjugated=tensor.is_conj(),
        negated=tensor.is_neg(),
    )


def is_outline(tensor: torch.Tensor) -> bool:
    """Whether it has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def storage_offset(outline: torch.Tensor) -> int | None:
    """Where in the file the storage is that an outline looks into, in bytes."""
    return getattr(outline.untyped_storage(), "_checkpoint_offset", None)


def with_data(value: Any, file: RangeFile, where: str) -> Any:
    """Plain data that ``load_outline`` gave, the small tensors in it read."""
    if isinstance(value, torch.Tensor):
        count = value.shape[0] if value.dim() else 1
        return stored(file, value, where).rows(0, count).reshape(value.shape)
    if type(value) in (dict, OrderedDict):
        return {key: with_data(item, file, f"{where}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_data(item, file, where) for item in value)
    return value


class ArchivedTensor:
    """A tensor that is a torch.save archive of its own inside a larger file, as DCP keeps them."""

    def __init__(self, storage: Storage, path: str, offset: int, length: int, where: str) -> None:
        self._storage = storage
        self._path = path
        self._offset = offset
        self._length = length
        self._where = where

    def open(self) -> Rows:
        """Read a small one whole, in one request; of a large one only where its bytes are."""
        if self._length <= 8 * BLOCK:
            data = self._storage.read_range(self._path, self._offset, self._length)
            tensor = load_plain(io.BytesIO(data), self._where)
            self._check(tensor)
            return HeldTensor(tensor=tensor)
        file = RangeFile(self._storage, self._path, self._offset, self._length)
        outline = load_outline(file, self._where)
        self._check(outline)
        return stored(file, outline, self._where)

    def _check(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise Damaged(f"{self._where} is a {type(tensor).__name__} instead of a tensor")
