"""Notices to stop: a signal sets a flag that the ranks share at their next step; a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from elastic_runner.errors import ExitCode

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_SAME_NOTICE = 0.3
"""Seconds within which further signals are the same notice: a terminal and an agent both send Ctrl-C."""


class StopNotice:
    """Whether this process was asked to stop. Nothing else is done inside the handler."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Handle SIGTERM, SIGUSR1 and SIGINT. Only the main thread can; elsewhere nothing is installed."""
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
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number).name, now
        elif now - self._at > _SAME_NOTICE:
            os.write(2, b"elastic_runner: second notice to stop; leaving without a save\n")
            os._exit(ExitCode.INTERRUPTED)
