"""Kill any worker at any step, change world and strategy between attempts: nothing that is learned changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.data.audit import audit
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.storage import open_storage
from elastic_runner.train.record import read_summary
from tests.support.job import PHASES, Kill, config, train
from tests.support.ranks import RankFailed, run_ranks

STEPS = 24

TOLERANCE = 1e-4
"""Relative difference of losses between worlds: float32 sums in another order, over 24 steps of AdamW."""


def losses_on_record(run_dir: str, options: dict[str, str] | None = None) -> dict[int, float]:
    """The loss curve by the ledger, after an audit of it."""
    storage = open_storage(run_dir, options)
    found = audit(lambda: read_records(storage))
    assert (found.verdict, found.steps) == ("proven", STEPS), found
    records, _ = effective(read_records(storage))
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[int, float]]:
    """Loss curves of runs that nobody disturbs, by world size and strategy."""
    curves = {}
    for world, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
        run_dir = str(tmp_path_factory.mktemp("uninterrupted"))
        run_ranks(train, world, config(run_dir, strategy=strategy, steps=STEPS))
        curves[world, strategy] = losses_on_record(run_dir)
    return curves


def attempt(run_dir: str, world: int, strategy: str, kill: Kill | None, **changes: Any) -> list[Any] | None:
    """One start of the job; None when it ended by the kill."""
    settings = config(run_dir, strategy=strategy, steps=STEPS, **changes)
    if kill is None:
        return run_ranks(train, world, settings, kill)
    with pytest.raises(RankFailed) as failed:
        run_ranks(train, world, settings, kill)
    assert "exit code -9" in failed.value.errors[kill.rank], failed.value
    return None


def random_kill(rng: random.Random, world: int, steps: range) -> Kill:
    """Any rank, any of ``steps``. A save is only met on steps that save, and begun for certain only by rank 0."""
    phase = rng.choice(PHASES)
    if phase in ("write", "commit"):
        return Kill(rank=0, step=rng.choice([s for s in steps if s % 5 == 0 or s == STEPS]), phase=phase)
    return Kill(rank=rng.randrange(world), step=rng.choice(steps), phase=phase)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_kill_any_worker_at_any_step_at_equal_world(
    seed: int, tmp_path: Path, uninterrupted: dict[tuple[int, str], dict[int, float]]
) -> None:
    rng = random.Random(seed)
    strategy = rng.choice(["ddp", "fsdp"])
    kills = [random_kill(rng, 2, steps) for steps in (range(1, 13), range(13, STEPS + 1))]
    print(f"seed {seed}: {strategy}, {kills}")
    run_dir = str(tmp_path)
    for kill in kills:
        attempt(run_dir, 2, strategy, kill)
    results = attempt(run_dir, 2, strategy, None)
    assert results is not None and len({r["resumed"] for r in results}) == 1, "ranks disagree on the step"
    # Bitwise: the same bits of float64 in the ledger.
    assert losses_on_record(run_dir) == uninterrupted[2, strategy]
    summary = read_summary(open_storage(run_dir))
    assert summary is not None and (summary.status, summary.step, summary.restarts) == ("finished", STEPS, 2)


@pytest.mark.parametrize("seed", range(3))
def test_world_and_strategy_change_across_kills(
    seed: int, tmp_path: Path, uninterrupted: dict[tuple[int, str], dict[int, float]]
) -> None:
    """World 1, 2, 3, 1 under DDP, FSDP, DDP, single."""
    rng = random.Random(100 + seed)
    run_dir = str(tmp_path)
    for number, (world, strategy) in enumerate([(1, "ddp"), (2, "fsdp"), (3, "ddp")]):
        kill = random_kill(rng, world, range(1 + 8 * number, 9 + 8 * number))
        print(f"seed {seed}: world {world}, {strategy}, {kill}")
        attempt(run_dir, world, strategy, kill)
    attempt(run_dir, 1, "single", None)
    curve = losses_on_record(run_dir)
    assert curve == pytest.approx(uninterrupted[1, "ddp"], rel=TOLERANCE)


def test_the_oracle_can_fail(tmp_path: Path, uninterrupted: dict[tuple[int, str], dict[int, float]]) -> None:
    """Another seed gives another curve, so equality above means something."""
    run_ranks(train, 1, config(str(tmp_path), steps=STEPS, seed=8))
    assert losses_on_record(str(tmp_path)) != pytest.approx(uninterrupted[1, "ddp"], rel=TOLERANCE)
