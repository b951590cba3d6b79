"""What differs by rank: never mixed in a checkpoint, and not the random numbers of a run that asks for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_runner as er
from elastic_runner.config import CheckpointConfig
from tests.support.checkpointing import Keeper
from tests.support.job import Net, config, dataset, train
from tests.support.ranks import run_ranks


def keep(run_dir: str, format: str, steps: int) -> Any:
    settings = config(run_dir, steps=steps, checkpoint=CheckpointConfig(format=format))  # type: ignore[arg-type]
    with er.Worker(settings) as worker:
        model = worker.prepare(Net())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loader = er.ElasticLoader(dataset(), settings.data, worker)
        mine = Keeper({"tensors": [torch.full((4,), worker.rank) for _ in range(6)], "rank": worker.rank})
        state = er.TrainState(model=model, optimizer=optimizer, data=loader, mine=mine)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        checkpointer.restore()
        restored = [int(t[0]) for t in mine.value["tensors"]] + [mine.value["rank"]]
        for step in worker.steps(state):
            for x, y in step.microbatches():
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            step.optimize()
            checkpointer.maybe_save(step)
        return restored


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_a_state_that_differs_by_rank_is_rank_0_s_and_never_a_mixture(format: str, tmp_path: Path) -> None:
    run_ranks(keep, 2, str(tmp_path), format, 2)
    assert run_ranks(keep, 2, str(tmp_path), format, 3) == [[0] * 7, [0] * 7]


def draws(run_dir: str, steps: int) -> list[float]:
    settings = replace(config(run_dir, steps=steps, every=2), determinism="off")
    found = []
    forward = Net.forward

    def drawing(self: Net, x: torch.Tensor) -> torch.Tensor:
        found.append(torch.rand(()).item())
        return forward(self, x)

    Net.forward = drawing  # type: ignore[method-assign]
    train(settings)
    return found


def test_without_determinism_random_numbers_differ_by_rank_and_attempt(tmp_path: Path) -> None:
    first = run_ranks(draws, 2, str(tmp_path), 2)
    second = run_ranks(draws, 2, str(tmp_path), 4)
    everything = [number for attempt in (first, second) for rank in attempt for number in rank]
    assert len(set(everything)) == len(everything) == 2 * 6 + 2 * 6
