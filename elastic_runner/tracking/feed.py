"""A thread that tells one tracker what goes on record, beside training: a tool that is slow or away stops nothing.

The ledger has all of it, so nothing has to be kept for a tool but how far it has been told: an attempt begins by
telling it what it lacks. A tool that can take back what it was told is given each step once, from the attempts that led
to the present state; any other one each step once, as it was first told.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

import tenacity

from elastic_runner.observability.summary import Status
from elastic_runner.tracking import told
from elastic_runner.tracking.protocol import Opener, TrackedRun, Tracker
from elastic_runner.tracking.told import Fresh, Piece, Told
from elastic_runner.tracking.values import Record, is_whole, values_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST: Final = 100_000
"""Lines that wait for a tool that is away; what is more comes from the ledger, at the next start."""
_RETRY: Final = tenacity.wait_exponential(multiplier=15, max=1800)
"""Seconds between tries."""


class History(NamedTuple):
    """Reads the ledger up to where the attempt begins."""

    course: Callable[[], Iterable[Record]]
    """The records that led there, in order."""
    everything: Callable[[], Iterable[Record]]
    """All of them, as they were written."""


class Feed:
    """Of one tracker, in one attempt. Nothing that it is asked raises; only ``join`` waits."""

    def __init__(self, name: str, opener: Opener, run: TrackedRun, history: History) -> None:
        self._name = name
        self._opener = opener
        self._run = run
        self._history = history
        self._lines: queue.Queue[Record | Status | None] = queue.Queue(_MOST)
        """Records; None: a checkpoint is durable; a status: the end."""
        self._ending = threading.Event()
        """No try is repeated any more."""
        self._given_up = False
        self._course: list[Piece] = []
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tell(self, record: Record) -> None:
        """A line has gone on record."""
        self._put(record)

    def saved(self) -> None:
        """A checkpoint is durable: a time to write down how far the tool has been told."""
        self._put(None)

    def close(self, status: Status) -> None:
        """Tell what is left and take leave; a tool that is away is not waited for."""
        self._put(status)
        self._ending.set()

    def join(self, limit: float) -> None:
        """Wait for the end of it, ``limit`` seconds at most."""
        self._thread.join(max(limit, 0))
        if self._thread.is_alive():
            log.warning("tracker %s does not come to an end: it is told the rest at the next start", self._name)
            self._opener.abandon()

    def _put(self, line: Record | Status | None) -> None:
        if self._given_up:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._give_up("it has been away for too long")

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._ending.set()
        log.warning("tracker %s is told the rest at the next start: %s", self._name, reason)

    def _work(self) -> None:
        try:
            tracker = self._insist(self._open)
            fresh = Fresh(tracker.holds)
            self._insist(lambda: self._catch_up(tracker, fresh))
            while not isinstance(line := self._next(), str):
                if line is None:
                    self._insist(lambda: self._keep(tracker, all_of_it=False))
                elif fresh.take(line):
                    self._tell(tracker, line)
            self._keep(tracker, all_of_it=True)
            tracker.close(line)
        except BaseException as error:  # a tool's sys.exit is none of ours
            self._give_up(_reason(error))

    def _next(self) -> Record | Status | None:
        if self._given_up and self._lines.empty():
            return "interrupted"  # nothing more comes
        return self._lines.get()

    def _open(self) -> Tracker:
        known = told.read(self._run.storage, self._name)
        since = known.step
        if self._opener.rewinds and known.course:
            here: list[Piece] = []
            for record in filter(is_whole, self._history.course()):
                if record["event"] == "step":
                    told.extend(here, record)
            since = told.common(known.course, here)
        tracker = self._opener.open(self._run, known.run_id, since)
        self._course = told.cut(known.course, since)
        # Before anything is told: another attempt is to open the same run, and not to rely on what is taken back.
        self._write(tracker, self._course)
        return tracker

    def _catch_up(self, tracker: Tracker, fresh: Fresh) -> None:
        for record in self._history.course() if self._opener.rewinds else self._history.everything():
            if fresh.take(record):
                self._tell(tracker, record)

    def _tell(self, tracker: Tracker, record: Record) -> None:
        values = values_of(record)
        self._insist(lambda: tracker.log(record["step"], values, record["time"]))
        if record["event"] == "step":
            told.extend(self._course, record)

    def _keep(self, tracker: Tracker, *, all_of_it: bool) -> None:
        """Write down how far it has been told. Of the last step more may follow: its evaluation."""
        tracker.flush()
        step = self._course[-1][1] if self._course else 0
        self._write(tracker, told.cut(self._course, step if all_of_it else step - 1))

    def _write(self, tracker: Tracker, course: list[Piece]) -> None:
        kept = Told(attempt=self._run.attempt, run_id=tracker.run_id, course=course)
        told.write(self._run.storage, self._name, kept)

    def _insist(self, action: Callable[[], T]) -> T:
        """Try until it works, or the end is near."""
        retrying = tenacity.Retrying(
            wait=_RETRY,
            sleep=tenacity.sleep_using_event(self._ending),
            stop=tenacity.stop_when_event_set(self._ending),
            before_sleep=self._say_once,
            reraise=True,
        )
        return retrying(action)

    def _say_once(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if state.attempt_number == 1 and error is not None:
            log.warning("tracker %s is tried again, training goes on: %s", self._name, _reason(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
