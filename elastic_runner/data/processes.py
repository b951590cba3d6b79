"""Loader processes: deaf to notices to stop, which are for the training process, and gone when that one is.

A private name of multiprocessing, read in Python 3.10 to 3.13: ``current_process()._config["tempdir"]`` is the
directory of its sockets; where it is None, one is made when it is needed. tests/unit/test_loader_sockets.py fails when
it changes.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process, parent_process
from threading import Thread
from typing import Any, cast

from elastic_runner import stacks, verdict
from elastic_runner.environment import NOTICES, read_environment

_PARENT_CHECK_S = 1.0
_SOCKET = 107 - len("/listener-12345678")
"""Bytes of a directory's name that leave room for that of a socket."""


@contextmanager
def notices_held() -> Iterator[None]:
    """Start loader processes inside: a notice that comes meanwhile must not meet one without its shield."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield(_: int) -> None:
    """``worker_init_fn``: a notice to the whole process group leaves the batches in flight alone.

    The parent's own SIGTERM still ends the process: torch sends it to one that is stuck and then joins it for ever.
    So does the parent's death. torch looks for that only between batches, and a process that blocks on a full pipe
    to its dead parent would stay.
    """
    agent_dir = read_environment().agent_dir
    place_sockets(agent_dir)
    verdict.be_known(agent_dir)
    stacks.answer_requests(agent_dir)  # a forked process does so already
    for number in NOTICES[1:]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES[:1])
    Thread(target=_leave_with_parent, args=(parent_process(), os.getppid()), daemon=True).start()


def place_sockets(agent_dir: str | None) -> None:
    """Into the launcher's directory, which goes whatever ends this process; else into one of its own."""
    fits = agent_dir is not None and len(os.fsencode(agent_dir)) <= _SOCKET
    _multiprocessing()["tempdir"] = agent_dir if fits else None


def remove_sockets(agent_dir: str | None) -> None:
    """What multiprocessing would remove at an end in order."""
    directory = _multiprocessing().get("tempdir")
    if directory not in (None, agent_dir):
        shutil.rmtree(directory, ignore_errors=True)


def _multiprocessing() -> dict[str, Any]:
    return cast(dict[str, Any], vars(current_process())["_config"])


def _leave_with_parent(parent: Any, starter: int) -> None:
    # A forked process holds what would tell those forked before it that the parent is dead, so each looks at who
    # started it as well. That is the parent when forked, and a server where Python's start method is "forkserver".
    while os.getppid() == starter and parent.is_alive():
        notice = signal.sigtimedwait(NOTICES[:1], _PARENT_CHECK_S)
        if notice is not None and notice.si_pid == parent.pid:
            break
    remove_sockets(read_environment().agent_dir)
    os._exit(0)
