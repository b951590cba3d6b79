"""Handlers of signals, as they were before a test of what changes them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Within, they may be changed."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
