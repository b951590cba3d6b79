"""BatchNorm's running statistics as a function of the logical shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_runner.coordination import Coordinator
from elastic_runner.errors import ModelError
from elastic_runner.train.statistics import Statistics

SHARDS = 6


class Net(nn.Module):
    """BatchNorm of each kind, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.BatchNorm1d(3)
        self.mean = nn.BatchNorm1d(3, momentum=None)
        self.twice = nn.BatchNorm1d(3, momentum=0.3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.none = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.none(self.frozen(self.twice(2 * self.twice(self.mean(self.usual(x))))))


class Peers(Coordinator):
    """Ranks that have run the other shards."""

    def __init__(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        super().__init__()
        self._around = before, after

    def gather(self, label: str, value: Any) -> list[Any]:
        before, after = self._around
        return [*before, value, *after]


def batches(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, generator=generator) * (i + 1) + i for i in range(SHARDS)]


def run(model: nn.Module, statistics: Statistics, shards: list[torch.Tensor]) -> None:
    for shard in shards:
        statistics.begin()
        model(shard)
        statistics.take()
        model(shard)  # as a recomputation in backward does


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_equals_the_shards_one_after_the_other() -> None:
    """Over three steps; what is computed again does not count."""
    plain, model = Net(), Net()
    statistics = Statistics(model, Coordinator())
    for step in range(3):
        for shard in batches(step):
            plain(shard)
        run(model, statistics, batches(step))
        statistics.finish()
        for name, value in values(plain).items():
            torch.testing.assert_close(values(model)[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert model.usual.num_batches_tracked == 3 * SHARDS and model.twice.num_batches_tracked == 6 * SHARDS


def test_who_runs_which_shard_does_not_matter() -> None:
    alone = Net()
    statistics = Statistics(alone, Coordinator())
    run(alone, statistics, batches())
    statistics.finish()

    parts: list[torch.Tensor] = []

    class Listening(Coordinator):
        def gather(self, label: str, value: Any) -> list[Any]:
            parts.append(value)
            return [value]

    runs = [batches()[:1], batches()[1:4], batches()[4:]]
    for shards in runs:
        model = Net()
        statistics = Statistics(model, Listening())
        run(model, statistics, shards)
        statistics.finish()
    for rank, shards in enumerate(runs):
        model = Net()
        statistics = Statistics(model, Peers(parts[:rank], parts[rank + 1 :]))
        run(model, statistics, shards)
        statistics.finish()
        for name, value in values(alone).items():
            assert torch.equal(values(model)[name], value), name


def test_what_counts_for_nothing_leaves_no_trace() -> None:
    with_extra, without = Net(), Net()
    for model in (with_extra, without):
        statistics = Statistics(model, Coordinator())
        run(model, statistics, batches())
        if model is with_extra:
            statistics.begin()
            model(batches()[-1])
        statistics.finish()
    for name, value in values(without).items():
        assert torch.equal(values(with_extra)[name], value), name


def test_a_module_that_a_shard_leaves_out_stays() -> None:
    model = Net()
    statistics = Statistics(model, Coordinator())
    statistics.begin()
    model.usual(batches()[0])
    statistics.take()
    statistics.finish()
    assert model.usual.num_batches_tracked == 1 and model.mean.num_batches_tracked == 0
    assert torch.equal(model.mean.running_mean, torch.zeros(3)) and torch.equal(model.twice.running_var, torch.ones(3))


def test_statistics_over_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="SyncBatchNorm"):
        Statistics(nn.Sequential(nn.SyncBatchNorm(3)), Coordinator())


@pytest.mark.parametrize("replace", [False, True])
def test_another_buffer_that_changes_is_named(replace: bool) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("uses", torch.zeros(()))
            self.inner.register_buffer("steady", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if replace:
                self.inner.uses = self.inner.uses + 1
            else:
                self.inner.uses += 1
            return super().forward(x)

    model = Counting()
    statistics = Statistics(model, Coordinator())
    statistics.begin()
    model(batches()[0])
    with pytest.raises(ModelError, match=r"inner\.uses"):
        statistics.take()
