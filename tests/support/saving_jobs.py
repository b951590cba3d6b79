"""What the ranks of the tests of saving beside training and of sharing reads run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.checkpoint import layout, relay, sharing
from elastic_runner.checkpoint.background import Background
from elastic_runner.checkpoint.checkpointer import checkpoint_storage
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.config import CheckpointConfig, DataConfig, RunConfig, TimeoutConfig, TrainingConfig
from elastic_runner.errors import StorageError
from elastic_runner.storage import LocalStorage, Storage, Written
from tests.support.checkpoint_jobs import Dump, build, configured, dump
from tests.support.checkpointing import train
from tests.support.gated import GatedStorage


class Counting(nn.Module):
    """Its gradient is -1 everywhere, so with a learning rate of 1 every parameter equals the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(20, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.a.sum() + self.b.sum()) + 0 * x.sum()


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


@contextmanager
def small_files(most: int = 800) -> Iterator[None]:
    """Several files per rank, of ``most`` bytes or one piece, however small the state."""
    with patch.object(layout, "PIECE_BYTES", 256), patch.object(layout, "FILE_BYTES", (most, most)):
        yield


class SomeFail(GatedStorage):
    """Data files of some steps cannot be written."""

    def __init__(self, inner: Storage, steps: tuple[int, ...]) -> None:
        super().__init__(inner)
        self.steps = steps

    def write_bulk(self, path: str, bulk: Any) -> Written:
        if paths.step_number(path.partition("/")[0]) in self.steps:
            raise StorageError("the network is gone")
        return super().write_bulk(path, bulk)


@dataclass
class Saving:
    """A training loop that saves, as one rank sees it."""

    run_dir: str
    steps: int = 10
    failing: tuple[int, ...] = ()
    """Steps whose data this rank cannot write."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    timeouts: dict[str, float] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    """What happened, in order."""

    def run(self, during: Callable[[Saving, int], Any] = lambda saving, step: None) -> Saving:
        """``during`` is called after each ``maybe_save``; True ends the loop."""
        config = RunConfig(
            run_dir=self.run_dir,
            training=TrainingConfig(max_steps=self.steps),
            data=DataConfig(global_batch=4, shards=4),
            checkpoint=CheckpointConfig(**{"every": 2, "keep": 100, **self.checkpoint}),
            timeouts=TimeoutConfig(**self.timeouts),
        )
        with small_files(), er.Worker(config) as self.worker:
            model = self.worker.prepare(Counting())
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            data = er.ElasticLoader(Ones(), config.data, self.worker)
            self.state = er.TrainState(model=model, optimizer=optimizer, data=data)
            moved = self.worker.checkpoint_coordinator.moved
            inner = checkpoint_storage(config.checkpoint, run_url=self.run_dir, run_options={}, seconds=60, moved=moved)
            self.storage = SomeFail(inner, self.failing)
            self._watch_what_is_said()
            checkpointer = er.Checkpointer(config.checkpoint, self.state, self.worker, storage=self.storage)  # type: ignore[arg-type]
            checkpointer.restore()
            for step in self.worker.steps(self.state):
                for batch in step.microbatches():
                    step.backward(model(batch))
                step.optimize()
                checkpointer.maybe_save(step)
                if during(self, step.number):
                    break
        return self

    def saved(self) -> list[int]:
        return committed(self.run_dir)

    def _watch_what_is_said(self) -> None:
        not_saved, saved = self.worker.not_saved, self.worker.saved

        def told(step: int, reason: str, **more: Any) -> None:
            self.seen.append(("not saved", step, reason, "during", self.state.step))
            not_saved(step, reason, **more)

        def told_saved(step: int) -> None:
            self.seen.append(("saved", step))
            saved(step)

        self.worker.not_saved, self.worker.saved = told, told_saved  # type: ignore[method-assign]


def committed(run_dir: str) -> list[int]:
    """Steps of the checkpoints of a run."""
    return sorted(m.step for m in list_checkpoints(LocalStorage(f"{run_dir}/{paths.CHECKPOINTS}")).manifests)


def fail_some(run_dir: str, format: str, failing: dict[int, tuple[int, ...]], allowed: int) -> tuple[list[Any], str]:
    """``failing``: by rank, the steps whose data it cannot write."""
    mine = failing.get(int(os.environ["RANK"]), ())
    saving = Saving(run_dir, failing=mine, checkpoint={"format": format, "failures_allowed": allowed, "every": 3})
    try:
        saving.run()
    except Exception as error:
        return saving.seen, f"{type(error).__name__}: {error}"
    return saving.seen, ""


def one_slow_rank(run_dir: str, slow: int, every: int, when_busy: str) -> list[Any]:
    """From step 2 on one rank cannot write, until all have finished step 9."""

    def during(saving: Saving, step: int) -> None:
        saving.seen.append(step)
        if saving.worker.rank == slow and step == 1:
            saving.storage.gate.clear()
        if step == 8:  # the gate is opened only after step 9, which needs all ranks
            saving.seen.append(saving.saved())
        if step == 9:
            saving.storage.gate.set()

    return Saving(run_dir, steps=14, checkpoint={"every": every, "when_busy": when_busy}).run(during).seen


def leave_while_saving(run_dir: str, how: str, leaving: int, opens: bool, at: int) -> list[Any]:
    """Save step 2, held up on the rank that leaves until its exit waits for it; leave after step ``at``."""
    waiting, outcome = Background.wait, Background.outcome

    def opened(call: Callable[..., Any]) -> Callable[..., Any]:
        def then(background: Background, *arguments: Any) -> Any:
            if opens:
                saving.storage.gate.set()
            return call(background, *arguments)

        return then

    def during(saving: Saving, step: int) -> bool:
        mine = saving.worker.rank == leaving
        if mine and step == 1:
            saving.storage.gate.clear()
        if step == at and (mine or how != "raise"):
            assert saving.saved() == []
            stack.enter_context(patch.object(Background, "wait", opened(waiting)))
            stack.enter_context(patch.object(Background, "outcome", opened(outcome)))
            if how == "raise":
                raise ZeroDivisionError("in the program")
            if how == "exit":
                sys.exit()
            return True
        return False

    saving = Saving(run_dir, checkpoint={"every": 2, "when_busy": "skip"}, timeouts={"teardown": 60 if opens else 1})
    with ExitStack() as stack, suppress(SystemExit):
        saving.run(during)
    return saving.seen


# Restoring.


class Recorded(logging.Handler):
    """What is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Found:
    """What a rank has restored, and how."""

    step: int
    state: Dump
    read: list[str]
    """Data files by their names, each time that this rank read one."""
    said: list[str]


