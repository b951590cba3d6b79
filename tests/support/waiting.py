"""Waiting for what other processes and threads bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it", *, seconds: float = 20.0, every: float = 0.005) -> T:
    """The condition's first true value. Raises AssertionError after so many seconds without one."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} has not come about in {seconds:g} s"
        time.sleep(every)
    return value
