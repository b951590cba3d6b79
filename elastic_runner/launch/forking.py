"""Workers by fork instead of exec: torch's agent starts them as ever, and gets processes that are there in no time.

Private names of torch, read in 2.13: ``elastic.multiprocessing.api.get_subprocess_handler`` makes a worker's process,
``SubprocessHandler._popen`` starts it. tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch.distributed.elastic.multiprocessing.api as api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

log = logging.getLogger(__name__)


class NoFork(Exception):
    """The fork server cannot make this worker; the reason is in words."""


class ForkServer:
    """The server as its agent sees it. ``modules``: imported there besides our own list."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", "elastic_runner.launch.fork_server", *modules]
        # A math library that made its threads when it was imported could not be forked.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with its:
            self._server = subprocess.Popen(command, stdin=its.fileno(), env={**os.environ, **single})
        self._connection = ours
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._processes: dict[int, ForkedProcess] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()

    def spawn(self, request: dict[str, Any]) -> ForkedProcess:
        """Make a worker. Raises NoFork."""
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NoFork(f"the fork server is gone: {error}") from error
        answer = self._answers.get()
        if "pid" not in answer:
            raise NoFork(answer["refused"])
        process = ForkedProcess(answer["pid"])
        with self._lock:
            self._processes[process.pid] = process
            if process.pid in self._early:
                process.ended(self._early.pop(process.pid))
        return process

    def close(self) -> None:
        """End the server, and with it every worker that is still there."""
        self._connection.close()
        self._server.kill()
        self._server.wait()

    def _listen(self) -> None:
        """Thread: what the server says."""
        with suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                if "exited" in message:
                    self._ended(message["exited"], message["code"])
                else:
                    self._answers.put(message)
        self._answers.put({"refused": "the fork server has ended"})
        with self._lock:
            for process in self._processes.values():
                process.ended(-signal.SIGKILL)  # the kernel kills them with it

    def _ended(self, pid: int, code: int) -> None:
        with self._lock:
            process = self._processes.pop(pid, None)
            if process is None:
                self._early[pid] = code  # sooner than its pid was told
            else:
                process.ended(code)


class ForkedProcess:
    """The part of subprocess.Popen that torch's agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._over = threading.Event()

    def ended(self, code: int) -> None:
        """It has: ``code`` as in ``returncode``."""
        if self.returncode is None:
            self.returncode = code
            self._over.set()

    def poll(self) -> int | None:
        """The exit code, if there is one."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return cast(int, self.returncode)


@contextmanager
def forked_workers(modules: Sequence[str] = ()) -> Iterator[None]:
    """Within, torch's agent makes Python workers by fork, and by exec what cannot be forked."""
    server = ForkServer(modules)
    told = [False]

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            script = _script(args)
            if script is not None:
                streams = {"stdout": self._stdout, "stderr": self._stderr}
                files = {name: str(file.name) if file else "" for name, file in streams.items()}
                try:
                    return cast(Any, server.spawn({"argv": script, "env": dict(env), **files}))
                except NoFork as reason:
                    if not told[0]:
                        log.warning("workers are started by exec, which takes seconds: %s", reason)
                    told[0] = True
            return cast("subprocess.Popen[bytes]", super()._popen(args, env))

        def close(self, death_sig: signal.Signals | None = None) -> None:
            # One that has ended is not ours to wait for: its pid is gone before its exit code has come here.
            with suppress(ProcessLookupError):
                super().close(death_sig)

    original = api.get_subprocess_handler
    api.get_subprocess_handler = Handler  # type: ignore[assignment]
    try:
        yield
    finally:
        api.get_subprocess_handler = original
        server.close()


def _script(args: tuple[str, ...]) -> list[str] | None:
    """Script (or -m and module) and arguments of a command line of this Python; None for any other command."""
    command, *rest = args
    if os.path.realpath(command) != os.path.realpath(sys.executable) or rest[:1] != ["-u"]:
        return None
    return rest[1:]


__all__ = ["ForkServer", "ForkedProcess", "NoFork", "forked_workers"]
