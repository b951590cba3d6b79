"""Handwritten digits (1,797 images of 8 x 8, shipped inside scikit-learn) with a small convolutional net.

It has BatchNorm, so buffers and evaluation on uneven splits are exercised. Needs the extra: ``pip install
'elastic-runner[digits]'``.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from annotated_types import Gt, MinLen
from pydantic.dataclasses import dataclass
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner.config import STRICT, DataConfig, Positive, TrainingConfig
from elastic_runner.data.order import key_of
from elastic_runner.errors import ConfigError


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DigitsConfig(er.RunConfig):
    """Train a digit classifier."""

    run_dir: Annotated[str, MinLen(1)] = "runs/digits"
    """Directory or fsspec URL of the run, shared by all nodes: summary, ledger, attempts, checkpoints."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(max_steps=120))
    """The optimisation loop."""
    data: DataConfig = field(default_factory=lambda: DataConfig(global_batch=64, shards=8))
    """The global batch."""
    lr: Annotated[float, Gt(0)] = 3e-3
    """Learning rate of AdamW."""
    evaluate_every: Positive = 40
    """Optimizer steps between evaluations."""


class Net(nn.Module):
    """Two convolutions with BatchNorm and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Float [batch, 1, 8, 8] to logits [batch, 10]."""
        return cast(torch.Tensor, self.head(self.dropout(self.features(images).flatten(1))))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation images; about a fifth, an uneven number, is held out. Raises ConfigError."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise ConfigError("this recipe needs scikit-learn: pip install 'elastic-runner[digits]'") from None
    images, labels = load(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    held_out = torch.tensor([key_of("split", index) % 5 == 0 for index in range(len(y))])
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def metric(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Accuracy and loss of each image."""
    images, labels = batch
    logits = model(images)
    return {
        "accuracy": (logits.argmax(dim=1) == labels).float(),
        "loss": F.cross_entropy(logits, labels, reduction="none"),
    }


def main() -> None:
    """Train and evaluate."""
    config = er.load_config(DigitsConfig)
    with er.Worker(config) as worker:
        train, validation = load_digits()
        model = worker.prepare(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        loader = er.ElasticLoader(train, config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for images, labels in step.microbatches():
                step.backward(F.cross_entropy(model(images), labels))
            step.optimize()
            checkpointer.maybe_save(step)
            if step.number % config.evaluate_every == 0 and not step.is_last:
                worker.evaluate(model, validation, metric, batch_size=50)
        if not worker.draining:
            worker.print(worker.evaluate(model, validation, metric, batch_size=50))


if __name__ == "__main__":
    main()