def save_steps(run_dir: str, strategy: str, format: str, steps: int) -> Dump:
    """Train and save so many steps; the last state."""
    config = configured(run_dir, {}, strategy, format)
    fsdp = replace(config.strategy.fsdp, shard_size=2)  # hsdp: groups of two
    config = replace(config, strategy=replace(config.strategy, fsdp=fsdp))
    with small_files(), er.Worker(config) as worker:
        state = build(worker)
        checkpointer = er.Checkpointer(worker.config.checkpoint, state, worker)
        for _ in range(steps):
            train(state)
            checkpointer.save()
        return dump(state)


def restore(
    run_dir: str,
    strategy: str,
    format: str,
    *,
    nodes: str = "",
    unshared: int | None = None,
    forbidden: int | None = None,
    flaky: tuple[str, ...] = (),
    lists: dict[int, list[str]] | None = None,
    unreadable: tuple[str, ...] = (),
) -> Found:
    """Restore and say how.

    ``nodes``: by rank, a letter for its host. ``unshared``: a rank that cannot see its peers' memory. ``forbidden``:
    one that cannot read it, but map what they share. ``flaky``: files whose first byte is wrong when they are read for
    the first time. ``lists``: by rank, the step directories it sees. ``unreadable``: ends of paths of files that nobody
    can read.
    """
    rank = int(os.environ["RANK"])
    read: list[str] = []
    recorded = Recorded()
    read_into, list_, local_copy = LocalStorage.read_into, LocalStorage.list, LocalStorage.local_copy

    def check(path: str) -> None:
        if path.endswith(unreadable):
            raise StorageError(f"read {path}: [Errno 5] Input/output error")

    def recording(self: LocalStorage, path: str, buffer: memoryview) -> Written:
        name = path.rpartition("/")[2]
        read.append(name)
        check(path)
        written = read_into(self, path, buffer)
        if name in flaky and read.count(name) == 1:
            buffer[0] ^= 1
            return Written(path=path, size=written.size, digest="0" * 32)
        return written

    def copying(self: LocalStorage, path: str) -> Any:
        read.append(path.rpartition("/")[2])
        check(path)
        return local_copy(self, path)

    def listing(self: LocalStorage, path: str) -> list[str]:
        names = list_(self, path)
        seen = (lists or {}).get(rank)
        return [name for name in names if name in seen] if seen is not None and path == "" else names

    def denied(path: Path) -> memoryview:
        raise PermissionError(f"{path}: not yours")

    with ExitStack() as stack:
        stack.enter_context(patch.object(LocalStorage, "read_into", recording))
        stack.enter_context(patch.object(LocalStorage, "list", listing))
        stack.enter_context(patch.object(LocalStorage, "local_copy", copying))
        if nodes:
            stack.enter_context(patch.object(er.Worker, "node", PropertyMock(return_value=nodes[rank])))
        if rank in (unshared, forbidden):
            stack.enter_context(patch.object(relay, "can_read", lambda probe: False))
        if rank == unshared:
            stack.enter_context(patch.object(sharing, "_mapped", denied))
        worker = stack.enter_context(er.Worker(configured(run_dir, {}, strategy, format)))
        logging.getLogger("elastic_runner").addHandler(recorded)
        state = build(worker)
        step = er.Checkpointer(worker.config.checkpoint, state, worker).restore()
        return Found(step=step, state=dump(state), read=read, said=recorded.lines)
