"""Jobs whose whole outcome is one number, for tests of determinism = "elastic" over run_ranks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.checkpoint.capture import capture
from elastic_runner.config import DataConfig, DdpConfig, FsdpConfig, StrategyConfig, TrainingConfig
from tests.support.ranks import run_ranks


class Block(nn.Module):
    """A residual block with dropout, of odd sizes: no rank's part is a round number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Net(nn.Module):
    """Blocks, BatchNorm with and without momentum, a tied pair, a frozen layer, and one that is never used."""

    def __init__(self, width: int = 19) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.mean = nn.BatchNorm1d(width, momentum=None)
        self.tied = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mean(self.blocks(self.norm(self.embed(x))))
        return self.head(F.relu(self.again(F.relu(self.tied(self.frozen(x))))))


def dataset() -> TensorDataset:
    """400 samples of a noisy sum."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(400, 1, generator=generator))


def config(run_dir: str, *, strategy: str = "ddp", shards: int = 8, steps: int = 12, **changes: Any) -> er.RunConfig:
    """Four samples a shard, clipped, exact."""
    base = er.RunConfig(
        run_dir=run_dir,
        seed=7,
        determinism="elastic",
        training=TrainingConfig(max_steps=steps, clip_norm=1.0),
        data=DataConfig(global_batch=4 * shards, shards=shards),
        strategy=StrategyConfig(
            name=strategy,  # type: ignore[arg-type]
            ddp=DdpConfig(find_unused_parameters=True),
            fsdp=FsdpConfig(wrap_classes=("Block",)),
        ),
    )
    return replace(base, **changes)


def results(jobs: list[er.RunConfig], world_size: int) -> list[str]:
    """Run ``jobs`` one after the other on so many ranks; one digest each, of all that a job has come to."""
    ranks = run_ranks(_train_all, world_size, jobs)
    assert all(rank == ranks[0] for rank in ranks), "replicas and gathered shards are the same on all ranks"
    return [f"{state} {ledger(job.run_dir)}" for state, job in zip(ranks[0], jobs, strict=True)]


def _train_all(jobs: list[er.RunConfig]) -> list[str]:
    return [train(job) for job in jobs]


def train(settings: er.RunConfig) -> str:
    """Train to the end, from the newest checkpoint; a digest of parameters, buffers and the optimizer's state."""
    with er.Worker(settings) as worker:
        model = worker.prepare(Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader = er.ElasticLoader(dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for x, y in step.microbatches():
                step.backward(F.mse_loss(model(x), y))
            step.optimize()
            checkpointer.maybe_save(step)
        return digest(capture(state).tensors)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, each tensor whole."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
        found.update(f"{name} {whole.dtype} {list(whole.shape)}".encode())
        found.update(whole.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def ledger(run_dir: str) -> str:
    """SHA-256 over what each committed step came to, by the lines that stand."""
    lines = {}
    for file in sorted(Path(run_dir, paths.LEDGER).iterdir()):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "step":
                lines[entry["step"]] = [entry[name] for name in ("loss", "grad_norm", "lr", "scale", "updated")]
    return hashlib.sha256(json.dumps(sorted(lines.items())).encode()).hexdigest()
