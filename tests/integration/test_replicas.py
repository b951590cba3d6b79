"""Silent corruption: one bit of one rank's parameters is found, its rank named, and the run goes back behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.storage import LocalStorage
from elastic_runner.train.step import Step, StepResult
from tests.integration.test_exact import difference
from tests.support import job
from tests.support.exact_jobs import ledger
from tests.support.ranks import RankFailed, run_ranks


def train(settings: er.RunConfig, at: int | None = None) -> int:
    """One attempt. After step ``at``, a bit of rank 1's memory is not what it was. Returns the step it resumed at."""
    optimize = Step.optimize

    def corrupted(self: Step) -> StepResult:
        result = optimize(self)
        if self.number == at and self._place.coordinator.rank == 1:
            weight: Any = self._state.optimizer.param_groups[0]["params"][0]
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)  # the last bit: a rounding error
        return result

    with patch.object(Step, "optimize", corrupted):
        return job.train(settings)["resumed"]


def ended(settings: er.RunConfig, world_size: int, *, at: int) -> list[str]:
    """What each rank said of an attempt with a corrupted bit."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(train, world_size, settings, at)
    assert len(failed.value.errors) == world_size
    return [text.strip().splitlines()[-1] for text in failed.value.errors.values()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_flipped_bit_is_found_named_and_undone(world_size: int, tmp_path: Path) -> None:
    """By the comparison that goes with the checkpoint of step 8; that checkpoint is not used."""
    alone = job.config(str(tmp_path / "alone"), strategy="single", determinism="elastic", steps=12, every=4)
    run_ranks(job.train, 1, alone)
    settings = replace(alone, run_dir=str(tmp_path / "hit"), strategy=replace(alone.strategy, name="ddp"))
    for said in ended(settings, world_size, at=6):
        assert "ReplicasDiffer: after step 8" in said and "'embed.weight'" in said and "after step 4" in said
        assert ("of rank 1 on" in said) == (world_size == 3), "of two nobody knows which one is wrong"
    [event] = [line for line in lines(settings) if line["event"] == "replicas"]
    assert (event["after"], event["agreed"], event["certain"]) == (8, 4, world_size == 3)
    assert event["ranks"] == ([1] if world_size == 3 else [0, 1])
    assert run_ranks(train, 2, settings) == [4, 4]
    trusted = {c.manifest.path for c in list_checkpoints(storage(settings)).checkpoints if not c.marks.suspect}
    assert trusted == {paths.manifest(4, 1), paths.manifest(8, 2), paths.manifest(12, 2)}
    assert difference(tmp_path / "alone", tmp_path / "hit") == []
    assert ledger(alone.run_dir) == ledger(settings.run_dir)
    assert not any("divergence" in line for line in lines(settings)), "what the hit attempt did is no measure"


@pytest.mark.parametrize(
    ("strategy", "at", "agreed"),
    [("hsdp", 2, "after step 0"), ("ddp", 6, "after step 5")],
    ids=["replicas of shards", "after the last step"],
)
def test_it_is_found_elsewhere_too(strategy: str, at: int, agreed: str, tmp_path: Path) -> None:
    settings = job.config(str(tmp_path), strategy=strategy, steps=6)
    fsdp = replace(settings.strategy.fsdp, shard_size=1)
    settings = replace(settings, strategy=replace(settings.strategy, fsdp=fsdp))
    for said in ended(settings, 2, at=at):
        assert f"All were the same {agreed}" in said


def lines(settings: er.RunConfig) -> list[dict[str, Any]]:
    files = sorted(Path(settings.run_dir, paths.LEDGER).iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def storage(settings: er.RunConfig) -> LocalStorage:
    return LocalStorage(Path(settings.run_dir, paths.CHECKPOINTS))
