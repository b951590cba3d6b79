"""Kill workers over and over, with the state in memory that outlives them: no committed step is done again."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.config import CheckpointConfig, SnapshotConfig
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.environment import SNAPSHOTS
from elastic_runner.launch.memory import NodeMemory
from elastic_runner.storage import open_storage
from elastic_runner.train.record import read_summary
from tests.chaos.test_kills import STEPS, TOLERANCE, losses_on_record, random_kill
from tests.support.job import Kill, config
from tests.support.job import train as train_undisturbed
from tests.support.ranks import RankFailed, run_ranks
from tests.support.s3 import S3
from tests.support.snapshot_jobs import WINDOWS, train_in_memory

KILLS = 5
SAVE_EVERY = 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[int, float]]:
    curves = {}
    for world, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
        run_dir = str(tmp_path_factory.mktemp("undisturbed"))
        run_ranks(train_undisturbed, world, config(run_dir, strategy=strategy, steps=STEPS))
        curves[world, strategy] = losses_on_record(run_dir)
    return curves


def any_kill(rng: random.Random, world: int, steps: range, *, around_snapshots: bool) -> Kill:
    """Any rank, step and place; of those around a snapshot where each step has one."""
    if around_snapshots and rng.random() < 0.5:
        return Kill(rank=rng.randrange(world), step=rng.choice(steps), phase=rng.choice(WINDOWS))
    if not any(step % 5 == 0 or step == STEPS for step in steps):
        return Kill(rank=rng.randrange(world), step=rng.choice(steps), phase="saved")
    return random_kill(rng, world, steps)


def committed(run_dir: Path) -> tuple[int, int]:
    """The newest step on record, and how many were lost so far."""
    records, lost = effective(read_records(open_storage(str(run_dir))))
    return max((r["step"] for r in records if r["event"] == "step"), default=0), lost


@pytest.mark.parametrize("every", [1, 3, None])
@pytest.mark.parametrize("seed", range(2))
def test_no_committed_step_is_done_again(
    seed: int, every: int | None, tmp_path: Path, reference: dict[tuple[int, str], dict[int, float]]
) -> None:
    rng = random.Random(f"{seed} {every}")
    strategy, changing = rng.choice(["ddp", "fsdp"]), rng.random() < 0.3
    settings = config(
        str(tmp_path), strategy=strategy, steps=STEPS, snapshot=SnapshotConfig(every=every),
        checkpoint=CheckpointConfig(every=SAVE_EVERY, format=rng.choice(["sharded", "full"])),  # type: ignore[arg-type]
    )  # fmt: skip
    memory = NodeMemory(2)
    node = memory.variables()[SNAPSHOTS]
    try:
        done = 0
        for _ in range(KILLS):
            first = done + 1 + (every or SAVE_EVERY)  # so far memory may be ahead of the record
            if first > STEPS:
                break
            world = rng.choice([1, 2]) if changing else 2
            kill: Any = any_kill(rng, world, range(first, min(first + 4, STEPS) + 1), around_snapshots=every == 1)
            print(f"seed {seed}, every {every}, {settings.checkpoint.format}: {strategy} {world} after {done}: {kill}")
            with pytest.raises(RankFailed) as failed:
                run_ranks(train_in_memory, world, settings, [node] * world, kill)
            assert "exit code -9" in failed.value.errors[kill.rank], failed.value
            before, (done, lost) = done, committed(tmp_path)
            assert lost == 0 and done >= before
        run_ranks(train_in_memory, 2, settings, [node] * 2, None)
        assert [Path(file).stat().st_size for file in node.split(os.pathsep)] == [0] * 4
    finally:
        memory.close()
    curve = losses_on_record(str(tmp_path))
    summary = read_summary(open_storage(str(tmp_path)))
    assert summary is not None and (summary.status, summary.lost_steps) == ("finished", 0)
    if changing:
        assert curve == pytest.approx(reference[1, "ddp"], rel=TOLERANCE)
    else:
        assert curve == reference[2, strategy]


@pytest.mark.s3
def test_lines_that_an_object_store_has_not_got_yet_are_not_lost(
    s3: S3, reference: dict[tuple[int, str], dict[int, float]]
) -> None:
    """Its ledger comes in pieces, one at each save; there is none here before the last one."""
    settings = config(
        s3.url, steps=STEPS, snapshot=SnapshotConfig(every=1), checkpoint=CheckpointConfig(every=100),
        storage_options=s3.options,
    )  # fmt: skip
    memory = NodeMemory(2)
    node = memory.variables()[SNAPSHOTS]
    try:
        for kill in (Kill(rank=0, step=7, phase="sealed"), Kill(rank=1, step=12, phase="released")):
            with pytest.raises(RankFailed):
                run_ranks(train_in_memory, 2, settings, [node] * 2, kill)
        run_ranks(train_in_memory, 2, settings, [node] * 2, None)
    finally:
        memory.close()
    assert losses_on_record(s3.url, s3.options) == reference[2, "ddp"]
