"""The least that a restart can take: workers of the fork server on a run that exists, nothing to notice or to end."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch.distributed import TCPStore

from benchmarks.recovery_jobs import ENDING, SCRIPT, SETTINGS
from benchmarks.recovery_watch import Recovery, RunWatch
from elastic_runner import verdict
from elastic_runner.environment import AGENT_DIR
from elastic_runner.launch.forking import ForkedProcess, ForkServer
from elastic_runner.launch.memory import NodeMemory

_WORKERS = 2


class Floor:
    """A fork server and a node's memory, used without an agent; when the context is left, no process is."""

    def __init__(self, directory: Path) -> None:
        self._run_dir = directory / "run"
        self._agent_dir = directory / "agent"
        self._workers: list[ForkedProcess] = []
        self._watch = RunWatch(self._run_dir, lambda: all(worker.poll() is None for worker in self._workers))

    def __enter__(self) -> Floor:
        self._agent_dir.mkdir(parents=True)
        self._memory = NodeMemory(_WORKERS)
        self._server = ForkServer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._memory.close()

    def settle(self) -> None:
        """Make the run that is gone on with."""
        self.trial()

    def trial(self) -> Recovery:
        """From the first fork to the first committed step; then the workers train on until they have settled."""
        verdict.clear(str(self._agent_dir))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            recovery = self._watch.recovery(self._watch.newest(), lambda: self._start(store.port))
            self._watch.until_settled(_WORKERS)
        finally:
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            for worker in self._workers:
                worker.wait(ENDING)
        return recovery

    def _start(self, port: int) -> None:
        command = [sys.executable, "-u", str(SCRIPT), "--run-dir", str(self._run_dir), *SETTINGS]
        log = self._run_dir.with_name("log")
        common = {
            "WORLD_SIZE": _WORKERS, "LOCAL_WORLD_SIZE": _WORKERS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1, AGENT_DIR: self._agent_dir,
            **self._memory.variables(),
        }  # fmt: skip
        self._workers = []
        for rank in range(_WORKERS):
            told = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            self._workers.append(
                self._server.spawn(command, {**os.environ, **told}, stdout=f"{log}-{rank}", stderr=f"{log}-{rank}-err")
            )
