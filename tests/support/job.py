"""A small training job with faults at chosen places, for run_ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.config import CheckpointConfig, DataConfig, FsdpConfig, StrategyConfig, TrainingConfig
from elastic_runner.storage.local import LocalStorage

PHASES = ("forward", "backward", "optimized", "write", "commit", "saved")
"""Where a rank can be killed: in a microbatch, after its backward, after the step, in a save (twice), after it."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL of one rank."""

    rank: int
    step: int
    phase: str


def config(run_dir: str, *, strategy: str = "ddp", steps: int = 24, every: int = 5, **changes: Any) -> er.RunConfig:
    """The job's configuration: 90 samples, global batches of 12 in 6 shards, so epochs end in tails."""
    base = er.RunConfig(
        run_dir=run_dir,
        seed=7,
        training=TrainingConfig(max_steps=steps, clip_norm=1.0),
        data=DataConfig(global_batch=12, shards=6),
        strategy=StrategyConfig(name=strategy, fsdp=FsdpConfig(wrap_classes=("Linear",))),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every=every),
    )
    return replace(base, **changes)


class Net(nn.Module):
    """Dropout, BatchNorm, a tied pair and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.mix = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.mix.weight
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.norm(self.embed(x))), 0.2, self.training)
        return self.head(F.relu(self.tied(F.relu(self.mix(self.frozen(x))))))


def dataset() -> TensorDataset:
    """90 samples of a noisy sum."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(90, 1, generator=generator))


def train(settings: er.RunConfig, kill: Kill | None = None) -> dict[str, Any]:
    """Train; returns what this rank saw: the step it resumed at, and its losses by step."""
    with er.Worker(settings) as worker:
        model = worker.prepare(Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        loader = er.ElasticLoader(dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader, schedule=schedule)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        resumed = checkpointer.restore()
        strike = _striker(kill, worker.rank)
        losses: dict[int, float] = {}
        with _in_saves(strike):
            for step in worker.steps(state):
                for x, y in step.microbatches():
                    loss = F.mse_loss(model(x), y)
                    strike(step.number, "forward")
                    step.backward(loss)
                    strike(step.number, "backward")
                losses[step.number] = step.optimize().loss
                strike(step.number, "optimized")
                checkpointer.maybe_save(step)
                strike(step.number, "saved")
        return {"resumed": resumed, "losses": losses, "attempt": worker.attempt}


def _striker(kill: Kill | None, rank: int) -> Callable[[int, str], None]:
    def strike(step: int, phase: str) -> None:
        if kill is not None and kill == Kill(rank=rank, step=step, phase=phase):
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


@contextmanager
def _in_saves(strike: Callable[[int, str], None]) -> Iterator[None]:
    """Strikes when the first data file of a step is begun ("write") and before the manifest is created ("commit")."""
    writer, create = LocalStorage.writer, LocalStorage.create

    def struck_writer(self: LocalStorage, path: str) -> Any:
        strike(_step(path), "write")
        return writer(self, path)

    def struck_create(self: LocalStorage, path: str, data: bytes) -> None:
        strike(_step(path), "commit")
        create(self, path, data)

    with patch.object(LocalStorage, "writer", struck_writer), patch.object(LocalStorage, "create", struck_create):
        yield


def _step(path: str) -> int:
    """The step whose checkpoint a path belongs to; 0 for other files."""
    return paths.step_number(path.partition("/")[0]) or 0
