"""All trackers of a run, on global rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from elastic_runner.observability.summary import Status
from elastic_runner.tracking.feed import Feed, History
from elastic_runner.tracking.protocol import Opener, TrackedRun
from elastic_runner.tracking.values import Record

_SHORT: Final = 5.0
"""Seconds, of which the grace that a scheduler gives has enough, where the next attempt can tell the rest."""


class Trackers:
    """Told of the record as it grows; none of them can stop or delay the run, but for the wait of ``end``."""

    def __init__(self, openers: Mapping[str, Opener], run: TrackedRun, *, limit: float) -> None:
        self._openers = openers
        self._run = run
        self._limit = limit
        self._feeds: list[Feed] = []

    def begin(self, history: History) -> None:
        """The attempt goes on from where ``history`` ends; once more where the program itself went back."""
        self.end("interrupted")
        self._feeds = [Feed(name, opener, self._run, history) for name, opener in self._openers.items()]

    def tell(self, record: Record) -> None:
        """A line has gone on record."""
        for feed in self._feeds:
            feed.tell(record)

    def saved(self) -> None:
        """A checkpoint is durable."""
        for feed in self._feeds:
            feed.saved()

    def end(self, status: Status, *, wait: bool = True) -> None:
        """Take leave. ``wait``: until all is told, for ``limit`` seconds at most, or less where the run is to go on."""
        deadline = time.monotonic() + (self._limit if status == "finished" else min(self._limit, _SHORT))
        for feed in self._feeds:
            feed.close(status)
        for feed in self._feeds if wait else ():
            feed.join(deadline - time.monotonic())
        self._feeds = []
