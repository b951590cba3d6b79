"""No bit of any kind of tensor changes on its way through a checkpoint or a snapshot; test_checkpoint_export.py has
the files that are exported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.snapshot_plan import Memory
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import SnapshotConfig
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import CheckpointingPlace, FinishedStep, checkpointer, storage_of
from tests.support.exporting import bits_of_training, make_everything
from tests.support.place import NoLines


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_checkpoint(local: CheckpointingPlace, format: str, mode: str) -> None:
    before, after = make_everything(0), make_everything(1)
    wanted = bits_of_training(before)
    checkpointer(before, local, format, mode=mode, every=1).maybe_save(FinishedStep(before.step))
    with torch.no_grad():
        for parameter in before.model.parameters():
            parameter.zero_()  # beside the writing, where that is still going on
    local.background.rest()
    local.attempt += 1
    assert checkpointer(after, local, format).restore() == before.step
    assert bits_of_training(after) == wanted
    assert as_it_lies(after) == as_it_lies(before)


def as_it_lies(state: TrainState) -> list[object]:
    """Two names for one tensor, and what does not lie in one piece."""
    model = state.model
    return [model.a.weight is model.b.weight, model.transposed.stride(), model.view.stride()]  # type: ignore[operator, union-attr]


@pytest.fixture
def memory() -> Iterator[Memory]:
    handles = [os.memfd_create("test") for _ in range(2)]
    yield Memory(files=((f"/proc/{os.getpid()}/fd/{handles[0]}", f"/proc/{os.getpid()}/fd/{handles[1]}"),))
    for handle in handles:
        os.close(handle)


def test_a_snapshot(local: CheckpointingPlace, memory: Memory) -> None:
    def with_memory(state: TrainState) -> Checkpointer:
        settings = SnapshotConfig(every=1)
        local.snapshots = Snapshots(settings, memory, NoLines(), local.coordinator, run="a run", attempt=local.attempt)
        return checkpointer(state, local, every=1000)

    before, after = make_everything(0), make_everything(1)
    taking = with_memory(before)
    local.snapshots.hear([local.snapshots.report()], before.step - 1)
    local.snapshots.begins()
    taking.maybe_save(FinishedStep(before.step))
    local.attempt += 1
    assert with_memory(after).restore() == before.step
    assert storage_of(local).list("") == [], "it came from memory"
    assert bits_of_training(after) == bits_of_training(before)
    assert as_it_lies(after) == as_it_lies(before)
