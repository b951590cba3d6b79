"""Two ranks that train, one of which hangs in a chosen way, and the agent's part: a watchdog beside them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, RunConfig, TimeoutConfig, TrainingConfig
from elastic_runner.environment import AGENT_DIR
from elastic_runner.launch.memory import NodeMemory
from elastic_runner.launch.watchdog import Hang, Watchdog
from tests.support.ranks import CONTEXT

AT_STEP = 6
HANGING = 1
"""The rank that hangs."""
LIMIT = 3.0
"""Seconds for a step."""


def stuck_in_sleep() -> None:
    time.sleep(1000)


def stuck_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def nothing() -> None:
    pass


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Rank 1's loader process hangs at its part of the chosen step's batch."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.stuck and torch.utils.data.get_worker_info() is not None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen > 2 * AT_STEP:
                stuck_in_a_loader()
        return torch.ones(1)


def stuck_in_a_loader() -> None:
    time.sleep(1000)


def train(run_dir: str, strike: Callable[[], None], loader_hangs: bool) -> None:
    config = RunConfig(
        run_dir=run_dir,
        training=TrainingConfig(max_steps=100_000),
        data=DataConfig(global_batch=4, shards=4, loader_workers=1 if loader_hangs else 0),
        checkpoint=CheckpointConfig(every=100_000),
        timeouts=TimeoutConfig(step=LIMIT, setup=60, first_step=60),
    )
    with er.Worker(config) as worker:
        model = worker.prepare(torch.nn.Linear(1, 1))
        loader = er.ElasticLoader(Numbers(loader_hangs and worker.rank == HANGING), config.data, worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in worker.steps(er.TrainState(model=model, optimizer=optimizer, data=loader)):
            for x in step.microbatches():
                if worker.rank == HANGING and step.number == AT_STEP:
                    strike()
                worker.progress()
                step.backward(model(x).sum())
            step.optimize()
            time.sleep(0.01)


class WatchedRanks:
    """The ranks of a node with the agent's memory and watchdog; none is left on leaving."""

    def __init__(self, directory: Path, strike: Callable[[], None] = nothing, *, loader_hangs: bool = False) -> None:
        self.directory = directory / "agent"
        self.directory.mkdir()
        self._job = (str(directory / "run"), strike, loader_hangs)

    def __enter__(self) -> WatchedRanks:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._memory = NodeMemory(2)
        self.watchdog = Watchdog(self._memory.heartbeats)
        self._processes: list[Any] = [CONTEXT.Process(target=self._rank, args=self._told(r)) for r in range(2)]
        for process in self._processes:
            process.start()
        self.pids: dict[int, int] = {rank: process.pid for rank, process in enumerate(self._processes)}
        self.watchdog.begin(self.pids)
        return self

    def _told(self, rank: int) -> tuple[Any, ...]:
        variables = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1,
            AGENT_DIR: self.directory, **self._memory.variables(),
        }  # fmt: skip
        return ({name: str(value) for name, value in variables.items()}, *self._job)

    @staticmethod
    def _rank(variables: dict[str, str], run_dir: str, strike: Callable[[], None], loader_hangs: bool) -> None:
        os.environ.update(variables)
        multiprocessing.set_start_method("fork", force=True)  # as in a worker of the launcher
        torch.set_num_threads(1)
        train(run_dir, strike, loader_hangs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self.watchdog.close()
        self._memory.close()

    def hang(self, seconds: float = 60.0) -> Hang:
        """What the watchdog says first, as the agent asks it."""
        end = time.monotonic() + seconds
        while (hang := self.watchdog.look(time.monotonic())) is None:
            assert time.monotonic() < end, "\n".join(self.watchdog.describe())
            assert all(process.is_alive() for process in self._processes)
            time.sleep(self.watchdog.wait_s(time.monotonic()))
        return hang

    def until_step(self, step: int, seconds: float = 60.0) -> None:
        """Wait until both have finished a step."""
        end = time.monotonic() + seconds
        while min([self.watchdog.steps().get(rank, -1) for rank in range(2)]) < step:
            assert time.monotonic() < end, "\n".join(self.watchdog.describe())
            time.sleep(0.02)
