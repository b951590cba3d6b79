"""Checkpoints of one process, without a worker."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_runner.checkpoint.background import Background
from elastic_runner.checkpoint.checkpointer import Checkpointer, checkpoint_storage
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import Fenced
from elastic_runner.storage import Storage
from elastic_runner.train.state import TrainState
from tests.support.place import SoloPlace


class Thorough(Background):
    """Whoever takes an outcome finds old checkpoints pruned, too."""

    def outcome(self) -> BaseException | None:
        error = super().outcome()
        self.rest()
        return error


class CheckpointingPlace(SoloPlace):
    """Satisfies ``elastic_runner.checkpoint.place.CheckpointPlace``."""

    def __init__(self, url: str, options: dict[str, str] | None = None, *, attempt: int = 1) -> None:
        super().__init__()
        self.run_url = url
        self.storage_options = options or {}
        self.storage_timeout = 60.0
        self.attempt = attempt
        self.fenced = False
        self.told: list[int] = []
        self.not_told: list[tuple[int, str]] = []
        self.background = Thorough(nullcontext)
        self.node = "here"
        self.blame: dict[str, str] = {}

    def check_fence(self) -> None:
        if self.fenced:
            raise Fenced(f"attempt {self.attempt + 1} has taken over this run")

    def prepare_save(self, parts: Any) -> None:
        """One process has nothing to make equal."""

    def before_commit(self) -> None:
        """There is no ledger."""

    def committed(self, step: int) -> None:
        """There is no summary."""

    def saved(self, step: int) -> None:
        self.told.append(step)

    def restored(self, path: str | None, *, attempt: int, step: int, in_memory: bool = False) -> None:
        self.restored_path = path

    def recovered(self, lines: bytes) -> None:
        """There is no ledger."""

    def distrusted(self) -> int:
        return 0

    target = 1_000_000

    def blamed(self) -> dict[str, str]:
        return self.blame

    def not_saved(self, step: int, reason: str, *, skipped: bool) -> None:
        self.not_told.append((step, reason))


@dataclass
class FinishedStep:
    """Satisfies ``elastic_runner.checkpoint.place.FinishedStep``."""

    number: int
    is_last: bool = False
    draining: bool = False
    save_ended: bool = False


class FixedData:
    """A data source that is only its position."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Keeper:
    """A Stateful of whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Net(nn.Module):
    """Something of everything: buffers, tied weights, frozen and never-touched parameters, few rows, no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.two_rows = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 4).requires_grad_(False)
        self.untouched = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.hidden(self.embed(tokens)))
        return self.head(hidden + self.frozen(self.two_rows(hidden)))


def make_state(model: nn.Module | None = None, *, seed: int = 0, **others: Any) -> TrainState:
    """A fresh AdamW state; another seed, other values."""
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return TrainState(model=model, optimizer=optimizer, data=FixedData(), **others)  # type: ignore[arg-type]


def train(state: TrainState, steps: int = 1, features: int | None = None) -> None:
    """Steps on data that depend on the step number only."""
    for _ in range(steps):
        state.step += 1
        generator = torch.Generator().manual_seed(state.step)
        if features is None:
            inputs = torch.randint(0, 6, (8,), generator=generator)
        else:
            inputs = torch.randn(8, features, generator=generator)
        state.optimizer.zero_grad()
        state.model(inputs).float().square().mean().backward()
        state.optimizer.step()
        if state.schedule is not None:
            state.schedule.step()
        state.data.position += 8  # type: ignore[attr-defined]


def checkpointer(
    state: TrainState, place: CheckpointingPlace, format: str = "sharded", **settings: Any
) -> Checkpointer:
    return Checkpointer(CheckpointConfig(format=format, **settings), state, place)  # type: ignore[arg-type]


def storage_of(place: CheckpointingPlace) -> Storage:
    """Where the checkpoints of ``place`` are."""
    return checkpoint_storage(
        CheckpointConfig(), run_url=place.run_url, run_options=place.storage_options, seconds=place.storage_timeout
    )


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the last bit, types and dtypes included."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert (
            one.detach().numpy(force=True).tobytes() == other.detach().numpy(force=True).tobytes()
            if (one.dtype != torch.bfloat16)
            else torch.equal(one.view(torch.int16), other.view(torch.int16))
        ), where
    elif isinstance(one, dict):
        assert set(one) == set(other), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}.{index}")
    else:
        assert one == other, where


def assert_same_training(one: TrainState, other: TrainState) -> None:
    """The same model, optimizer, schedule, scaler, position and step."""
    assert_same(one.model.state_dict(), other.model.state_dict(), "model")
    assert_same(one.optimizer.state_dict(), other.optimizer.state_dict(), "optimizer")
    assert (one.step, list(one.others())) == (other.step, list(other.others()))
    for name, part in one.others().items():
        assert_same(part.state_dict(), other.others()[name].state_dict(), name)
