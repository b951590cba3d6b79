"""The same kills with everything on an object store: run directory, ledger and checkpoints on s3://."""

from __future__ import annotations

import random

import pytest

from elastic_runner.config import CheckpointConfig
from tests.chaos.test_kills import STEPS, TOLERANCE, losses_on_record
from tests.support.job import Kill, config, train
from tests.support.ranks import RankFailed, run_ranks
from tests.support.s3 import S3


@pytest.mark.s3
@pytest.mark.parametrize("seed", range(2))
def test_kills_and_resizes_on_s3(seed: int, s3: S3, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(200 + seed)
    reference = str(tmp_path_factory.mktemp("uninterrupted"))
    run_ranks(train, 1, config(reference, steps=STEPS))
    run_dir = s3.url
    checkpoint = CheckpointConfig(every=5, options=s3.options, format=rng.choice(["sharded", "full"]))
    for number, (world, strategy) in enumerate([(2, "ddp"), (2, "fsdp"), (1, "single")]):
        settings = config(run_dir, strategy=strategy, steps=STEPS, storage_options=s3.options, checkpoint=checkpoint)
        if number == 2:
            run_ranks(train, world, settings)
            break
        kill = Kill(rank=rng.randrange(world), step=rng.randrange(6 + 8 * number, 14 + 8 * number), phase="optimized")
        print(f"seed {seed}: {checkpoint.format}, world {world}, {strategy}, {kill}")
        with pytest.raises(RankFailed):
            run_ranks(train, world, settings, kill)
    assert losses_on_record(run_dir, s3.options) == pytest.approx(losses_on_record(reference), rel=TOLERANCE)
