"""Notices to stop: a signal sets a flag that the ranks share at their next step; the same again ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from elastic_runner.environment import NOTICES
from elastic_runner.errors import ExitCode

_SAME_NOTICE = 1.0
"""Seconds within which further signals are the same notice: a terminal, or a scheduler, and an agent both send it."""


class StopNotice:
    """Whether this process was asked to stop. Nothing else is done inside the handler."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.enough: str | None = None
        """Why the program itself wants no more, once it does."""
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    @property
    def given(self) -> bool:
        """Whether to stop."""
        return self.received is not None or self.enough is not None

    def why(self, *, draining: bool) -> str:
        """Why the run ends here, in words. ``draining``: whether the ranks have agreed to stop."""
        if not draining:
            return "the program left the loop"
        return f"asked to stop ({self.received or 'by another rank'})"

    def install(self) -> None:
        """Handle the notices. Only the main thread can; elsewhere nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in NOTICES:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back what was there before."""
        for number, handler in self._previous.items():
            # None: the handler before was not installed by Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self.received is None:
            self.received, self._at = name, now
        elif name == self.received and now - self._at > _SAME_NOTICE:
            # The same once more is impatience. Another one is not: schedulers warn by USR1 and then send TERM.
            os.write(2, b"elastic_runner: second notice to stop; leaving without a save\n")
            os._exit(ExitCode.INTERRUPTED)
