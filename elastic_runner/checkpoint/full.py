"""The full format: one file that ``torch.load(..., weights_only=True)`` reads.

``{"model": state dict, "tensors": other tensors by key, "plain": plain data by key}``. It is read through DCP's
planner like the sharded one, so that resharding and strictness are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.archive import only_data
from elastic_runner.checkpoint.capture import Captured, references, unpack
from elastic_runner.checkpoint.image import Filling
from elastic_runner.checkpoint.layout import require_dense
from elastic_runner.checkpoint.plain import check_tree
from elastic_runner.checkpoint.saver import Part, non_finite
from elastic_runner.coordination import Coordinator
from elastic_runner.storage import Storage

FILE = "full.pt"


class FullSaver:
    """Rank 0 keeps a copy of everything on the host; sharded tensors are gathered one by one."""

    def __init__(self, *, main: bool) -> None:
        self._main = main
        self._signature: tuple[Any, ...] | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._captured = Captured()
        self._copied = Filling()

    def fits(self, captured: Captured) -> bool:
        """Whether the copies were made for tensors of these names, types and shapes. Raises StateError."""
        self._signature = captured.signature()
        if self._signature == self._made_for:
            return True
        require_dense(captured.tensors)
        self._shapes = {key: (t.shape, t.dtype) for key, t in captured.tensors.items()}
        return False

    def allocate(self, coordinator: Coordinator) -> None:
        """Make room on rank 0."""
        self._copies, self._made_for = {}, None
        coordinator.once("save: buffers", self._make_copies)
        self._made_for = self._signature

    def _make_copies(self) -> None:
        self._copies = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in self._shapes.items()}

    def begin(self, captured: Captured) -> None:
        """The copies wait for new data."""
        self._captured = Captured(plain=captured.plain, trained=captured.trained)
        self._copied.expect()

    def copy(self, captured: Captured) -> None:
        """Gather what is sharded, on every rank; keep it on rank 0."""
        with torch.no_grad():
            for key in sorted(captured.tensors):
                tensor = captured.tensors[key]
                if isinstance(tensor, DTensor):
                    tensor = tensor.full_tensor()
                if self._main:
                    self._copies[key].copy_(tensor)
        self._copied.filled()

    def abandon(self) -> None:
        """No more data will come."""
        self._copied.filled(failed=True)

    def write(self, storage: Storage, directory: str) -> Part:
        """The one file, by rank 0."""
        self._copied.wait()
        if not self._main:
            return Part()
        captured = self._captured
        path = f"{directory}/{FILE}"
        with storage.writer(path) as stream:
            torch.save(whole_state(self._copies, captured.plain), cast(BinaryIO, stream))
        return Part(files=(stream.written(path),), non_finite=non_finite(self._copies.items(), captured.trained))


def whole_state(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """What a full checkpoint holds, from whole tensors by key and plain data."""
    inside = {key for value in plain["model.plain"].values() for key in references(value)}
    model: dict[str, Any] = {
        key.removeprefix("model."): value
        for key, value in tensors.items()
        if key.startswith("model.") and key not in inside
    }
    # The same tensor object under each tied name: stored once, tied again when loaded.
    model.update({alias: model[name] for alias, name in plain["model.aliases"].items()})
    # Extra state as the modules gave it, so that this is the whole of a state dict.
    model.update({name: unpack(value, tensors) for name, value in plain["model.plain"].items()})
    others = {key: value for key, value in tensors.items() if not key.startswith("model.") or key in inside}
    return {"model": model, "tensors": others, "plain": dict(plain)}


class FullFile:
    """A full checkpoint's file, its tensors mapped rather than read."""

    def __init__(self, local: Path, where: str) -> None:
        with only_data(where):
            self._file: dict[str, Any] = torch.load(local, map_location="cpu", weights_only=True, mmap=True)
        check_tree(self._file, where)
        self.plain: dict[str, Any] = dict(self._file["plain"])
        """The plain data by key."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by key."""
        elsewhere = {*self.plain["model.aliases"], *self.plain["model.plain"]}
        model = {f"model.{name}": value for name, value in self._file["model"].items() if name not in elsewhere}
        return {**model, **self._file["tensors"]}

    def metadata(self) -> Metadata:
        """Metadata as DCP would have it: each tensor one chunk."""
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in self.plain}
        for key, value in self.tensors().items():
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * value.dim()), sizes=value.size())
            properties = TensorProperties(dtype=value.dtype)
            entries[key] = TensorStorageMetadata(properties=properties, size=value.size(), chunks=[chunk])
        return Metadata(state_dict_metadata=entries)
