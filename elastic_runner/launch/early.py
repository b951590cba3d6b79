"""Asked to stop before there are workers, who would have something to save: the launcher only leaves.

As the first process of a container it would not even hear of a signal that it has no handler for, and torch's handlers
are there only once workers are.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from elastic_runner.environment import NOTICES
from elastic_runner.errors import ExitCode


class Stopped(SystemExit):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(int(ExitCode.INTERRUPTED))
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"{self.signal.name}: stopped before there were workers"


def leave_at_once() -> None:
    """From now on, a notice to stop ends this process: for imports, some of which lose an exception on its way up."""

    def leave(number: int, frame: FrameType | None) -> None:
        message = f"elastic-runner: interrupted ({int(ExitCode.INTERRUPTED)}): {Stopped(number)}\n"
        with suppress(OSError):
            os.write(1, message.encode())
        os._exit(ExitCode.INTERRUPTED)

    _on_notice(leave)


def leave_when_asked(error: Callable[[int], BaseException] = Stopped) -> None:
    """From now on, a notice to stop raises ``error`` of its number, until somebody else handles it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise error(number)

    _on_notice(leave)


def _on_notice(leave: Callable[[int, FrameType | None], None]) -> None:
    for number in NOTICES:
        if signal.getsignal(number) != signal.SIG_IGN:  # such as nohup
            signal.signal(number, leave)
