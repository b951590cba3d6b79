"""A job that saves as fast as it can until it is killed, for run_ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import elastic_runner as er
from elastic_runner.chaos.faulty_storage import FaultyStorage
from elastic_runner.checkpoint.capture import capture
from elastic_runner.checkpoint.checkpointer import checkpoint_storage
from elastic_runner.config import CheckpointConfig, FsdpConfig, RunConfig, StrategyConfig
from elastic_runner.storage import Storage
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import FinishedStep, FixedData
from tests.support.saving_jobs import small_files

KEEP = 2


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job, and how it ends."""

    world_size: int
    strategy: Literal["ddp", "fsdp"]
    format: Literal["sharded", "full"]
    rank: int
    """The one that strikes."""
    everybody: bool
    """Whether all are killed, or only the one that strikes."""
    change: int | None = None
    """Strike before this change to the storage, counted from 1 after the restore; None: after ``delay``."""
    delay: float = 0
    """Strike so many seconds after the restore."""


class Striking(FaultyStorage):
    """Calls ``strike`` at a change."""

    def __init__(self, inner: Storage, change: int | None, strike: Callable[[], None]) -> None:
        super().__init__(inner)
        self.armed = False
        self._left = change
        self._strike = strike

    def change(self, verb: str, path: str) -> None:
        if not self.armed or self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            self._strike()


def save_until_killed(run_dir: str, start: Start | None) -> int:
    """Restore, check that the state is wholly of one step, then save step after step.

    Every element of the state is the number of its step. With no ``start`` it ends after the check, with that number.
    ``told/restored-RANK`` and ``told/saved-RANK`` say how far a rank has come.
    """
    rank = int(os.environ["RANK"])
    told = Path(run_dir, "told")
    told.mkdir(exist_ok=True)
    strategy = start.strategy if start else "ddp"
    config = RunConfig(
        run_dir=run_dir,
        strategy=StrategyConfig(name=strategy, fsdp=FsdpConfig(wrap_classes=("Linear",))),
        checkpoint=CheckpointConfig(every=1, keep=KEEP, format=start.format if start else "sharded"),
    )
    with small_files(6000), er.Worker(config) as worker:
        pids = worker.coordinator.gather("pids", os.getpid())

        def strike() -> None:
            victims = [pid for pid in pids if pid != os.getpid()] if start is not None and start.everybody else []
            for pid in [*victims, os.getpid()]:
                os.kill(pid, signal.SIGKILL)

        inner = checkpoint_storage(config.checkpoint, run_url=run_dir, run_options={}, seconds=60)
        mine = start is not None and rank == start.rank
        storage = Striking(inner, start.change if start is not None and mine else None, strike)
        state = make_state(worker.prepare)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker, storage=storage)  # type: ignore[arg-type]
        restored = checkpointer.restore()
        check(state, restored)
        tell(told / f"restored-{rank}", restored)
        if start is None:
            return restored
        worker.saved = lambda step: tell(told / f"saved-{rank}", step)  # type: ignore[method-assign]
        storage.armed = True
        if mine and start.change is None:
            threading.Timer(start.delay, strike).start()
        while True:
            state.step += 1
            fill(state)
            checkpointer.maybe_save(FinishedStep(state.step))


def tell(file: Path, step: int) -> None:
    """At once, or not at all."""
    news = file.with_suffix(".new")
    news.write_text(str(step))
    news.replace(file)


def make_state(prepare: Callable[[nn.Module], nn.Module]) -> TrainState:
    """A model and its moments, there from the beginning."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, data=FixedData())  # type: ignore[arg-type]


def fill(state: TrainState) -> None:
    """Make every element, and the position, the number of the step."""
    state.data.position = state.step  # type: ignore[attr-defined]
    with torch.no_grad():
        for tensor in capture(state).tensors.values():
            local(tensor).fill_(state.step)


def check(state: TrainState, step: int) -> None:
    """No tensor, element or position may be of another step."""
    if step == 0:
        return
    found = {"position": {state.data.position}}  # type: ignore[attr-defined]
    for key, tensor in capture(state).tensors.items():
        found[key] = set(local(tensor).flatten().tolist())
    wrong = {key: values for key, values in found.items() if not values <= {step}}
    assert not wrong, f"restored step {step} holds {wrong}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
