"""What a rank takes out of a file in another rank's memory: any part, of any archive, into any target."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elastic_runner.checkpoint.frames import frame
from elastic_runner.checkpoint.peer_memory import PeerFile, Scratch, can_read, readable
from elastic_runner.checkpoint.source import _Copy
from elastic_runner.errors import Damaged

BEFORE = 192
SAVED = torch.arange(24.0).reshape(4, 3, 2)


@pytest.fixture(autouse=True)
def allowed() -> None:
    with readable() as probe:
        if not can_read(probe):
            pytest.skip("this machine lets no process read another one's memory (ptrace_scope, or a container's rules)")


class Planner:
    """Wants everything in one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self.committed = 0

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed += 1


def archive_of(tensor: torch.Tensor, kind: str) -> bytes:
    """As saved here, or by torch.save, which adds a checksum."""
    if kind == "stock":
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getvalue()
    made = frame(tensor.dtype, tuple(tensor.shape))
    return made.head + tensor.numpy().tobytes() + made.tail


def fetch(saved: torch.Tensor, archive: bytes, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    """Copy the box that begins at ``offsets`` out of this process's own memory, which it may always read."""
    held = torch.frombuffer(bytearray(bytes(BEFORE) + archive), dtype=torch.uint8)
    file = PeerFile(pid=os.getpid(), address=held.data_ptr(), size=len(held), scratch=Scratch())
    index = MetadataIndex("w", torch.Size([0] * saved.dim()), 0)
    chunk = ChunkStorageMetadata(torch.Size([0] * saved.dim()), saved.shape)
    entry = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), saved.shape, [chunk])
    metadata = Metadata({"w": entry}, storage_data={index: _StorageInfo("f", BEFORE, len(archive))})
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([0] * saved.dim()),
        storage_index=index,
        storage_offsets=torch.Size(offsets),
        lengths=target.shape,
    )
    planner: Any = Planner(target)
    _Copy({"f": [item]}, metadata, planner)("f", file)
    assert planner.committed == 1


TARGETS = {
    "whole": (0, 4, slice(0, 3), torch.float32, True),
    "rows": (1, 2, slice(0, 3), torch.float32, True),
    "columns": (1, 3, slice(1, 3), torch.float32, True),
    "another type": (1, 3, slice(0, 3), torch.bfloat16, True),
    "not in one piece": (1, 3, slice(0, 3), torch.float32, False),
}


@pytest.mark.parametrize("kind", ["frame", "stock"])
@pytest.mark.parametrize("how", TARGETS)
def test_what_is_asked_for_comes(how: str, kind: str) -> None:
    row, rows, columns, dtype, dense = TARGETS[how]
    wanted = SAVED[row : row + rows, columns]
    around = torch.full((*wanted.shape[:-1], 2 if dense else 4), -1.0, dtype=dtype)
    fetch(SAVED, archive_of(SAVED, kind), (row, columns.start, 0), around[..., :2])
    assert torch.equal(around[..., :2], wanted.to(dtype))
    assert bool((around[..., 2:] == -1).all())


@pytest.mark.parametrize("kind", ["frame", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number(dtype: torch.dtype, kind: str) -> None:
    saved, target = torch.tensor(7.5), torch.tensor(0.0, dtype=dtype)
    fetch(saved, archive_of(saved, kind), (), target)
    assert target.item() == 7.5


def test_what_is_no_archive_is_damaged() -> None:
    with pytest.raises(Damaged):
        fetch(SAVED, bytes(len(archive_of(SAVED, "frame"))), (0, 0, 0), torch.zeros_like(SAVED))
