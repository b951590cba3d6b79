"""One piece of work beside training, with a deadline and an outcome that nobody can overlook."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

log = logging.getLogger(__name__)


def _nothing() -> None:
    """The default of what follows."""


class Background:
    """Runs one thing at a time in a thread of its own. ``phase``: the context, with its deadline, that it runs in."""

    def __init__(self, phase: Callable[[], AbstractContextManager[None]]) -> None:
        self._phase = phase
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._untaken = False
        self._error: BaseException | None = None
        self._done: Callable[[], None] = _nothing

    @property
    def busy(self) -> bool:
        """Whether something was started whose outcome was not taken yet."""
        return self._untaken

    @property
    def ended(self) -> bool:
        """Whether something has ended whose outcome was not taken yet."""
        return self._untaken and self._ended.is_set()

    def start(
        self, name: str, work: Callable[[], None], *, done: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:  # fmt: skip
        """Run ``work``, and then ``after``, which does not belong to the outcome.

        ``done``: called by whoever takes the outcome, when it is a good one. The one before must have had its outcome
        taken; its ``after`` is waited for.
        """
        if self._untaken:
            raise RuntimeError("the outcome of what is going on must be taken first")
        self.rest()
        self._ended.clear()
        # A daemon: a process that must leave is not held up by a storage that does not answer.
        thread = threading.Thread(target=self._run, args=(work, after), name=name, daemon=True)
        thread.start()
        self._thread, self._done, self._untaken = thread, done, True

    def outcome(self) -> BaseException | None:
        """Wait for the end; what it failed with, if it did."""
        if not self._untaken:
            return None
        self._ended.wait()
        self._untaken = False
        error, self._error = self._error, None
        if error is None:
            self._done()
        return error

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether nothing is going on any more. The outcome stays to be taken."""
        return not self._untaken or self._ended.wait(seconds)

    def rest(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, until all is done that follows an outcome, too; whether it is."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, work: Callable[[], None], after: Callable[[], None]) -> None:
        try:
            with self._phase():
                work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
        if self._error is None:
            try:
                after()
            except BaseException:  # the outcome stands
                log.exception("after %s", threading.current_thread().name)
