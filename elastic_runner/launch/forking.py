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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, cast

import torch.distributed.elastic.multiprocessing.api as api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastic_runner.environment import NOTICES
from elastic_runner.launch import kernel
from elastic_runner.launch.fork_server import MODULES
from elastic_runner.launch.processes import adopt_orphans, children, descendants, end_descendants, reap, signal_all

log = logging.getLogger(__name__)

_Request: TypeAlias = dict[str, Any]

_ENDING = 10.0
"""Seconds for the server to end all that it has started."""
_IMPORTING = 600.0
"""Seconds for its first answer, which comes when it has imported all that workers need."""
_ANSWERING = 15.0
"""Seconds for each later one, which takes milliseconds; a server that is stopped, or frozen, gives none."""


class _ServerGone(OSError):
    """It was killed, perhaps a moment ago, or does not answer."""


class ForkServer:
    """The server as its agent sees it. ``modules``: imported there besides our own list, if it is to ``fork``.
    ``standby``: whether it makes the next workers ready ahead. ``answering``: seconds for it to answer.

    One that was killed takes its workers with it; the next worker is made by a new one. So it is with one that does not
    answer, which is left alone until then: its workers train.
    """

    def __init__(
        self, modules: Sequence[str] = (), *, fork: bool = True, standby: bool = False, answering: float = _ANSWERING
    ) -> None:
        adopt_orphans()  # what the server has not ended, should it be killed
        self._others = children(os.getpid())
        self._modules = (*MODULES, *modules) if fork else ()
        self._fork = fork
        self._standby = standby
        self._answering = answering
        self._requests: dict[int, _Request] = {}
        self._told = False
        self._server = self._start()

    def _start(self) -> _Server:
        return _Server(self._modules, self._others, self._answering)

    def spawn(
        self, command: Sequence[str], env: Mapping[str, str], *, local_rank: int = 0, stdout: str = "", stderr: str = ""
    ) -> ForkedProcess:
        """Start a worker, by fork where it is a Python script. ``stdout``, ``stderr``: files. Raises OSError."""
        request = self._requests[local_rank] = {
            "command": list(command), "env": dict(env), "fork": self._fork and _is_script(command),
            "stdout": stdout, "stderr": stderr,
        }  # fmt: skip
        try:
            process, unsafe = self._server.spawn(request, local_rank)
        except _ServerGone:
            self._server.close()
            self._server = self._start()
            process, unsafe = self._server.spawn(request, local_rank)
        if unsafe and not self._told:
            log.warning("workers are started by exec, which takes seconds: %s", unsafe)
            self._told = True
        return process

    def prepare(self, local_ranks: Iterable[int]) -> None:
        """Make the next workers of these ranks ready, for the device that they have now, where that is asked for."""
        if self._standby:
            with suppress(_ServerGone):  # the next workers are another one's
                self._server.prepare({rank: self._requests[rank] for rank in local_ranks})

    def sweep(self) -> None:
        """Kill what workers that have ended have left behind."""
        spared = self._server.standbys.values()
        signal_all(set(descendants(self._server.pid)).difference(spared), signal.SIGKILL)

    def reap(self) -> None:
        """Take in what has ended here and came from elsewhere, as the first process of a container has to."""
        if os.getpid() == 1:
            reap({self._server.pid, *self._others})

    def close(self) -> None:
        """End the server, and with it every worker that is still there."""
        self._server.close()


