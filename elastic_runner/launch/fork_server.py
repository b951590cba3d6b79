"""The fork server: imports what every worker imports once, then makes workers by fork, in milliseconds.

Run by the agent as a process of its own, with a socket as its standard input. A request is one JSON line: ``command``,
``fork`` (whether it may be forked: a script of this Python, after ``python -u``), ``env`` and files for the output;
``ahead``: only fork a standby for it, which may become the worker of a later request that names its pid as ``standby``.
The answers are JSON lines: ``pid``, with ``unsafe`` (why it was not forked); and ``exited`` with a ``code`` as in
``Popen.returncode``. When the socket closes, whatever ended the agent, this process kills all that came of it.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from elastic_runner.environment import NOTICES
from elastic_runner.launch.processes import adopt_orphans, die_with_parent, end_descendants
from elastic_runner.launch.script_error import report_errors
from elastic_runner.launch.standby import Standbys, stand_by

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # DDP and optimizers import it when they are first used
    "tyro",
    "elastic_runner.checkpoint.checkpointer",
    "elastic_runner.data.loader",
    "elastic_runner.data.streams",
    "elastic_runner.worker.worker",
    "elastic_runner.recipes.text",
)
"""Imported before the first fork, where they are installed."""

_ENDING = 5.0
"""Seconds for what was killed to be gone."""


class _Forked(NamedTuple):
    """What a forked process is to be; with a socket, a standby first."""

    request: dict[str, Any]
    channel: socket.socket | None


def main(modules: Sequence[str]) -> None:
    """Serve until the socket closes; in a forked worker, run its script instead."""
    _ignore()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)  # the agent has started it with these held back
    adopt_orphans()
    for name in modules:
        _preload(name)
    _ignore()  # again: some module may handle them now
    forked = _serve(socket.socket(fileno=0))
    if forked is None:
        signal.set_wakeup_fd(-1)
        end_descendants(_ENDING)
        return
    _leave_server()
    request, channel = forked
    told = request if channel is None else stand_by(channel, request["env"])
    if told is not None:
        _become(told)


def _preload(name: str) -> None:
    """A worker that needs what cannot be imported will say so itself; of what was asked for, this is said at once."""
    try:
        importlib.import_module(name)
    except Exception as error:
        if name not in MODULES:
            said = f"elastic-runner: --preload {name} cannot be imported: {type(error).__name__}: {error}"
            print(said, file=sys.stderr, flush=True)


def _ignore() -> None:
    """Notices to stop, which are meant for the workers: the agent tells this process by the socket."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def _serve(connection: socket.socket) -> _Forked | None:
    """Answer requests; returns in the child with the request that made it, and in the server when it is over."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    pending = b""
    workers: set[int] = set()
    standbys = Standbys()
    while True:
        for key, _ in selector.select():
            if key.fd == wake:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
                _report_exits(connection, workers, standbys)
                continue
            data = connection.recv(1 << 20)
            if not data:
                return None
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                answer = _make(request, standbys)
                if isinstance(answer, _Forked):
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    standbys.close()
                    connection.close()
                    for handle in (wake, woken):
                        os.close(handle)
                    return answer
                if not request["ahead"]:
                    workers.add(answer.get("pid", 0))
                _say(connection, answer)


def _make(request: dict[str, Any], standbys: Standbys) -> dict[str, Any] | _Forked:
    """Start a worker, or make a standby; the answer, or, in the child, what it is to be."""
    if standbys.start(request["standby"], request):
        return {"pid": request["standby"], "unsafe": ""}
    unsafe = why_not_to_fork() if request["fork"] else ""
    if unsafe or not request["fork"]:
        return {} if request["ahead"] else _execute(request) | {"unsafe": unsafe}
    try:
        pid, channel = standbys.fork() if request["ahead"] else (os.fork(), None)
    except OSError as error:
        return {"failed": f"no process can be forked: {error.strerror}"}
    return {"pid": pid, "unsafe": ""} if pid else _Forked(request, channel)


def why_not_to_fork() -> str:
    """Why a forked child of this process could hang or fail, in words; empty when it is safe."""
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"{threads} threads are running in the fork server, begun by one of the imported modules"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "one of the imported modules has initialised CUDA"
    return ""


def _execute(request: dict[str, Any]) -> dict[str, Any]:
    """Start the command as it stands. Not by a fork of Python: other threads of this process may hold its locks."""
    command, env = request["command"], request["env"]
    files: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    for name, handle in (("stdout", 1), ("stderr", 2)):
        if request[name]:
            files.append((os.POSIX_SPAWN_OPEN, handle, request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
    try:
        pid = os.posix_spawnp(
            command[0], command, env, file_actions=files, setsid=True, setsigdef=(*NOTICES, signal.SIGCHLD)
        )
    except OSError as error:
        return {"failed": f"{command[0]} cannot be started: {error.strerror}"}
    return {"pid": pid}


def _report_exits(connection: socket.socket, workers: set[int], standbys: Standbys) -> None:
    """Also what workers have left behind ends here; nobody has asked for that."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        standbys.ended(pid)
        if pid in workers:
            workers.remove(pid)
            _say(connection, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent is gone, and so will be this process
        connection.sendall(json.dumps(message).encode() + b"\n")


def _leave_server() -> None:
    """What is the server's alone is not this process's, which was forked from it."""
    die_with_parent()
    os.setsid()
    _redirect(0, os.devnull, os.O_RDONLY)  # where the socket was


def _become(request: dict[str, Any]) -> None:
    """Be what ``python <argv>`` would be: the rest of this process's life is the script's."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    for name, handle in (("stdout", 1), ("stderr", 2)):
        if request[name]:
            _redirect(handle, request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _start_anew()
    report_errors({__file__})
    argv = request["command"][2:]  # after python -u
    module, script, *arguments = argv if argv[0] == "-m" else ["", *argv]
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
    main(sys.argv[1:])
