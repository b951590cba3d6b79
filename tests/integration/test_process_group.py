"""Process groups over a store that outlives attempts, with what dead workers left in it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import elastic_runner
from elastic_runner.config import RunConfig, TimeoutConfig
from elastic_runner.environment import Environment
from elastic_runner.errors import SetupError
from elastic_runner.worker.process_group import call_roll, connect
from elastic_runner.worker.worker import Worker
from tests.support.ranks import RankFailed, run_ranks


class Killed(Exception):
    """Stands for SIGKILL."""


class MortalStore:
    """A client of its own whose owner dies before a given operation."""

    def __init__(self, port: int, operations: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._left = operations

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        if self._left == 0:
            raise Killed
        self._left -= 1
        return getattr(self._store, name)


class Job:
    """Attempts over one store; ranks are threads, which use it as processes would."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.used: set[str] = set()

    def attempt(self, world_size: int, deaths: dict[int, int], *, seconds: float) -> list[str | Exception]:
        """What ``call_roll`` came to on each rank; ``deaths``: operations until death by rank."""
        results: list[str | Exception] = [Killed()] * world_size

        def rank(number: int) -> None:
            store: Any = MortalStore(self.server.port, deaths.get(number, -1))
            try:
                results[number] = call_roll(store, number, world_size, seconds)
            except (Killed, SetupError) as error:
                results[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
        random.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        tokens = {result for result in results if isinstance(result, str)}
        assert len(tokens) <= 1, "ranks of one attempt have different tokens"
        assert not tokens & self.used, "a token of an earlier attempt"
        self.used |= tokens
        return results


@pytest.mark.parametrize("seed", range(4))
def test_roll_is_clean_after_deaths_at_any_point(seed: int) -> None:
    """Each attempt, of a world of its own size, is one in which ranks die, then one in which all live."""
    draw, job = random.Random(seed), Job()
    for _ in range(5):
        world_size = draw.randint(2, 4)
        dying = draw.sample(range(world_size), draw.randint(1, world_size))
        job.attempt(world_size, {rank: draw.randint(0, 6) for rank in dying}, seconds=0.15)
        world_size = draw.randint(1, 4)
        results = job.attempt(world_size, {}, seconds=20)
        assert all(isinstance(result, str) for result in results), results


def test_roll_of_changing_worlds() -> None:
    job = Job()
    for world_size in (2, 3, 1, 2, 3, 2):
        assert all(isinstance(result, str) for result in job.attempt(world_size, {}, seconds=20))


def test_roll_names_who_is_absent() -> None:
    job = Job()
    begun = time.monotonic()
    results = job.attempt(3, {2: 0}, seconds=0.5)
    assert isinstance(results[0], SetupError)
    assert "rank 2 of 3" in str(results[0]) and "rank 1" not in str(results[0])
    assert isinstance(results[1], SetupError)
    # Far below the minutes that the store would wait by itself; the fork server's first start is in it.
    assert time.monotonic() - begun < 30


def test_a_world_of_one_needs_no_launcher() -> None:
    assert isinstance(connect(Environment(), 1), dist.HashStore)


def lonely(run_dir: str) -> Any:
    os.environ["WORLD_SIZE"] = "2"
    return Worker(RunConfig(run_dir=run_dir, timeouts=TimeoutConfig(setup=5))).__enter__()


def test_a_peer_that_never_starts_is_a_setup_error(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 did not come in time"):
        run_ranks(lonely, 1, str(tmp_path), timeout=60)
    assert time.monotonic() - begun < 20


# Imports what it needs and not the package's whole front: this starts 42 processes.
RESTARTS = """
import os, signal, sys, types
package = types.ModuleType("elastic_runner")
package.__path__ = [sys.argv[1]]
sys.modules["elastic_runner"] = package
import torch.distributed as dist
from elastic_runner.coordination import Coordinator
from elastic_runner.environment import read_environment
from elastic_runner.worker.process_group import connect, start_groups

environment = read_environment()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
groups = start_groups(connect(environment, 60), environment, "gloo", setup=60, step=60, checkpoint=60)
if attempt < 21 and environment.rank == environment.world_size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
for group in groups:
    coordinator = Coordinator(group)
    assert coordinator.gather("attempt", attempt) == [attempt] * environment.world_size
    coordinator.close()
# One write: both ranks have the same pipe, and print's newline is a write of its own.
os.write(1, f"attempt {attempt} of rank {environment.rank} is complete\\n".encode())
os._exit(0)
"""


@pytest.mark.slow
def test_twenty_restarts_in_a_row_under_stock_torchrun(tmp_path: Path) -> None:
    """One store for all attempts, as torchrun has it by default: no attempt may read what a dead one left in it."""
    script = tmp_path / "restarts.py"
    script.write_text(RESTARTS)
    variables = {name: value for name, value in os.environ.items() if name != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "20", str(script), *elastic_runner.__path__),
        ],
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    complete = sorted(line for line in done.stdout.splitlines() if line.endswith("is complete"))
    assert complete == ["attempt 21 of rank 0 is complete", "attempt 21 of rank 1 is complete"]
