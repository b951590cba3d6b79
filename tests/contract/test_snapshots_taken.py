"""Snapshots of one process: when one is taken, what a state of another shape does, how often they come."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runner.checkpoint import snapshots as module
from elastic_runner.checkpoint.snapshot import read_snapshot
from elastic_runner.checkpoint.snapshot_plan import Memory
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import SnapshotConfig
from tests.support.checkpointing import (
    CheckpointingPlace,
    FinishedStep,
    Keeper,
    assert_same_training,
    checkpointer,
    make_state,
    train,
)
from tests.support.place import NoLines


class Lines(NoLines):
    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, step: int) -> None:
        self.released.append(step)


@pytest.fixture
def files() -> Iterator[tuple[str, str]]:
    handles = [os.memfd_create("test") for _ in range(2)]
    yield f"/proc/{os.getpid()}/fd/{handles[0]}", f"/proc/{os.getpid()}/fd/{handles[1]}"
    for handle in handles:
        os.close(handle)


class Run:
    """A loop of one rank."""

    def __init__(self, place: CheckpointingPlace, files: tuple[str, str], attempt: int = 1, **settings: Any) -> None:
        self.lines = Lines()
        self.files = files
        self.place = place
        place.attempt = attempt
        self.snapshots = place.snapshots = Snapshots(
            SnapshotConfig(**{"every": 1, **settings}), Memory(files=(files,)), self.lines, place.coordinator,
            run="a run", attempt=attempt,
        )  # fmt: skip
        self.kept = Keeper(torch.zeros(3))
        self.state = make_state(seed=attempt, kept=self.kept)
        self.checkpointer = checkpointer(self.state, place, every=1000)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.snapshots.hear([self.snapshots.report()], self.state.step)
            self.snapshots.begins()
            train(self.state)
            self.checkpointer.maybe_save(FinishedStep(self.state.step))

    def held(self) -> list[int]:
        return sorted(found.head.step for path in self.files if (found := read_snapshot(path)) is not None)


def test_two_are_kept_and_the_older_one_is_written_over(local: CheckpointingPlace, files: tuple[str, str]) -> None:
    run = Run(local, files)
    run.step()
    assert run.held() == [1]
    for step in (2, 3, 4):
        run.step()
        assert run.held() == [step - 1, step]


def test_the_next_attempt_does_not_begin_with_the_one_it_came_from(
    local: CheckpointingPlace, files: tuple[str, str]
) -> None:
    for steps in (3, 4):
        run = Run(local, files)
        run.step(steps)
        again = Run(local, files, attempt=2)
        assert again.checkpointer.restore() == steps
        assert_same_training(run.state, again.state)
        again.step()
        assert again.held() == [steps, steps + 1]
        again.snapshots.clear()


def test_a_state_of_another_shape_is_laid_out_anew(local: CheckpointingPlace, files: tuple[str, str]) -> None:
    """The ranks agree on it when the next step begins: until then the lines wait."""
    run = Run(local, files)
    run.step(3)
    run.kept.value = torch.ones(5)
    run.step()
    assert run.held() == [2, 3]
    run.step()
    assert run.held() == [3, 5]
    run.step()
    assert run.lines.released == [-1, 1, 2, 3, 3, 5]
    again = Run(local, files, attempt=2)
    assert again.checkpointer.restore() == 6
    assert torch.equal(again.kept.value, torch.ones(5))


def test_a_save_of_a_state_of_another_shape_has_its_snapshot(local: CheckpointingPlace, files: tuple[str, str]) -> None:
    """Before the checkpoint counts, its step must be on record; and what is on record must be in memory."""
    run = Run(local, files)
    run.step(3)
    run.kept.value = torch.ones(5)
    train(run.state)
    run.checkpointer.save()
    assert run.held() == [3, 4] and run.lines.released[-1] == 4
    run.step()
    assert run.held() == [4, 5]


def test_what_all_ranks_hold_is_not_written_over(local: CheckpointingPlace, files: tuple[str, str]) -> None:
    """Another rank did not take step 3."""
    run = Run(local, files)
    run.step(3)
    behind = run.snapshots.report()._replace(held=2, misfit=True)
    run.snapshots.hear([run.snapshots.report(), behind], 3)
    train(run.state)
    run.checkpointer.maybe_save(FinishedStep(4))
    assert run.held() == [2, 4]


@pytest.mark.parametrize("every", [1, 3])
def test_every_so_many_steps(every: int, local: CheckpointingPlace, files: tuple[str, str]) -> None:
    run = Run(local, files, every=every)
    run.step(7)
    assert run.held() == {1: [6, 7], 3: [4, 7]}[every]


def test_a_save_has_a_snapshot_too(local: CheckpointingPlace, files: tuple[str, str]) -> None:
    run = Run(local, files, every=5)
    run.step(3)
    run.checkpointer.save()
    assert run.held() == [1, 3] and run.lines.released[-1] == 3


def test_what_costs_much_comes_seldom(
    local: CheckpointingPlace, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only moves when something is done: a step takes 1 s, a snapshot 0.25 s."""
    now = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    class Slow(Snapshots):
        def _copy(self, *given: Any) -> bool:
            nonlocal now
            now += 0.25
            return super()._copy(*given)

    monkeypatch.setattr(module, "time", Clock)
    taken = Slow(
        SnapshotConfig(share=0.0625), Memory(files=(files,)), Lines(), local.coordinator, run="r", attempt=1
    )  # fmt: skip
    state, steps = make_state(), []
    for step in range(1, 21):
        taken.hear([taken.report()], step - 1)
        taken.begins()
        train(state)
        now += 1.0
        taken.take(state, nullcontext(), origin=None)
        if taken._held == step:
            steps.append(step)
    # The first two fault their memory in and say nothing of the cost; the third one does.
    assert steps == [1, 2, 3, 7, 11, 15, 19]


def test_no_room_is_said_once(
    local: CheckpointingPlace, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 100)
    run = Run(local, files)
    with caplog.at_level(logging.WARNING):
        run.step(3)
    assert caplog.text.count("no snapshots are taken in memory") == 1
    assert run.held() == [] and [Path(path).stat().st_size for path in files] == [0, 0]


def test_an_error_while_it_is_written_leaves_the_one_before(
    local: CheckpointingPlace, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(local, files)
    run.step(3)

    def broken(*given: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(module, "box", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run.step()
    assert run.held() == [3]
