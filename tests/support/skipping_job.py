"""A job with a sample that cannot be read, for a launcher (as a script) and for run_ranks."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, TrainingConfig
from elastic_runner.data.order import samples_at

BATCH, STEPS, LENGTH = 8, 8, 40
(BAD,) = samples_at([3 * BATCH + 5], length=LENGTH, seed=0, epoch=0)
"""In the fourth batch of the first epoch, and in the fifth of the second, which is not reached."""


class Brittle(Dataset[torch.Tensor]):
    """Random numbers."""

    def __init__(self) -> None:
        self._x = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            raise ValueError(f"sample {index} cannot be read")
        return self._x[index]


def train(run_dir: str, loader_workers: int = 0, killed: tuple[int, int] | None = None) -> None:
    """``killed``: SIGKILL of this rank in this step."""
    config = er.RunConfig(
        run_dir=run_dir,
        determinism="elastic",
        training=TrainingConfig(max_steps=STEPS, skip_failing=1),
        data=DataConfig(global_batch=BATCH, shards=4, loader_workers=loader_workers),
        checkpoint=CheckpointConfig(every=2, mode="sync"),
    )
    with er.Worker(config) as worker:
        model = worker.prepare(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = er.TrainState(model=model, optimizer=optimizer, data=er.ElasticLoader(Brittle(), config.data, worker))
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for batch in step.microbatches():
                step.backward(model(batch).square().mean())
            if killed == (worker.rank, step.number):
                os.kill(os.getpid(), signal.SIGKILL)
            step.optimize()
            checkpointer.maybe_save(step)


if __name__ == "__main__":
    train(er.load_config().run_dir, loader_workers=1)
