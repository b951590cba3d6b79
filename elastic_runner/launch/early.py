"""Asked to stop before there are workers, who would have something to save: the launcher only leaves.

As the first process of a container it would not even hear of a signal that it has no handler for, and torch's handlers
are there only once workers are.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from elastic_runner.environment import NOTICES
from elastic_runner.errors import ExitCode


class Stopped(SystemExit):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(int(ExitCode.INTERRUPTED))
        self.signal = signal.Signals(number)


def leave_when_asked(error: Callable[[int], BaseException] = Stopped) -> None:
    """From now on, a notice to stop raises ``error`` of its number, until somebody else handles it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise error(number)

    for number in NOTICES:
        if signal.getsignal(number) != signal.SIG_IGN:  # such as nohup
            signal.signal(number, leave)
