"""Loader processes: notices to stop leave them alone, and they never outlive or hold up the training process."""

from __future__ import annotations

import multiprocessing as mp
import os
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data._utils
from torch.utils.data import Dataset

from elastic_runner.config import DataConfig
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.order import samples_at
from elastic_runner.environment import AGENT_DIR
from tests.support.place import SoloPlace
from tests.support.ranks import CONTEXT

LIMIT = 30.0
CONFIG = DataConfig(global_batch=4, shards=2, loader_workers=2)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return index


class Heavy(Numbers):
    """Its batches are larger than a pipe, so that a loader process blocks until the training takes them."""

    def __getitem__(self, index: int) -> str:
        return "x" * 1_000_000


class Stuck(Numbers):
    """Never comes back with anything but the first step's samples."""

    def __getitem__(self, index: int) -> int:
        if index not in samples_at(range(4), length=1000, seed=0, epoch=0):
            threading.Event().wait()
        return index


class Tensors(Numbers):
    """Come through sockets."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def take(loader: ElasticLoader, steps: range) -> list[Any]:
    samples: list[Any] = []
    for step in steps:
        loader.begin(step)
        for microbatch in loader.microbatches():
            samples += microbatch.batch
        loader.commit()
    return samples


def train(pipe: Connection, dataset: Numbers, prepare: Callable[[], None], method: str) -> None:
    """Take a step, tell the loader processes' ids, and at each word received take ten more."""
    os.setsid()
    mp.set_start_method(method, force=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # the training process goes on; its loader processes are the subject
    prepare()
    loader = ElasticLoader(dataset, CONFIG, SoloPlace(), collate_fn=as_list)
    samples = take(loader, range(1, 2))
    pipe.send(sorted(child.pid or 0 for child in mp.active_children()))
    while pipe.recv() == "more":
        samples += take(loader, range(len(samples) // 4 + 1, len(samples) // 4 + 11))
        pipe.send((samples, sorted(child.pid or 0 for child in mp.active_children())))


def nothing() -> None:
    """No preparation."""


def signal_children_as_they_start() -> None:
    """Each loader process meets all notices before it has run any of its own code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)

    def meet() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)

    os.register_at_fork(after_in_child=meet)


def be_impatient() -> None:
    """Let torch wait shortly, not 5 s, for a loader process before it terminates it."""
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2


@contextmanager
def training(
    dataset: Numbers, prepare: Callable[[], None] = nothing, method: str = "fork"
) -> Iterator[tuple[Any, Connection, list[int]]]:
    """A training process, what it is talked to through, and the ids of its loader processes."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=train, args=(theirs, dataset, prepare, method))
    process.start()
    theirs.close()
    children: list[int] = []
    try:
        assert ours.poll(LIMIT)
        children = ours.recv()
        yield process, ours, children
    finally:
        process.kill()
        process.join()
        for child in children:
            if not gone(child, 0):
                os.kill(child, signal.SIGKILL)


def gone(pid: int, seconds: float) -> bool:
    """Whether a process that may not be our child ends within ``seconds``."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def go_on(pipe: Connection) -> tuple[list[int], list[int]]:
    pipe.send("more")
    assert pipe.poll(LIMIT)
    return pipe.recv()  # type: ignore[no-any-return]


@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_notice_to_the_whole_process_group_leaves_loader_processes_alone(notice: signal.Signals) -> None:
    with training(Numbers()) as (process, pipe, children):
        assert len(children) == 2
        os.killpg(process.pid, notice)
        samples, still = go_on(pipe)
        assert still == children
        assert samples == samples_at(range(44), length=1000, seed=0, epoch=0)


def test_notice_while_loader_processes_start_is_ignored_too() -> None:
    with training(Numbers(), signal_children_as_they_start) as (_, pipe, children):
        samples, still = go_on(pipe)
        assert still == children
        assert samples == samples_at(range(44), length=1000, seed=0, epoch=0)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_loader_processes_that_block_on_a_dead_parent_leave(method: str) -> None:
    """torch looks for its parent between batches only, and these never get their batch off."""
    with training(Heavy(), method=method) as (process, _, children):
        process.kill()
        process.join()
        assert [gone(child, LIMIT) for child in children] == [True, True]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stuck_loader_process_does_not_hold_up_the_end_of_training(method: str) -> None:
    """torch sends it a SIGTERM, which a process deaf to all notices would ignore, and joins it for ever."""
    with training(Stuck(), be_impatient, method) as (process, pipe, children):
        pipe.send("end")
        process.join(LIMIT)
        assert process.exitcode == 0
        assert all(gone(child, LIMIT) for child in children)


def write_below(directory: Path, *, launched: bool) -> None:
    """Temporary files are there, the launcher's too."""
    tempfile.tempdir = str(directory)
    if launched:
        os.environ[AGENT_DIR] = str(directory / "agent")


def test_loader_processes_leave_no_directories(tmp_path: Path) -> None:
    """Where training is killed; and, but for what the launcher sweeps, where they are, too."""
    with training(Tensors(), partial(write_below, tmp_path, launched=False)) as (process, _, children):
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()
        assert all(gone(child, LIMIT) for child in children) and list(tmp_path.iterdir()) == []
    (tmp_path / "agent").mkdir()
    with training(Tensors(), partial(write_below, tmp_path, launched=True)) as (_, _, children):
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert all(gone(child, LIMIT) for child in children)
        assert list(tmp_path.glob("agent/listener-*")) and [each.name for each in tmp_path.iterdir()] == ["agent"]
