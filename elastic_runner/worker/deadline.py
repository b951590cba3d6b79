"""Deadlines per phase: past one, the process prints where it stands and leaves, so that a hang becomes a restart.

The thread needs the GIL to judge; a process stuck in C code that holds it is the agent's to notice (not there yet).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from elastic_runner.errors import ExitCode

_PRINTING = 5.0
"""Seconds for last words: a full pipe that nobody reads must not keep a process from leaving."""


def leave(message: str) -> None:
    """Print the message and the stacks of all threads, and end the process at once."""
    leave_soon(ExitCode.FAILED)
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(ExitCode.FAILED)


def leave_soon(code: int) -> None:
    """End the process with ``code`` in a few seconds, even if the caller is held up in printing until then."""
    timer = threading.Timer(_PRINTING, os._exit, (int(code),))
    timer.daemon = True
    timer.start()


class PhaseWatch:
    """Watches the innermost phase. ``limits``: seconds by phase name; ``where`` describes this process in messages."""

    def __init__(
        self, limits: Mapping[str, float], where: Callable[[], str], expired: Callable[[str], None] = leave
    ) -> None:
        self._limits = limits
        self._where = where
        self._expired = expired
        self._stack: list[tuple[str, float]] = []
        self._failed: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def current(self) -> str:
        """Name of the innermost phase, or of the one that an error has just left; "idle" outside of all."""
        return self._failed or (self._stack[-1][0] if self._stack else "idle")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase; an outer phase's clock stands still meanwhile. Raises KeyError for an unknown name."""
        limit, entered = self._limits[name], time.monotonic()
        self._start()
        with self._changed:
            self._failed = None
            self._stack.append((name, entered + limit))
            self._changed.notify()
        try:
            yield
        except BaseException:
            self._failed = self._failed or name
            raise
        finally:
            spent = time.monotonic() - entered
            with self._changed:
                self._stack.pop()
                if self._stack:
                    outer, deadline = self._stack[-1]
                    self._stack[-1] = (outer, deadline + spent)
                self._changed.notify()

    def close(self) -> None:
        """End the watching thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="elastic_runner deadlines", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._stack:
                    self._changed.wait()
                    continue
                name, deadline = self._stack[-1]
                left = deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                limit = self._limits[name]
                self._expired(
                    f"elastic_runner: {self._where()}: phase '{name}' took longer than {limit:g} s "
                    f"(timeouts.{name}); leaving, to be restarted. Stacks of this process:"
                )
                return
