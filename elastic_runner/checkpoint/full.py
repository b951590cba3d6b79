"""The full format: one file that ``torch.load(..., weights_only=True)`` reads.

``{"model": state dict, "tensors": other tensors by key, "plain": plain data by key}``. It is read through DCP's
planner like the sharded one, so that resharding and strictness are the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from elastic_runner.checkpoint.capture import Captured, references, unpack
from elastic_runner.checkpoint.reader import Reader, done
from elastic_runner.checkpoint.sharded import only_data, place
from elastic_runner.storage import Storage, Written

FILE = "full.pt"


def gather_full(captured: Captured, *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, gathered one by one and kept only where ``keep``. Collective."""
    whole: dict[str, torch.Tensor] = {}
    for key in sorted(captured.tensors):
        tensor = captured.tensors[key]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            copy = tensor.detach().cpu()
            whole[key] = copy.clone() if copy.untyped_storage().nbytes() != copy.nbytes else copy
    return whole


def write_full(storage: Storage, directory: str, captured: Captured, whole: dict[str, torch.Tensor]) -> list[Written]:
    """Write the one file; on global rank 0 only."""
    inside = {key for value in captured.plain["model.plain"].values() for key in references(value)}
    model: dict[str, Any] = {
        key.removeprefix("model."): value
        for key, value in whole.items()
        if key.startswith("model.") and key not in inside
    }
    # The same tensor object under each tied name: stored once, tied again when loaded.
    model.update({alias: model[name] for alias, name in captured.plain["model.aliases"].items()})
    # Extra state as the modules gave it, so that this is the whole of a state dict.
    model.update({name: unpack(value, whole) for name, value in captured.plain["model.plain"].items()})
    others = {key: value for key, value in whole.items() if not key.startswith("model.") or key in inside}
    path = f"{directory}/{FILE}"
    with storage.writer(path) as stream:
        torch.save({"model": model, "tensors": others, "plain": captured.plain}, cast(BinaryIO, stream))
    return [stream.written(path)]


class FullReader(Reader):
    """Presents a full checkpoint to DCP as tensors of one chunk each."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._path = f"{directory}/{FILE}"
        self._open = ExitStack()
        self._file: dict[str, Any] | None = None

    def plain(self, metadata: Metadata) -> dict[str, Any]:
        """The plain data by key; no tensor is read."""
        return dict(self._load()["plain"])

    def close(self) -> None:
        """Let go of the file."""
        self._file = None
        self._open.close()

    def _load(self) -> dict[str, Any]:
        """The file, its tensors mapped rather than read."""
        if self._file is None:
            local = self._open.enter_context(self._storage.local_copy(self._path))
            with only_data(self._path):
                self._file = torch.load(local, map_location="cpu", weights_only=True, mmap=True)
        return cast(dict[str, Any], self._file)

    def _tensors(self) -> dict[str, torch.Tensor]:
        file = self._load()
        elsewhere = {*file["plain"]["model.aliases"], *file["plain"]["model.plain"]}
        model = {f"model.{name}": value for name, value in file["model"].items() if name not in elsewhere}
        return {**model, **file["tensors"]}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata made up from the file."""
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in self._load()["plain"]}
        for key, value in self._tensors().items():
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * value.dim()), sizes=value.size())
            properties = TensorProperties.create_from_tensor(value)
            entries[key] = TensorStorageMetadata(properties=properties, size=value.size(), chunks=[chunk])
        return Metadata(state_dict_metadata=entries)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the asked-for parts out of the mapped file."""
        tensors = self._tensors()
        for item in plan.items:
            place(planner, item, tensors[item.storage_index.fqn])
        return done(None)
