"""The sharded format: torch's DCP layout (``__<n>_0.distcp`` and ``.metadata``), over our storage.

Stock DCP reads what is written here. Its own writer is not used since it swallows a writer thread's error, and its
own reader unpickles ``.metadata`` freely. Private names of torch, read in 2.13: ``filesystem._StorageInfo`` (where
an item lies) and the pickled ``Metadata``; tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from elastic_runner.checkpoint.reader import Reader, done
from elastic_runner.errors import Damaged, NotData
from elastic_runner.storage import Storage, Written
from elastic_runner.storage.protocol import DigestWriter

METADATA = ".metadata"

# What torch's weights-only unpickler says of a global, a call or an object that is not data. Operand 149 opens every
# pickle of protocol 4 and later, which torch.save never writes.
_NAMES_CODE = re.compile(
    r"(?=Unsupported (?:global|class)|Trying to (?:load|instantiate|call)|Can only (?:build|create)"
    r"|Unsupported operand 149)"
)

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
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}


class ShardedWriter(StorageWriter):
    """Writes one data file per rank that has something to write, then ``.metadata`` by the coordinator."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._files: list[Written] = []

    @property
    def files(self) -> list[Written]:
        """What this rank has written, paths as given to the storage."""
        return self._files

    def reset(self, checkpoint_id: Any = None) -> None:
        """Part of DCP's protocol; a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's file."""
        return [replace(plan, storage_data=f"__{number}_0.distcp") for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items one after the other; any error is raised."""
        results: list[WriteResult] = []
        if plan.items:
            name = plan.storage_data
            path = f"{self._directory}/{name}"
            with self._storage.writer(path) as stream:
                for item in plan.items:
                    start = stream.tell()
                    _write(planner.resolve_data(item), item.type, stream)
                    length = stream.tell() - start
                    info = _StorageInfo(name, start, length)
                    results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            self._files.append(stream.written(path))
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``; runs on the coordinator after every rank has written."""
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta()
        path = f"{self._directory}/{METADATA}"
        with self._storage.writer(path) as stream:
            stream.write(pickle.dumps(metadata))
        self._files.append(stream.written(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Chosen by us, never by DCP."""
        return False


def _write(data: torch.Tensor | io.BytesIO, kind: WriteItemType, stream: DigestWriter) -> None:
    if kind == WriteItemType.BYTE_IO:
        stream.write(cast(io.BytesIO, data).getbuffer())
        return
    tensor = cast(torch.Tensor, data).detach().cpu()
    # torch.save writes the whole storage that a view looks into.
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    torch.save(tensor, cast(BinaryIO, stream))


class ShardedReader(Reader):
    """Reads what ShardedWriter has written."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._items: dict[Any, _StorageInfo] = {}

    def plain(self, metadata: Metadata) -> dict[str, Any]:
        """The plain data by key; no tensor is read."""
        result: dict[str, Any] = {}
        for index, info in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                data = self._storage.read_range(f"{self._directory}/{info.relative_path}", info.offset, info.length)
                result[index.fqn] = load_plain(io.BytesIO(data), f"{info.relative_path}: {index.fqn}")
        return result

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Unpickle ``.metadata`` through an allow-list. Raises NotData for anything else."""
        return read_metadata(self._storage, self._directory)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where items lie."""
        self._items = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items file by file, in order of offset."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._items[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self._items[item.storage_index].offset)
            with self._storage.local_copy(f"{self._directory}/{name}") as local, local.open("rb") as file:
                for item in items:
                    info = self._items[item.storage_index]
                    file.seek(info.offset)
                    data = io.BytesIO(file.read(info.length))
                    place(planner, item, load_plain(data, f"{name}: {item.storage_index.fqn}"))
        return done(None)


def place(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    """Copy the part of ``tensor`` that ``item`` asks for to where the planner wants it."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def load_plain(data: io.BytesIO, where: str) -> Any:
    """``torch.load``, weights-only. Raises NotData where code would run, Damaged where nothing can be read."""
    # torch warns of any other protocol than its own; the refusal that follows says more.
    with only_data(where), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(data, map_location="cpu", weights_only=True)


@contextmanager
def only_data(where: str) -> Iterator[None]:
    """Map what a weights-only ``torch.load`` raises: NotData where code would run, Damaged where it is all noise."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # It says which global, class or function it met; bytes that are no pickle at all it cannot name.
        if _NAMES_CODE.search(str(error)):
            reason = _NAMES_CODE.split(str(error), maxsplit=1)[-1].strip().split("\n")[0]
            raise NotData(f"{where} holds more than tensors and plain data and was not loaded: {reason}") from error
        raise Damaged(f"{where} cannot be read: {_first_line(error)}") from error
    except _UNREADABLE as error:
        raise Damaged(f"{where} cannot be read: {_first_line(error)}") from error


_UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise NotData(
            f"{METADATA} asks for {module}.{name}, which is not part of checkpoint metadata; it was not loaded"
        )


def read_metadata(storage: Storage, directory: str) -> Metadata:
    """The metadata of a sharded checkpoint. Raises NotData, Damaged."""
    try:
        metadata = _Unpickler(io.BytesIO(storage.read(f"{directory}/{METADATA}"))).load()
    except (pickle.UnpicklingError, MemoryError, ImportError, *_UNREADABLE) as error:
        raise Damaged(f"{directory}/{METADATA} cannot be read: {_first_line(error)}") from error
    if not isinstance(metadata, Metadata):
        raise Damaged(f"{directory}/{METADATA} is not checkpoint metadata")
    return metadata
