"""TrainState: everything that one training run is, but for the world it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic_runner.checkpoint.capture import Stateful
from elastic_runner.data.source import DataSource
from elastic_runner.errors import StateError
from elastic_runner.train.scaler import LossScaler

_TAKEN = ("trainer", "scaler")


class TrainState:
    """Model, optimizer and data, an optional schedule, and any further Stateful by keyword (EMA, metrics, ...).

    A further Stateful must be the same on every rank, or sharded as DTensors: a checkpoint holds rank 0's.

    ``step`` counts finished optimizer steps. Random numbers need no state: they are keyed by seed, step and shard.
    Raises StateError for a keyword that is taken, or without ``state_dict``/``load_state_dict``.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: DataSource,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        **others: Stateful,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.schedule = schedule
        self.scaler = LossScaler()
        self.step = 0
        self.begun_at = 0
        """The step at which this attempt began."""
        self.agreed_at: int | None = None
        """The last step after which all replicas were found the same; None: not compared yet."""
        for name, other in others.items():
            if name in _TAKEN:
                raise StateError(f"the name {name!r} is taken by a part of every TrainState; use another keyword")
            if not hasattr(other, "state_dict") or not hasattr(other, "load_state_dict"):
                raise StateError(f"{name} has no state_dict/load_state_dict and cannot be part of a checkpoint")
        self._others = others

    def others(self) -> dict[str, Stateful]:
        """All parts but model and optimizer, by name."""
        parts: dict[str, Stateful] = {"trainer": _Position(self), "data": self.data, "scaler": self.scaler}
        if self.schedule is not None:
            parts["schedule"] = self.schedule
        return {**parts, **self._others}


class _Position:
    """The step count as a Stateful."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._state.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.step = state["step"]
