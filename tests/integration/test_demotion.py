"""Case c04: a checkpoint that loads but leads to the same failure again and again is left for an older one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.config import CheckpointConfig, DataConfig, RunConfig, TrainingConfig
from elastic_runner.storage import LocalStorage
from tests.support.ranks import RankFailed, run_ranks


def config_in(run_dir: Path | str, **checkpoint: Any) -> RunConfig:
    return RunConfig(
        run_dir=str(run_dir),
        training=TrainingConfig(max_steps=8),
        data=DataConfig(global_batch=8, shards=4),
        checkpoint=CheckpointConfig(**{"every": 2, "keep": 5, **checkpoint}),
    )


def train(config: RunConfig, fail: Callable[[er.Worker, int, int], None]) -> int:
    """One start; ``fail(worker, restored, step)`` may raise in a step. Returns the step that was restored."""
    dataset = TensorDataset(torch.ones(64, 3))
    with er.Worker(config) as worker:
        model = worker.prepare(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = er.TrainState(model=model, optimizer=optimizer, data=er.ElasticLoader(dataset, config.data, worker))
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        restored = checkpointer.restore()
        for step in worker.steps(state):
            for (x,) in step.microbatches():
                fail(worker, restored, step.number)
                step.backward(model(x).square().mean())
            step.optimize()
            checkpointer.maybe_save(step)
    return restored


def dies_at_5(worker: er.Worker, restored: int, step: int) -> None:
    if step == 5 and restored == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def bad_from_4(worker: er.Worker, restored: int, step: int) -> None:
    """The weights of step 4 are bad; rank 1 notices."""
    if restored == 4 and step == 5 and worker.rank == worker.world_size - 1:
        raise ValueError("diverged")


def always_bad(worker: er.Worker, restored: int, step: int) -> None:
    if step == 5:
        raise ValueError("a bad sample")


def ends(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(run_dir.glob("attempts/*-end.json"))]


def start(run_dir: Path, fail: Callable[[er.Worker, int, int], None], world: int = 1, **checkpoint: Any) -> list[int]:
    return run_ranks(train, world, config_in(run_dir, **checkpoint), fail)


@pytest.mark.parametrize("world", [1, 2])
def test_c04_after_two_failures_the_run_goes_back(tmp_path: Path, world: int) -> None:
    with pytest.raises(RankFailed):
        start(tmp_path, dies_at_5, world, mode="sync")
    assert ends(tmp_path) == [], "a killed attempt says nothing and never counts"
    for _ in range(2):
        with pytest.raises(RankFailed, match="diverged"):
            start(tmp_path, bad_from_4, world)
    assert start(tmp_path, bad_from_4, world) == [2] * world
    told = [(e["attempt"], e["kind"], e["step"], e["restored"], e["rank"]) for e in ends(tmp_path)]
    bad = "step-0000000004/manifest-000001.json"
    assert told == [(n, "ValueError", 5, bad, world - 1) for n in (2, 3)]
    marked = {
        c.manifest.path: c.marks.suspect for c in list_checkpoints(LocalStorage(tmp_path / "checkpoints")).checkpoints
    }
    assert {path for path, suspect in marked.items() if suspect} <= {bad}, "marked, and deleted only by retention"


def test_c04_what_fails_from_everywhere_demotes_one_checkpoint_and_no_more(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        start(tmp_path, dies_at_5, mode="sync")
    for _ in range(7):
        with pytest.raises(RankFailed, match="a bad sample"):
            start(tmp_path, always_bad)
    assert [e["restored"] for e in ends(tmp_path)] == [
        *["step-0000000004/manifest-000001.json"] * 2,
        "step-0000000002/manifest-000001.json",  # and saves step 4 anew
        *["step-0000000004/manifest-000004.json"] * 4,
    ]


def test_demotion_can_be_turned_off(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        start(tmp_path, dies_at_5, mode="sync")
    for _ in range(4):
        with pytest.raises(RankFailed, match="diverged"):
            start(tmp_path, bad_from_4, demote_after=0)
    assert {e["restored"] for e in ends(tmp_path)} == {"step-0000000004/manifest-000001.json"}


def ends_of_worker(run_dir: str) -> None:
    """A failure before the loop, as far as is known then."""
    with er.Worker(config_in(run_dir)) as worker:
        worker.restored("step-0000000004/manifest-000001.json", attempt=1, step=4)
        raise KeyError("data")


def test_a_failure_before_the_first_step_names_no_step(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="data"):
        run_ranks(ends_of_worker, 1, str(tmp_path))
    [told] = ends(tmp_path)
    assert (told["kind"], told["step"], told["restored"]) == ("KeyError", None, "step-0000000004/manifest-000001.json")
