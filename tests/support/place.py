"""A place for parts that need a worker: of one rank, without process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_runner.coordination import Coordinator


class SoloPlace:
    """Satisfies ``elastic_runner.coordination.Place``."""

    def __init__(self, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.coordinator = Coordinator()
        self.coordinator.rank, self.coordinator.world_size = rank, world_size
        self.checkpoint_coordinator = self.background_coordinator = self.coordinator
        self.device = torch.device("cpu")
        self.attempt = 1
        self.seed = seed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
