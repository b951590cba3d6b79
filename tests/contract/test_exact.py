"""determinism = "elastic" learns what every strategy learns, and refuses what it cannot give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_runner as er
from elastic_runner.config import RunConfig, StrategyConfig, TrainingConfig
from elastic_runner.errors import ConfigError, ElasticRunnerError, ModelError, NonFiniteError
from tests.contract.test_strategies import (
    FEATURES,
    BranchNet,
    Case,
    FrozenNet,
    Net,
    ReentrantNet,
    Sequences,
    _train,
    ddp,
    fsdp,
    reference,
    spread,
    whole,
)
from tests.support.ranks import RankFailed, run_ranks

SINGLE = StrategyConfig(name="single")


def exact(case: Case, run_dir: Path) -> RunConfig:
    return replace(spread(case, str(run_dir)), determinism="elastic")


def check_learns(case: Case, world_size: int, run_dir: Path) -> None:
    """All ranks agree to the bit, and with plain torch on the whole batch but for rounding."""
    expected, ranks = reference(case), run_ranks(_train, world_size, case, exact(case, run_dir))
    for got in ranks:
        assert got.losses == ranks[0].losses and got.norms == ranks[0].norms
        for name, value in got.parameters.items():
            assert value.tobytes() == ranks[0].parameters[name].tobytes(), name
    for name, value in expected.parameters.items():
        assert ranks[0].parameters[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
    assert ranks[0].losses == pytest.approx(expected.losses, rel=2e-5)
    assert ranks[0].norms == pytest.approx(expected.norms, rel=2e-5)
    assert ranks[0].graded == sum(p.requires_grad for p in case.model().parameters())


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [(SINGLE, 1), (ddp(), 2), (fsdp(), 1), (fsdp(), 3), (ddp(gradient_as_bucket_view=False), 3)],
    ids=["single", "ddp", "fsdp alone", "fsdp", "ddp, own gradients"],
)
def test_equals_one_process_with_the_whole_batch(strategy: StrategyConfig, world_size: int, tmp_path: Path) -> None:
    """Weighted by tokens, clipped, with a head of one row; four shards."""
    check_learns(Case(strategy=strategy, ragged=True, clip=0.5), world_size, tmp_path)


class Wide(Net):
    """Three megabytes of parameters."""

    def __init__(self) -> None:
        super().__init__(width=500)
        self.front = nn.Linear(FEATURES, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.front(x))


def test_buckets_that_leave_during_backward_do_not_show(tmp_path: Path) -> None:
    """Four of them, on three ranks with runs of unequal length."""
    outcomes = []
    for strategy, world_size in ((SINGLE, 1), (ddp(bucket_cap_mb=1), 3), (ddp(), 2)):
        case = Case(strategy=strategy, model=Wide)
        outcomes += run_ranks(_train, world_size, case, exact(case, tmp_path / f"{world_size}"))
    for outcome in outcomes:
        assert (outcome.losses, outcome.norms) == (outcomes[0].losses, outcomes[0].norms)
        for name, value in outcome.parameters.items():
            assert value.tobytes() == outcomes[0].parameters[name].tobytes(), name


@pytest.mark.parametrize(
    ("strategy", "model", "compiled"),
    [(ddp(), Net, True), (ddp(), FrozenNet, False), (fsdp(), FrozenNet, True)],
    ids=["ddp, compiled", "ddp, frozen", "fsdp, both"],
)
def test_frozen_and_compiled_models(
    strategy: StrategyConfig, model: type[nn.Module], compiled: bool, tmp_path: Path
) -> None:
    check_learns(Case(strategy=strategy, model=model, compiled=compiled, shards=3), 2, tmp_path)


def test_a_branch_that_some_shards_leave_out_needs_no_option_under_ddp(tmp_path: Path) -> None:
    """Its gradient comes from one of two ranks."""
    case = Case(strategy=ddp(), model=BranchNet, shards=2, steps=1)
    check_learns(replace(case, model=BranchNet, shards=1), 1, tmp_path / "all use it")
    first, second = run_ranks(_branching, 2, exact(case, tmp_path / "one uses it"))
    assert first == second and first["used"] != 0


def _branching(config: RunConfig) -> dict[str, float]:
    """One rank's branch is used, the other's is not."""
    with er.Worker(config) as worker:
        model = worker.prepare(BranchNet())
        model.module.uses = worker.rank  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = er.ElasticLoader(Sequences(), config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=data)
        for step in worker.steps(state):
            for x, y, _ in step.microbatches():
                step.backward(((model(x) - y) ** 2).mean())
            grads = {name: p.grad for name, p in model.named_parameters()}
            used = float(grads["module.blocks.1.scale"].abs().sum())  # type: ignore[union-attr]
            step.optimize()
        return {"used": used, **{name: float(whole(p).sum()) for name, p in model.named_parameters()}}


def test_a_branch_that_some_shards_leave_out_is_an_error_under_fsdp(tmp_path: Path) -> None:
    case = Case(strategy=fsdp(), model=BranchNet, shards=4)
    with pytest.raises(RankFailed) as failed:
        run_ranks(_train, 2, case, exact(case, tmp_path))
    assert any("ModelError" in text and "the same ones" in text for text in failed.value.errors.values())


def test_reentrant_recomputation_works_without_ddps_reducer(tmp_path: Path) -> None:
    check_learns(Case(strategy=ddp(), model=ReentrantNet, shards=2), 2, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        (StrategyConfig(name="dp"), "strategy.name='dp'"),
        (fsdp("hsdp"), "strategy.name='hsdp'"),
        (ddp(static_graph=True), "static_graph"),
    ],
)
def test_what_cannot_be_exact_says_what_to_change(strategy: StrategyConfig, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word), er.Worker(exact(Case(strategy=strategy, shards=1), tmp_path)):
        pass


def run_one(model: nn.Module, config: RunConfig, **options: Any) -> None:
    with er.Worker(config) as worker:
        prepared = worker.prepare(model)
        optimizer = torch.optim.AdamW(prepared.parameters(), **options)
        data = er.ElasticLoader(Sequences(), config.data, worker)
        for step in worker.steps(er.TrainState(model=prepared, optimizer=optimizer, data=data)):
            for x, _, _ in step.microbatches():
                step.backward(prepared(x).mean())
            step.optimize()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[..., 0] > 0).long())


@pytest.mark.parametrize(
    ("model", "options", "error", "word"),
    [
        (Net, {"fused": True}, ConfigError, "fused"),
        (Sparse, {}, ModelError, "sparse=False"),
        (lambda: nn.Sequential(nn.Linear(6, 2), nn.SyncBatchNorm(5)), {}, ModelError, "SyncBatchNorm"),
    ],
)
def test_what_does_not_fit_says_what_to_change(
    model: Any, options: dict[str, Any], error: type[ElasticRunnerError], word: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=word):
        run_one(model(), exact(Case(strategy=SINGLE), tmp_path), **options)


def test_a_gradient_that_is_not_finite_stops_every_rank_alike(tmp_path: Path) -> None:
    class Poisoned(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("inf")

    config = exact(Case(strategy=SINGLE), tmp_path)
    with pytest.raises(NonFiniteError, match="gradient norm inf"):
        run_one(Poisoned(), replace(config, training=TrainingConfig(max_steps=1)))


def test_threads_are_pinned(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_one(Net(), exact(Case(strategy=SINGLE, steps=1), tmp_path))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
