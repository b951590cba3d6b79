"""Deadlines per phase: past one, the process prints where it stands and leaves, so that a hang becomes a restart.

Where the agent is ours, each change of phase is a beat of the heart, and the agent judges: it also sees a process that
cannot run Python, and asks all ranks for their stacks. The thread here then acts later, in case that the agent cannot.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from elastic_runner.errors import ExitCode
from elastic_runner.heartbeat import MOVING, Heart, Moved, counts_from
from elastic_runner.worker.limits import Learned

_PRINTING = 5.0
"""Seconds for last words: a full pipe that nobody reads must not keep a process from leaving."""
AFTER_AGENT = 60.0
"""Seconds that the agent has to notice, to gather the stacks of all ranks and to end this process."""
SUSPENDED = 5.0
"""The thread woken so many seconds late was not the only one to stand still: the clock begins anew."""


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


class _Clock(NamedTuple):
    """One phase that is entered and not left yet."""

    name: str
    since: float
    limit: float
    learned: bool
    progress: int = 0


class PhaseWatch:
    """Watches the innermost phase. ``limits``: seconds by phase name; ``where`` describes this process in messages.

    ``learned``: what is known of the durations of phases that repeat. ``heart``: where the agent looks. ``took``: told
    the seconds of each phase that is left, without those of phases inside it. ``moved``: when bytes last moved.
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        where: Callable[[], str],
        expired: Callable[[str], None] = leave,
        *,
        learned: Mapping[str, Learned] | None = None,
        heart: Heart | None = None,
        took: Callable[[str, float], None] = lambda name, seconds: None,
        moved: Moved | None = None,
    ) -> None:
        self._limits = limits
        self._where = where
        self._expired = expired
        self._learned = learned or {}
        self._heart = heart
        self._took = took
        self.moved = moved or Moved()
        """To be called as bytes of a checkpoint move."""
        self._margin = AFTER_AGENT if heart is not None else 0.0
        self._stack: list[_Clock] = []
        self._failed: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes = math.inf
        self._closed = False

    @property
    def current(self) -> str:
        """Name of the innermost phase, or of the one that an error has just left; "idle" outside of all."""
        return self._failed or (self._stack[-1].name if self._stack else "idle")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase; an outer phase's clock stands still meanwhile. Raises KeyError for an unknown name."""
        limit, entered = self._limits[name], time.monotonic()
        learned = self._learned.get(name)
        allowed = limit if learned is None else learned.limit(limit)
        self._start()
        with self._changed:
            self._failed = None
            self._stack.append(_Clock(name, entered, allowed, allowed < limit))
            self._tell(entered)
        try:
            yield
        except BaseException:
            self._failed = self._failed or name
            learned = None
            raise
        finally:
            left = time.monotonic()
            with self._changed:
                took = left - self._stack.pop().since
                if learned is not None:
                    learned.took(took)
                self._took(name, took)
                if self._stack:
                    outer = self._stack[-1]
                    self._stack[-1] = outer._replace(since=outer.since + left - entered)
                self._tell(left)

    def progress(self) -> None:
        """Say that the program has come on within its phase: who is behind can be told. The clock runs on."""
        if self._heart is None:
            return
        with self._changed:
            if self._stack:
                self._stack[-1] = self._stack[-1]._replace(progress=self._stack[-1].progress + 1)
                self._tell(time.monotonic())

    def believe_no_more(self) -> None:
        """Go by the given limits alone."""
        self._learned = {}

    def close(self) -> None:
        """End the watching thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _tell(self, now: float) -> None:
        """Tell those who watch. The thread is woken only if it would come too late: not twice in every step."""
        if self._stack:
            name, since, limit, learned, progress = self._stack[-1]
            if since + limit + self._margin < self._wakes:
                self._changed.notify()
        else:
            name, since, limit, learned, progress = "", now, 0.0, False, 0
        if self._heart is not None:
            self._heart.beat(name, since=since, limit=limit, learned=learned, progress=progress)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="elastic_runner deadlines", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                deadline = self._deadline()
                left = deadline - time.monotonic()
                if left > 0:
                    self._wakes = deadline
                    self._changed.wait(None if left == math.inf else left)
                elif -left > SUSPENDED:
                    self._stack[-1] = self._stack[-1]._replace(since=time.monotonic())
                else:
                    self._expired(self._reason())
                    return

    def _deadline(self) -> float:
        if not self._stack:
            return math.inf
        clock = self._stack[-1]
        return counts_from(clock.name, clock.since, self.moved.at) + clock.limit + self._margin

    def _reason(self) -> str:
        clock = self._stack[-1]
        why = "learned: timeouts.learned_factor, learned_floor" if clock.learned else f"timeouts.{clock.name}"
        still = " without a byte moving" if clock.name in MOVING else ""
        return (
            f"elastic_runner: {self._where()}: phase '{clock.name}' took longer than {clock.limit:g} s{still} ({why}); "
            f"leaving, to be restarted. Stacks of this process:"
        )
