"""The contenders of the recovery benchmark: the same script under one launcher or another, on one or two agents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from benchmarks.recovery_watch import RunWatch
from elastic_runner.chaos.driver import end_tree, kill_tree
from elastic_runner.launch.processes import end_descendants
from elastic_runner.launch.rendezvous.epochs import Epochs
from elastic_runner.storage import LocalStorage
from tests.support.ports import free_port

SCRIPT = Path(__file__).with_name("recovery_script.py")
TUNED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_RESTARTS = 1000
ENDING = 10.0
"""Seconds for killed processes to be gone."""
_TAIL = 1500
"""Characters of a log that are shown of a job that did not recover."""
_JOB = "bench"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to run the script."""

    name: str
    """Its name in the results."""
    launcher: Literal["ours", "stock"]
    """elastic-runner launch, or torch.distributed.run."""
    nodes: str | None = None
    """--nnodes; None: --standalone for stock, nothing for ours."""
    agents: int = 1
    """How many are started, which share two workers."""
    conf: str = ""
    """--rdzv-conf."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""

    def command(self, directory: Path, port: int) -> list[str]:
        """What starts each agent."""
        module = ["elastic_runner", "launch"] if self.launcher == "ours" else ["torch.distributed.run"]
        flags = [f"--nproc-per-node={2 // self.agents}", f"--max-restarts={_RESTARTS}"]
        if self.nodes is None:
            flags += ["--standalone"] if self.launcher == "stock" else []
        else:
            endpoint = str(directory / "rendezvous") if self.launcher == "ours" else f"127.0.0.1:{port}"
            backend = "elastic" if self.launcher == "ours" else "c10d"
            flags += [f"--nnodes={self.nodes}", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"]
            flags += [f"--rdzv-id={_JOB}", "--local-addr=127.0.0.1"]
        flags += [f"--rdzv-conf={self.conf}"] if self.conf else []
        return [
            sys.executable, "-m", *module, *flags, str(SCRIPT), "--run-dir", str(directory / "run"), *SETTINGS
        ]  # fmt: skip


SETTINGS = (
    "--training.max-steps", "100000000", "--checkpoint.every", "20", "--data.global-batch", "16", "--data.shards", "4",
)  # fmt: skip


class Job:
    """A contender's agents at work in ``directory``; when the context is left, none of their processes is."""

    def __init__(self, contender: Contender, directory: Path) -> None:
        self.contender = contender
        self.agents: list[subprocess.Popen[bytes]] = []
        self.watch = RunWatch(directory / "run", lambda: any(agent.poll() is None for agent in self.agents))
        self._directory = directory

    def __enter__(self) -> Job:
        scratch = self._directory / "tmp"
        scratch.mkdir(parents=True)
        command = self.contender.command(self._directory, free_port())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **self.contender.variables}
        for number in range(self.contender.agents):
            with self._log(number).open("wb") as log:
                agent = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            self.agents.append(agent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            end_tree(agent)
        end_descendants(ENDING)  # what has lost its parent is ours: see adopt_orphans

    def host(self) -> int:
        """Which agent hosts the newest epoch; ours only."""
        record, _ = Epochs(LocalStorage(self._directory / "rendezvous" / _JOB)).newest()
        assert record is not None
        pid = int(record.node.split(":")[1])
        return next(number for number, agent in enumerate(self.agents) if agent.pid == pid)

    def lose(self, agent: int) -> None:
        """As a node dies: an agent and all that it has started, at once."""
        kill_tree(self.agents[agent].pid)
        self.agents[agent].wait()

    def last_words(self) -> str:
        """The end of what each agent has said."""
        logs = [self._log(number) for number in range(len(self.agents))]
        return "\n".join(f"--- agent {n}\n{log.read_text(errors='replace')[-_TAIL:]}" for n, log in enumerate(logs))

    def _log(self, agent: int) -> Path:
        return self._directory / f"agent-{agent}.log"
