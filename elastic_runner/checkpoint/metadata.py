"""DCP's ``.metadata``: what is in a sharded checkpoint and where. Stock DCP reads what is written here.

It is a pickle, so it is read through an allow-list. Private names of torch, read in 2.13: ``filesystem._StorageInfo``
(where an item lies) and the pickled ``Metadata``; tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

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
from elastic_runner.errors import Damaged, NotData
from elastic_runner.storage import Storage

METADATA = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},  # where stock DCP wrote it
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}


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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise NotData(
            f"{METADATA} asks for {module}.{name}, which is not part of checkpoint metadata; it was not loaded"
        )


def read_metadata(storage: Storage, directory: str) -> Metadata:
    """The metadata of a sharded checkpoint. Raises NotData, Damaged."""
    return parse_metadata(storage.read(f"{directory}/{METADATA}"), f"{directory}/{METADATA}")


def parse_metadata(data: bytes, where: str) -> Metadata:
    """Unpickle through the allow-list. Raises NotData, Damaged."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, MemoryError, ImportError, *UNREADABLE) as error:
        raise Damaged(f"{where} cannot be read: {first_line(error)}") from error
    if not isinstance(metadata, Metadata):
        raise Damaged(f"{where} is not checkpoint metadata")
    return metadata
