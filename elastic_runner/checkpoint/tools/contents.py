"""What a checkpoint or an exported file holds, without a model: names, shapes and plain data at once, bytes by rows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from elastic_runner.checkpoint.capture import references
from elastic_runner.checkpoint.plain import check_tree
from elastic_runner.checkpoint.tools.stored import (
    ArchivedTensor,
    HeldTensor,
    RangeFile,
    Rows,
    load_outline,
    stored,
    with_data,
)
from elastic_runner.errors import Damaged
from elastic_runner.storage import Storage

BAND_BYTES = 16 << 20
"""Bytes of a tensor that are in memory at a time."""

MODEL = "model."
ALIASES = "model.aliases"
EXTRA_STATE = "model.plain"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor that lies in one place."""

    offsets: tuple[int, ...]
    """Where it begins in the tensor."""
    sizes: tuple[int, ...]
    """Its own shape."""
    file: str
    """The file it is in."""
    source: Rows | ArchivedTensor
    """Who reads it."""

    @property
    def first_row(self) -> int:
        """Its first row; one without dimensions has one row."""
        return self.offsets[0] if self.offsets else 0

    @property
    def end_row(self) -> int:
        """One past its last row."""
        return self.first_row + (self.sizes[0] if self.sizes else 1)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor and the boxes that it is kept in."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """Its type."""
    boxes: tuple[Box, ...]
    """They cover it."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.numel * self.dtype.itemsize

    @property
    def count(self) -> int:
        """Rows; one without dimensions has one."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Tensors and plain data by the keys that ``capture`` gives them."""

    tensors: dict[str, Entry]
    """By key."""
    plain: dict[str, Any]
    """By key, packed as ``capture.pack`` does."""
    _held: OrderedDict[int, Rows] = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def inside(self) -> set[str]:
        """Keys of tensors inside a module's extra state, which are no entries of a state dict themselves."""
        return {key for value in self.plain.get(EXTRA_STATE, {}).values() for key in references(value)}

    def only_model(self) -> Contents:
        """The weights, and what belongs to them."""
        return Contents(
            tensors={key: entry for key, entry in self.tensors.items() if key.startswith(MODEL)},
            plain={key: self.plain.get(key, {}) for key in (ALIASES, EXTRA_STATE)},
        )

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor, contiguous. Raises Damaged where a file holds something else."""
        entry = self.tensors[key]
        shape = (stop - start, *entry.shape[1:])
        boxes = [box for box in entry.boxes if box.first_row < stop and box.end_row > start]
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=entry.dtype)
        if len(boxes) == 1 and boxes[0].sizes[1:] == entry.shape[1:]:
            return self._part(key, entry, boxes[0], start, stop)
        result = torch.zeros(shape, dtype=entry.dtype)
        for box in boxes:
            first, end = max(start, box.first_row), min(stop, box.end_row)
            target = result[first - start : end - start]
            for dimension in range(1, len(shape)):
                target = target.narrow(dimension, box.offsets[dimension], box.sizes[dimension])
            target.copy_(self._part(key, entry, box, first, end))
        return result

    def _part(self, key: str, entry: Entry, box: Box, start: int, stop: int) -> torch.Tensor:
        source = box.source
        if isinstance(source, ArchivedTensor):
            source = self._opened(source)
        part = source.rows(start - box.first_row, stop - box.first_row)
        if part.dtype != entry.dtype or part.shape != (stop - start, *box.sizes[1:]):
            raise Damaged(f"{key}: {box.file} holds {list(part.shape)} {part.dtype}, not what its metadata says")
        return part

    def _opened(self, source: ArchivedTensor) -> Rows:
        """An archive, read at most once for all bands in it: the last few are kept."""
        number = id(source)
        if number not in self._held:
            self._held[number] = source.open()
            size = sum(h.tensor.nbytes for h in self._held.values() if isinstance(h, HeldTensor))
            while size > 2 * BAND_BYTES and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                size -= dropped.tensor.nbytes if isinstance(dropped, HeldTensor) else 0
        self._held.move_to_end(number)
        return self._held[number]

    def bands(self, key: str, limit: int = BAND_BYTES) -> Iterator[torch.Tensor]:
        """All rows of a tensor, a few at a time."""
        for start, stop in bands(self.tensors[key], limit=limit):
            yield self.rows(key, start, stop)


def bands(*entries: Entry, limit: int = BAND_BYTES) -> Iterator[tuple[int, int]]:
    """Runs of rows of tensors of one shape: at most ``limit`` bytes each where a row allows it, and within one box."""
    entry = entries[0]
    if entry.numel == 0:
        return
    step = max(1, limit * entry.count // max(entry.nbytes for entry in entries))
    cuts = {box.first_row for entry in entries for box in entry.boxes}
    for first, end in pairwise(sorted({0, entry.count} | cuts)):
        for start in range(first, end, step):
            yield start, min(start + step, end)


def sharded_contents(storage: Storage, directory: str, metadata: Metadata, plain: Mapping[str, Any]) -> Contents:
    """What a directory in DCP layout holds beside plain data; "" is the storage itself."""
    below = f"{directory}/" if directory else ""
    tensors = {
        key: _sharded_entry(storage, below, key, about, metadata)
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    return Contents(tensors=tensors, plain=dict(plain))


def _sharded_entry(storage: Storage, below: str, key: str, about: TensorStorageMetadata, metadata: Metadata) -> Entry:
    boxes: list[Box] = []
    for chunk in about.chunks:
        if not chunk.sizes.numel():
            continue
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        name = info.relative_path
        source = ArchivedTensor(storage, below + name, info.offset, info.length, f"{name}: {key}")
        boxes.append(Box(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=name, source=source))
    return Entry(shape=tuple(about.size), dtype=about.properties.dtype, boxes=tuple(boxes))


def full_contents(file: RangeFile, tree: Mapping[str, Any]) -> Contents:
    """What a file in the full format holds; ``tree`` as ``load_outline`` gave it. Raises Damaged, StateError."""
    check_tree(tree, file.path)
    plain = with_data(tree["plain"], file, "plain")
    elsewhere = {*plain[ALIASES], *plain[EXTRA_STATE]}
    found = {MODEL + name: value for name, value in tree["model"].items() if name not in elsewhere}
    found.update(tree["tensors"])
    return Contents(tensors={key: whole_entry(file, value, key) for key, value in found.items()}, plain=plain)


def whole_entry(file: RangeFile, outline: torch.Tensor, key: str) -> Entry:
    """An entry of one box."""
    if not isinstance(outline, torch.Tensor):
        raise Damaged(f"{file.path}: {key} is a {type(outline).__name__} instead of a tensor")
    shape = tuple(outline.shape)
    box = Box(offsets=(0,) * len(shape), sizes=shape, file=file.path, source=stored(file, outline, key))
    return Entry(shape=shape, dtype=outline.dtype, boxes=(box,))


def open_full(storage: Storage, path: str) -> Contents:
    """What a full checkpoint's file holds, only its directory and plain data read. Raises NotData, Damaged."""
    file = RangeFile(storage, path)
    return full_contents(file, load_outline(file, path))
