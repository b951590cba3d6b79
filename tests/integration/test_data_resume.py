"""A whole job whose world changes between starts: its ledger proves that every sample was used once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, TrainingConfig
from elastic_runner.data.audit import audit
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import tally
from elastic_runner.storage import open_storage
from tests.support.ranks import RankFailed, run_ranks

LENGTH = 50


class Killed(Exception):
    """Stands for a crash."""


def train(run_dir: str, max_steps: int, killed_after: int | None, loader_workers: int) -> list[tuple[int, int]]:
    """Train on and return (step, sample) of what this rank took; ``killed_after`` that step, before it is saved."""
    config = er.RunConfig(
        run_dir=run_dir,
        training=TrainingConfig(max_steps=max_steps),
        data=DataConfig(global_batch=8, shards=4, loader_workers=loader_workers),
        checkpoint=CheckpointConfig(every=3),
    )
    dataset = TensorDataset(torch.arange(LENGTH, dtype=torch.float32)[:, None])
    taken = []
    with er.Worker(config) as worker:
        model = worker.prepare(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = er.ElasticLoader(dataset, config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for (samples,) in step.microbatches():
                taken += [(step.number, int(sample)) for sample in samples]
                step.backward(model(samples / LENGTH).square().mean())
            step.optimize()
            if step.number == killed_after:
                raise Killed
            checkpointer.maybe_save(step)
    return taken


def killed(run_dir: str, world_size: int, after: int) -> None:
    try:
        run_ranks(train, world_size, run_dir, 20, after, 0)
    except RankFailed as failure:
        assert any("Killed" in text for text in failure.errors.values())
    else:
        raise AssertionError("the job was to be killed")


def test_ledger_of_a_job_that_was_killed_and_resized_shows_each_sample_once(tmp_path: Path) -> None:
    """c48, c49, c50: 2 ranks killed at step 5, 3 at step 10, then 1 with loader processes to the end."""
    killed(str(tmp_path / "run"), 2, 5)
    killed(str(tmp_path / "run"), 3, 10)
    (resumed,) = run_ranks(train, 1, str(tmp_path / "run"), 20, None, 2)
    undisturbed = [part for rank in run_ranks(train, 2, str(tmp_path / "other"), 20, None, 0) for part in rank]

    assert sorted(resumed) == sorted(part for part in undisturbed if part[0] > 9)
    records, lost = effective(read_records(open_storage(str(tmp_path / "run"))))
    counts = tally(records)
    assert (counts.repeated, counts.skipped, counts.gaps) == (0, 0, 0)
    assert (counts.steps, counts.samples) == (20, 160)
    assert lost == 2 + 1
    assert counts.dropped == 3 * (LENGTH % 8)
    assert audit(lambda: read_records(open_storage(str(tmp_path / "run")))).verdict == "proven"
