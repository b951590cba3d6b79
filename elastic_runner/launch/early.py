"""What a launcher does when it is asked to stop while it has no workers, who would have something to save.

Before there are any it only leaves: as the first process of a container it would not even hear of a signal that it has
no handler for, and torch's handlers are there only once workers are. When they are gone nothing is raised any more: how
it ends is known, and a signal can only shorten what is left to do.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from elastic_runner.environment import NOTICES
from elastic_runner.errors import ExitCode

_ACTING = 5.0
"""Seconds for a notice to have an effect before this process is ended without one."""


class Stopped(SystemExit):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(int(ExitCode.INTERRUPTED))
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"{self.signal.name}: stopped before there were workers"


def leave_at_once() -> None:
    """From now on, a notice to stop ends this process: for imports, some of which lose an exception on its way up."""

    _on_notice(_leave)


def leave_when_asked(error: Callable[[int], BaseException] = Stopped) -> None:
    """From now on, a notice to stop raises ``error`` of its number, until somebody else handles it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise error(number)

    _on_notice(leave)


@contextmanager
def leaving_anyway() -> Iterator[None]:
    """Within, a notice without an effect ends this process, as long as notices are handled as they are now.

    Some of torch's rendezvous wait for other nodes in C++, where no handler is run, or lose what it raises.
    """
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    ours, its = socket.socketpair()
    its.setblocking(False)
    over = threading.Event()

    def listen() -> None:
        with ours:
            while heard := ours.recv(1):
                number = heard[0]
                if not over.wait(_ACTING) and signal.getsignal(number) is handlers[number]:
                    _leave(number)

    threading.Thread(target=listen, name="notices to stop", daemon=True).start()
    signal.set_wakeup_fd(its.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        over.set()
        its.close()


def stay(hurry: Callable[[int], object] = lambda number: None) -> None:
    """From now on, a notice to stop changes nothing in how this process ends; ``hurry`` is told its number."""
    _on_notice(lambda number, frame: hurry(number))


def hear_no_more() -> None:
    """The same to the very end: Python takes its own handlers away before the process is gone."""
    _on_notice(signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None = None) -> None:
    message = f"elastic-runner: interrupted ({int(ExitCode.INTERRUPTED)}): {Stopped(number)}\n"
    with suppress(OSError):
        os.write(1, message.encode())
    os._exit(ExitCode.INTERRUPTED)


def _on_notice(do: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Handle notices, but for those that are ignored, such as by nohup, and what else torch's agent or we handle."""
    for number in signal.valid_signals():
        present = signal.getsignal(number)
        handled = (getattr(present, "__module__", None) or "").startswith(("torch.distributed.elastic.", __name__))
        if handled or (number in NOTICES and present != signal.SIG_IGN):
            signal.signal(number, do)
