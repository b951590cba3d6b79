"""Training jobs whose state is kept in memory that outlives them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import elastic_runner as er
from elastic_runner.checkpoint import snapshots
from elastic_runner.checkpoint.snapshot import SnapshotBuffer
from elastic_runner.environment import SNAPSHOTS
from elastic_runner.train.lines import StepLines
from tests.support import job
from tests.support.checkpoint_jobs import Dump, dump
from tests.support.job import Kill

WINDOWS = ("copying", "sealing", "sealed", "releasing", "released")
"""Where a rank can be killed around a snapshot: half of the data copied, all of it but the digest, the digest there,
before rank 0 puts the line on record, after that."""


@dataclass
class Seen:
    """What a rank has seen."""

    resumed: int
    found: Dump
    """The state that it went on from."""
    states: dict[int, Dump]
    """The state after each step."""
    said: list[str]
    """Log lines of the restore."""
    warned: list[str]
    """Warnings until the end."""


def _take_place(memory: Sequence[str]) -> None:
    """Be a worker of the node with this memory."""
    rank = int(os.environ["RANK"])
    place = memory[:rank].count(memory[rank]), memory.count(memory[rank])
    os.environ.update({SNAPSHOTS: memory[rank], "LOCAL_RANK": str(place[0]), "LOCAL_WORLD_SIZE": str(place[1])})


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def train(
    settings: er.RunConfig, memory: Sequence[str], kill: Kill | None = None, fails_at: int = 0, stop: bool = False
) -> Seen:
    """The job of ``job.train``. ``memory``: by rank, the variable that names the files of its node."""
    _take_place(memory)
    logging.getLogger("elastic_runner").setLevel(logging.INFO)
    listening = Listening()
    logging.getLogger("elastic_runner").addHandler(listening)
    with er.Worker(settings) as worker, struck(kill) as strike:
        model = worker.prepare(job.Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        loader = er.ElasticLoader(job.dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        seen = Seen(checkpointer.restore(), dump(state), {}, list(listening.lines), [])
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)
        for step in worker.steps(state):
            for x, y in step.microbatches():
                step.backward(nn.functional.mse_loss(model(x), y))
            step.optimize()
            if fails_at == step.number:
                raise ZeroDivisionError("in the program")
            seen.states[step.number] = dump(state)
            strike(step.number, "optimized")
            checkpointer.maybe_save(step)
            strike(step.number, "saved")
        seen.warned = listening.warnings
        return seen


@contextmanager
def struck(kill: Kill | None) -> Iterator[Callable[[int, str], None]]:
    """Kill this process where ``kill`` says."""
    rank = int(os.environ["RANK"])

    def strike(step: int, phase: str) -> None:
        if kill is not None and kill == Kill(rank=rank, step=step, phase=phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(cls: type, name: str, phase: str, after: str = "") -> Any:
        original = getattr(cls, name)

        def wrapped(self: Any, *given: Any) -> Any:
            step = given[0] if name == "release" else given[0].step if name == "seal" else 0
            strike(step, phase)
            result = original(self, *given)
            strike(step, after)
            return result

        return patch.object(cls, name, wrapped)

    with (
        before(SnapshotBuffer, "seal", "sealing", "sealed"),
        before(StepLines, "release", "releasing", "released"),
        _half_way(strike) if kill is not None and kill.phase == "copying" else nullcontext(),
    ):
        yield strike


@contextmanager
def _half_way(strike: Callable[[int, str], None]) -> Iterator[None]:
    """Strike between the copies of two pieces."""
    original, take, box = snapshots.Snapshots._copy, [0], snapshots.box

    def copy(self: Any, captured: Any, plan: Any, step: int, *rest: Any) -> bool:
        take[0] = step
        return original(self, captured, plan, step, *rest)

    def copied(tensor: torch.Tensor, piece: Any) -> torch.Tensor:
        if piece.key.startswith("optimizer."):
            strike(take[0], "copying")
        return box(tensor, piece)

    with patch.object(snapshots.Snapshots, "_copy", copy), patch.object(snapshots, "box", copied):
        yield


def train_in_memory(settings: er.RunConfig, memory: Sequence[str], kill: Kill | None) -> Any:
    """``job.train``, which has a schedule and can be killed in a save, too."""
    _take_place(memory)
    if kill is None or kill.phase in job.PHASES:
        return job.train(settings, kill)
    with struck(kill):
        return job.train(settings, None)
