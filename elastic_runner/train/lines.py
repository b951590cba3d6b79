"""Ledger lines of this attempt that wait until their steps are committed; checkpoint/snapshots.py has the rule."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator

from elastic_runner.data.ledger import Record

CARRIED = 512
"""Lines that a snapshot carries at most besides those that wait: more than an object store keeps waiting."""


class StepLines:
    """Every rank keeps them; ``append`` puts one on record, on rank 0."""

    def __init__(self, append: Callable[[Record], None], attempt: int) -> None:
        self._append = append
        self._attempt = attempt
        self._holding = False
        self._held: deque[Record] = deque()
        self._recent: deque[tuple[int, bytes]] = deque()

    def add(self, record: Record) -> None:
        """A line of a step or an evaluation: it waits where lines are held, and goes on record at once elsewhere."""
        line = {**record, "attempt": self._attempt, "time": round(time.time(), 3)}
        if not self._holding:
            self._append(line)
            return
        self._held.append(line)
        self._recent.append((line["step"], json.dumps(line, separators=(",", ":")).encode() + b"\n"))
        while len(self._recent) > len(self._held) + CARRIED:
            self._recent.popleft()

    def hold(self, on: bool) -> None:
        """Whether lines wait for ``release``; those that wait are released when they no longer need to."""
        self._holding = on
        if not on:
            self._recent.clear()
            while self._held:
                self._append(self._held.popleft())

    def release(self, step: int) -> None:
        """Put those up to this step on record."""
        while self._held and self._held[0]["step"] <= step:
            self._append(self._held.popleft())

    def saved(self, step: int) -> None:
        """A checkpoint of this step is durable, and what is on record up to there."""
        while self._recent and self._recent[0][0] <= step:
            self._recent.popleft()

    def recent(self) -> bytes:
        """Those since the last checkpoint, as a ledger has them."""
        return b"".join(line for _, line in self._recent)


def missing(recovered: bytes, last: int, resumed_at: int) -> Iterator[Record]:
    """Of lines that came with a snapshot of step ``resumed_at``, those that are not on record: it ends with the
    attempt's step ``last``. Pure."""
    for line in recovered.splitlines():
        record = json.loads(line)
        if last < record["step"] <= resumed_at:
            yield record
