"""One piece of work beside training, with a deadline and an outcome that nobody can overlook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


def _nothing() -> None:
    """Nobody wants to know."""


class Background:
    """Runs one thing at a time in a thread of its own. ``phase``: the context, with its deadline, that it runs in."""

    def __init__(self, phase: Callable[[], AbstractContextManager[None]]) -> None:
        self._phase = phase
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done: Callable[[], None] = _nothing

    @property
    def busy(self) -> bool:
        """Whether something was started whose outcome was not taken yet."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether something has ended whose outcome was not taken yet."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, name: str, work: Callable[[], None], done: Callable[[], None] = _nothing) -> None:
        """Run ``work``; the one before must have had its outcome taken. ``done``: called by whoever takes the outcome,
        when it is a good one.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self._thread.name} is still going on")
        # A daemon: a process that must leave is not held up by a storage that does not answer.
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        thread.start()
        self._thread, self._done = thread, done

    def outcome(self) -> BaseException | None:
        """Wait for the end; what it failed with, if it did."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._done()
        return error

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether nothing is going on any more. The outcome stays to be taken."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy or self.ended

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with self._phase():
                work()
        except BaseException as error:
            self._error = error