class _Server:
    """One process of it. ``others``: children of this process that are none of its business."""

    def __init__(self, modules: Sequence[str], others: Sequence[int], answering: float = _ANSWERING) -> None:
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", "elastic_runner.launch.fork_server", *modules]
        # A math library that made its threads when it was imported could not be forked.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # It inherits what is held back, and so hears nothing before it can ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
        try:
            with its:
                self._process = subprocess.Popen(command, stdin=its.fileno(), env={**os.environ, **single})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self.standbys: dict[int, int] = {}
        """Process ids by local rank."""
        self._others = others
        self._patience, self._answering = _IMPORTING, answering
        self._silent = False
        self._closing = False
        self._connection = ours
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._processes: dict[int, ForkedProcess] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="fork server", daemon=True)
        self._thread.start()

    def spawn(self, request: _Request, local_rank: int) -> tuple[ForkedProcess, str]:
        """A worker, and why it was not forked. Raises OSError."""
        standby = self.standbys.pop(local_rank, 0)
        answer = self._ask(request | {"ahead": False, "standby": standby})
        if "pid" not in answer:
            raise OSError(answer["failed"])
        if standby and answer["pid"] != standby:
            log.warning("local rank %d: its standby worker was not ready, another one is forked", local_rank)
        process = ForkedProcess(answer["pid"], answering=self._answering, unheard=self._unheard)
        with self._lock:
            self._processes[process.pid] = process
            if process.pid in self._early:
                process.ended(self._early.pop(process.pid))
        return process, answer["unsafe"]

    def prepare(self, requests: Mapping[int, _Request]) -> None:
        """Standbys for workers like these, by local rank. Earlier ones that are left go with the next sweep."""
        asked = {rank: request | {"ahead": True, "standby": 0} for rank, request in requests.items()}
        answers = {rank: self._ask(request) for rank, request in asked.items()}
        self.standbys = {rank: answer["pid"] for rank, answer in answers.items() if "pid" in answer}
        for reason in {answer["failed"] for answer in answers.values() if "failed" in answer}:
            log.warning("not every worker has a standby: %s", reason)
        log.info("standby workers by local rank: %s", self.standbys)

    def _ask(self, request: _Request) -> dict[str, Any]:
        if self._silent:  # a late answer would be taken for another one
            raise _ServerGone("the fork server does not answer")
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise _ServerGone("the fork server has ended") from error
        try:
            answer = self._answers.get(timeout=self._patience)
        except queue.Empty:
            self._silent = True
            log.error("the fork server has not answered for %g s; the next workers get another one", self._patience)
            raise _ServerGone("the fork server does not answer") from None
        self._patience = self._answering
        if "gone" in answer:
            raise _ServerGone("the fork server has ended")
        return answer

    def close(self) -> None:
        """End it, and with it all that it has started."""
        self._closing = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(0 if self._silent else _ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            end_descendants(_ENDING, spared=self._others)
        self._thread.join(2 * _ENDING)
        self._connection.close()

    def _unheard(self, pid: int) -> None:
        """The end of a worker has not been told: a server that cannot do that is of no use."""
        log.error("the fork server has not told how its worker %d has ended; it is ended, too", pid)
        self._process.kill()

    def _listen(self) -> None:
        """Thread: what the server says."""
        with suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                if "exited" in message:
                    self._ended(message["exited"], message["code"])
                else:
                    self._answers.put(message)
        if not self._closing:
            log.error("the fork server has ended, and its workers with it")
            end_descendants(_ENDING, spared=self._others)
        self._answers.put({"gone": True})
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
    """The part of subprocess.Popen that torch's agent uses.

    ``unheard``: called when its end has not been told ``answering`` seconds later.
    """

    def __init__(self, pid: int, *, answering: float, unheard: Callable[[int], None]) -> None:
        self.pid = pid
        self._answering = answering
        self._unheard = unheard
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
        if not self._over.wait(timeout) and not (kernel.state(self.pid) in kernel.ENDED and self._told()):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return cast(int, self.returncode)

    def _told(self) -> bool:
        """It has ended: whether its server says how, or ends itself."""
        if not self._over.wait(self._answering):
            self._unheard(self.pid)
        return self._over.wait(2 * _ENDING)


@contextmanager
def workers_by(server: ForkServer) -> Iterator[None]:
    """Within, torch's agent has its workers made by ``server``, which is closed at the end."""

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            streams = {"stdout": self._stdout, "stderr": self._stderr}
            files = {name: str(file.name) if file else "" for name, file in streams.items()}
            return cast(Any, server.spawn(args, env, local_rank=self.local_rank_id, **files))

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


def _is_script(command: Sequence[str]) -> bool:
    """Whether it is this Python with a script, or -m and a module."""
    return os.path.realpath(command[0]) == os.path.realpath(sys.executable) and list(command[1:2]) == ["-u"]


__all__ = ["ForkServer", "ForkedProcess", "workers_by"]
