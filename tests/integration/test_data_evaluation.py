"""Evaluation among real ranks: each sample counted once, by the model that a checkpoint would hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_runner as er
from elastic_runner.config import StrategyConfig
from tests.support.ranks import RankFailed, run_ranks

LENGTH = 21
BATCH = 5
DATA = [(torch.tensor([float(i), float(i * i % 7)]), i) for i in range(LENGTH)]


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def spoil(model: nn.Module, rank: int) -> None:
    """Running statistics as ranks have them after steps on different data."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.add_(0.5 + rank)


def evaluate(run_dir: str, strategy: str) -> dict[str, Any]:
    config = er.RunConfig(run_dir=run_dir, strategy=StrategyConfig(name=strategy))  # type: ignore[arg-type]
    with er.Worker(config) as worker:
        model = worker.prepare(build())
        spoil(model, worker.rank)
        model.train()
        seen: list[int] = []

        def metric(module: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            inputs, indices = batch
            seen.extend(indices.tolist())
            wrong = (indices == 0).double()
            return {
                "output": module(inputs).squeeze(1),
                "error": wrong,
                "index": indices,
                "one": torch.ones_like(wrong),
            }

        metrics = worker.evaluate(model, DATA, metric, batch_size=BATCH)  # type: ignore[arg-type]
        buffers = {n.removeprefix("module."): b.tolist() for n, b in model.named_buffers()}
        return {"metrics": metrics, "seen": seen, "buffers": buffers, "training": model.training}


def by_hand() -> tuple[float, dict[str, Any]]:
    """The mean output, and the buffers, of rank 0's model without any of this package."""
    model = build()
    spoil(model, 0)
    model.eval()
    with torch.no_grad():
        output = torch.cat([model(DATA[i][0][None]).squeeze(1) for i in range(LENGTH)]).double().mean().item()
    return output, {name: buffer.tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_metric_counts_each_sample_once_at_every_world_size(tmp_path: Path, world_size: int) -> None:
    """c73: 21 samples fill neither the last batch nor every rank. c60: buffers are equal before it begins."""
    ranks = run_ranks(evaluate, world_size, str(tmp_path), "ddp")
    output, buffers = by_hand()
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"]
        assert rank["buffers"] == buffers
        assert rank["training"]
    metrics = ranks[0]["metrics"]
    assert metrics["error"] == 1 / LENGTH
    assert metrics["index"] == sum(range(LENGTH)) / LENGTH
    assert metrics["one"] == 1
    assert metrics["output"] == pytest.approx(output, rel=1e-5)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(LENGTH))


def test_metric_is_the_same_to_the_last_bit_with_sharded_parameters(tmp_path: Path) -> None:
    """c73: a sharded model's ranks repeat a batch where they have none of their own, and that is not counted."""
    (alone,) = run_ranks(evaluate, 1, str(tmp_path / "1"), "ddp")
    sharded = run_ranks(evaluate, 3, str(tmp_path / "3"), "fsdp")
    assert sum(len(rank["seen"]) for rank in sharded) > LENGTH
    for rank in sharded:
        assert rank["metrics"] == alone["metrics"]
        assert rank["buffers"] == alone["buffers"]


def evaluate_on_one_rank(run_dir: str) -> None:
    with er.Worker(er.RunConfig(run_dir=run_dir)) as worker:
        model = worker.prepare(build())
        if worker.rank == 0:
            worker.evaluate(model, DATA, lambda m, b: {"x": m(b[0]).squeeze(1)}, batch_size=BATCH)  # type: ignore[arg-type]
        else:
            worker.on_main(lambda: None)


def test_an_evaluation_on_one_rank_alone_is_noticed_at_once(tmp_path: Path) -> None:
    """Case c15."""
    with pytest.raises(RankFailed, match="evaluation begins") as failed:
        run_ranks(evaluate_on_one_rank, 2, str(tmp_path), timeout=30)
    assert all("LoopError" in text for text in failed.value.errors.values())


def modes_after_evaluation(run_dir: str) -> list[bool]:
    with er.Worker(er.RunConfig(run_dir=run_dir)) as worker:
        model = worker.prepare(build())
        model.train()
        frozen = next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
        frozen.eval()
        worker.evaluate(model, DATA, lambda m, b: {"x": m(b[0]).squeeze(1)}, batch_size=BATCH)  # type: ignore[arg-type]
        return [model.training, frozen.training]


def test_a_layer_frozen_in_eval_mode_stays_so(tmp_path: Path) -> None:
    assert run_ranks(modes_after_evaluation, 1, str(tmp_path)) == [[True, False]]


def refusals(run_dir: str) -> list[str]:
    said = []
    with er.Worker(er.RunConfig(run_dir=run_dir)) as worker:
        model = worker.prepare(build())
        for result in (torch.ones(BATCH), {"x": 1.0}, {"x": torch.ones(())}):
            with pytest.raises(er.errors.LoopError) as refused:
                worker.evaluate(model, DATA, lambda m, b, result=result: result, batch_size=BATCH)  # type: ignore
            said.append(str(refused.value))
    return said


def test_a_metric_that_returns_something_else_is_refused_and_told_why(tmp_path: Path) -> None:
    """A start again would not change it."""
    (said,) = run_ranks(refusals, 1, str(tmp_path))
    assert said[0] == "the metric must return its values by name, not a Tensor"
    assert said[1].endswith("one value per sample, shape [5], not a float")
    assert said[2].endswith("one value per sample, shape [5], not []")
