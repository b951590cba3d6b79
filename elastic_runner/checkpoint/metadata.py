"""DCP's ``.metadata``: what is in a sharded checkpoint and where. Stock DCP reads what is written here.

It is a pickle, which pickled.py reads. Private names of torch, read in 2.13: ``filesystem._StorageInfo`` (where an item
lies) and the pickled ``Metadata``; tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from elastic_runner.checkpoint.archive import UNREADABLE, first_line
from elastic_runner.checkpoint.layout import DataFile
from elastic_runner.checkpoint.pickled import unpickled
from elastic_runner.errors import Damaged, NotData

METADATA = ".metadata"


def make_metadata(files: Iterable[DataFile], plain: Mapping[str, tuple[str, int, int]]) -> Metadata:
    """Metadata of a checkpoint. ``plain``: file name, offset and length of each piece of plain data by key."""
    entries: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for placed in file.pieces:
            piece = placed.piece
            entry = entries.setdefault(
                piece.key,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=piece.dtype), size=torch.Size(piece.shape), chunks=[]
                ),
            )
            offsets = torch.Size(piece.offsets)
            index = MetadataIndex(piece.key, offsets, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.sizes)))
            where[index] = _StorageInfo(file.name, placed.offset, placed.length)
    for key, (name, offset, length) in plain.items():
        entries[key] = BytesStorageMetadata()
        where[MetadataIndex(key)] = _StorageInfo(name, offset, length)
    return Metadata(state_dict_metadata=entries, storage_data=where, storage_meta=StorageMeta())


def parse_metadata(data: bytes, where: str, names: Container[str] | None = None) -> Metadata:
    """Read and check it. ``names``: of the checkpoint's files, where they are known. Raises NotData, Damaged."""
    try:
        metadata = unpickled(data)
    except NotData as error:
        raise NotData(f"{where}: {error}") from None
    except (pickle.UnpicklingError, MemoryError, ImportError, *UNREADABLE) as error:
        raise Damaged(f"{where} cannot be read: {first_line(error)}") from error
    for info in metadata.storage_data.values():
        if names is not None and info.relative_path not in names:
            raise Damaged(f"{info.relative_path} is asked for by {where} but not named by the manifest")
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(metadata, key, entry, where)
    return metadata


def plain_in(metadata: Metadata) -> dict[str, dict[str, slice]]:
    """Where the plain data lie: places by key, by file."""
    found: dict[str, dict[str, slice]] = {}
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            found.setdefault(info.relative_path, {})[index.fqn] = slice(info.offset, info.offset + info.length)
    return found


def _check_chunks(metadata: Metadata, key: str, entry: TensorStorageMetadata, where: str) -> None:
    """Raise Damaged unless the chunks cover the tensor exactly, and it is known where each of them lies."""
    boxes = [Box(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    dimensions, volume = len(entry.size), sum(math.prod(box.sizes) for box in boxes)
    fit = all(
        len(box.offsets) == len(box.sizes) == dimensions
        and all(first + length <= size for first, length, size in zip(*box, entry.size, strict=True))
        for box in boxes
    )
    filled = [box for box in boxes if math.prod(box.sizes)]
    if not fit or volume != math.prod(entry.size) or _overlap(filled):
        raise Damaged(f"{where}: {key}: its parts are not the whole of it")
    for box in filled:
        if MetadataIndex(key, box.offsets) not in metadata.storage_data:
            raise Damaged(f"{where}: {key}: it is not said where its part at {list(box.offsets)} is")


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: Sequence[int]
    """Where it begins."""
    sizes: Sequence[int]
    """Its shape."""

    def meets(self, other: Box) -> bool:
        """Whether they have an element in common."""
        sides = zip(*self, *other, strict=True)
        return all(a < b + other_size and b < a + size for a, size, b, other_size in sides)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of them meet; in order along the dimension that tells most of them apart."""
    if len(boxes) < 2:
        return False
    axis = max(range(len(boxes[0].offsets)), key=lambda axis: len({box.offsets[axis] for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        near = [other for other in near if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        if any(box.meets(other) for other in near):
            return True
        near.append(box)
    return False
