"""A place for parts that need a worker: of one rank, without process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_runner.checkpoint.snapshot_plan import Memory
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import SnapshotConfig
from elastic_runner.coordination import Coordinator


class NoLines:
    """Satisfies ``elastic_runner.checkpoint.snapshots.Lines``: no line ever waits."""

    def hold(self, on: bool) -> None:
        """Nothing."""

    def release(self, step: int) -> None:
        """Nothing."""

    def recent(self) -> bytes:
        return b""


class SoloPlace:
    """Satisfies ``elastic_runner.coordination.Place``."""

    def __init__(self, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.coordinator = Coordinator()
        self.coordinator.rank, self.coordinator.world_size = rank, world_size
        self.checkpoint_coordinator = self.background_coordinator = self.coordinator
        self.device = torch.device("cpu")
        self.attempt = 1
        self.seed = seed
        self.snapshots = Snapshots(SnapshotConfig(), Memory(), NoLines(), self.coordinator, run="", attempt=1)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
