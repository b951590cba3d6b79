"""Several agents of one job on this machine, as separate processes, each with one worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_runner.chaos.driver import end_tree, kill_tree
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import Tally, tally
from elastic_runner.launch.processes import children, descendants, signal_all
from elastic_runner.launch.rendezvous.epochs import Epochs
from elastic_runner.storage import LocalStorage

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=9")
LAUNCH = (sys.executable, "-m", "elastic_runner", "launch", "--max-restarts=9")

SCRIPT = """
import os, sys, time
import torch
import elastic_runner as er

config = er.load_config()
hurry = os.path.join(config.run_dir, "hurry")
x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
with er.Worker(config) as worker:
    model = worker.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = er.TrainState(model=model, optimizer=optimizer, data=er.ElasticLoader(dataset, config.data, worker))
    checkpointer = er.Checkpointer(config.checkpoint, state, worker)
    checkpointer.restore()
    for step in worker.steps(state):
        for a, b in step.microbatches():
            step.backward(torch.nn.functional.mse_loss(model(a), b))
        step.optimize()
        checkpointer.maybe_save(step)
        if not os.path.exists(hurry):
            time.sleep(0.1)
"""
STEPS = 600
"""At 0.1 s each; a few ms once the test has no more to do to it."""


class Job:
    """A run and its agents; on leaving, none of their processes is left."""

    def __init__(
        self,
        directory: Path,
        nodes: str,
        launcher: tuple[str, ...] = TORCHRUN,
        script: str = SCRIPT,
        *,
        backend: str = "elastic",
        endpoint: str = "",
    ) -> None:
        self.run_dir = directory / "run"
        self.agents: list[subprocess.Popen[bytes]] = []
        self._directory = directory
        self._script = directory / "script.py"
        self._script.write_text(script)
        self._command = [
            *launcher, f"--nnodes={nodes}", "--nproc-per-node=1", f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint or directory / 'rendezvous'}", "--rdzv-id=job", str(self._script),
            "--run-dir", str(self.run_dir), "--training.max-steps", str(STEPS), "--checkpoint.every", "10",
            "--data.global-batch", "8", "--data.shards", "4",
        ]  # fmt: skip
        self._storage = LocalStorage(self.run_dir)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            end_tree(agent)

    def start(self, count: int = 1, *, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start agents, by a command that runs another one; the last is returned."""
        for _ in range(count):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with self.log(len(self.agents)).open("wb") as log:
                agent = subprocess.Popen(
                    [*within, *self._command],
                    stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                )  # fmt: skip
            self.agents.append(agent)
        return self.agents[-1]

    def log(self, index: int) -> Path:
        """What an agent and its worker have said."""
        return self._directory / f"agent-{index}.log"

    def logs(self) -> str:
        """All of it."""
        return "\n".join(f"--- agent {i}\n{self.log(i).read_text()}" for i in range(len(self.agents)))

    def records(self) -> list[dict[str, Any]]:
        """Steps on the ledger, in the order of attempts."""
        return [record for record in read_records(self._storage) if record["event"] == "step"]

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """The first true value of the condition."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"{what} has not come about\n{self.logs()}"
            time.sleep(0.05)
        return value

    def wait_for_world(self, size: int, after: int = 0) -> int:
        """Until a world of this size has made steps in an attempt after that one; returns the attempt."""

        def running() -> int:
            last = [r for r in self.records() if r["world"] == size and r["attempt"] > after]
            return int(last[-1]["attempt"]) if len(last) > 2 else 0

        return int(self.wait(running, f"a world of {size} after attempt {after}"))

    def host(self) -> subprocess.Popen[bytes]:
        """The agent that hosts the newest epoch."""
        record, _ = Epochs(LocalStorage(self._directory / "rendezvous" / "job")).newest()
        assert record is not None
        pid = int(record.node.split(":")[1])
        return next(agent for agent in self.agents if agent.pid == pid)

    def others(self) -> list[subprocess.Popen[bytes]]:
        """Agents that are running and do not host."""
        host = self.host()
        return [agent for agent in self.agents if agent is not host and agent.poll() is None]

    def worker(self, agent: subprocess.Popen[bytes]) -> int:
        """The process id of an agent's worker."""
        (pid,) = children(agent.pid)
        return pid

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """As a node dies: the agent and its worker at once."""
        kill_tree(agent.pid)
        agent.wait()

    def signal(self, agent: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """To an agent and all that it has started."""
        signal_all([agent.pid, *descendants(agent.pid)], number)

    def finish(self, killed: int = 0) -> Tally:
        """Let it run to its end: all agents but the ``killed`` exit with 0, and the ledger has no gap."""
        (self.run_dir / "hurry").touch()
        codes = [agent.wait(timeout=90) for agent in self.agents]
        assert sorted(codes) == [-signal.SIGKILL] * killed + [0] * (len(codes) - killed), self.logs()
        counts = tally(effective(read_records(self._storage))[0])
        assert (counts.steps, counts.gaps, counts.repeated, counts.skipped) == (STEPS, 0, 0, 0)
        return counts
