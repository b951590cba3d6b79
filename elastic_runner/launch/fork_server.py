"""The fork server: imports what every worker imports once, then makes workers by fork, in milliseconds.

Run by the agent as a process of its own, with a socket as its standard input. A request is one JSON line: ``argv`` (the
script, or ``-m`` and a module, and arguments), ``env`` and files for the output. The answers are JSON lines: ``pid``,
or ``refused`` with the reason why a fork is not safe here; and ``exited`` with a ``code`` as in ``Popen.returncode``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # DDP and optimizers import it when they are first used
    "tyro",
    "elastic_runner",
    "elastic_runner.recipes.text",
)
"""Imported before the first fork, where they are installed."""

_PR_SET_PDEATHSIG = 1


def main(modules: Sequence[str]) -> None:
    """Serve until the socket closes; in a forked worker, run its script instead."""
    die_with_parent()
    for name in modules:
        with suppress(ImportError):  # the worker will say so itself, if it needs it
            importlib.import_module(name)
    request = _serve(socket.socket(fileno=0))
    if request is not None:
        _become(request)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests; returns in the child with the request that made it, and in the server when it is over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # for the workers; the agent tells this process by the socket
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fd == wake:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
                _report_exits(connection)
                continue
            data = connection.recv(1 << 20)
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if reason := why_not_to_fork():
                    _say(connection, {"refused": reason})
                elif pid := os.fork():
                    _say(connection, {"pid": pid})
                else:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    connection.close()
                    for handle in (wake, woken):
                        os.close(handle)
                    return request


def why_not_to_fork() -> str:
    """Why a forked child of this process could hang or fail, in words; empty when it is safe."""
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"{threads} threads are running in the fork server, begun by one of the imported modules"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "one of the imported modules has initialised CUDA"
    return ""


def _report_exits(connection: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(connection, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent is gone, and so will be this process
        connection.sendall(json.dumps(message).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Be what ``python <argv>`` would be: the rest of this process's life is the script's."""
    die_with_parent()
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    _redirect(0, os.devnull, os.O_RDONLY)  # where the socket was
    for name, handle in (("stdout", 1), ("stderr", 2)):
        if request[name]:
            _redirect(handle, request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _start_anew()
    module, script, *arguments = request["argv"] if request["argv"][0] == "-m" else ["", *request["argv"]]
    sys.argv = [script, *arguments]
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def _redirect(handle: int, path: str, flags: int) -> None:
    file = os.open(path, flags, 0o666)
    if file != handle:
        os.dup2(file, handle)
        os.close(file)


def _start_anew() -> None:
    """What a fresh process draws from the system or reads from its environment, a forked one has inherited."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    main([*MODULES, *sys.argv[1:]])
