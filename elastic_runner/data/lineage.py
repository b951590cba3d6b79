"""Lineage: which records of a ledger led to a state.

Attempts form a tree: an attempt may pass over what newer ones did, and a later one take that up again. Each start says
which attempt's state it rests on (``rests_on``) and of which step (``resumed_at``); what that attempt did beyond it did
not lead there. Ledgers of older versions, and programs that restore by themselves, do not say it: they are taken to
rest on the newest attempt before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic_runner.data.ledger import Record

OUTSIDE = 0
"""In the place of an attempt: none of this run's. The state is a new one, or was imported."""


class Origin(NamedTuple):
    """A state that an attempt begins with."""

    attempt: int | None
    """Whose; OUTSIDE: nobody's; None: not known."""
    step: int
    """Optimizer steps that it has taken."""


class Placed(NamedTuple):
    """A record in its place."""

    record: Record
    """All that it says."""
    led: bool
    """Whether it led to the state in question; of a start, whether a step of it could. Skips did: they are for good."""
    other: bool
    """Whether it is of a course that is known to have come to something else than what led there."""


class _Key(NamedTuple):
    attempt: int
    number: int
    """Of the attempt's starts, from 0."""

    @classmethod
    def outside(cls, step: int) -> _Key:
        """Of what is behind a state of this step that no attempt made."""
        return cls(-1, step)


@dataclass
class _Course:
    """An attempt from one of its starts to the next."""

    resumed_at: int
    base: _Key
    reached: int
    """Its newest step."""
    agreed: float = math.inf
    """The step after which it is known to have come to something else than those before it, or not to be relied on."""


class Lineage:
    """Of ``records``, in the ledger's order. Memory is taken by the starts alone, so that a ledger need not fit."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._courses: dict[_Key, _Course] = {}
        self._newest = _Key.outside(0)
        self._newest_of: dict[int, _Key] = {}
        for record in records:
            self._place(record)

    def through(self, records: Iterable[Record]) -> Iterator[Record]:
        """Take in what passes."""
        for record in records:
            self._place(record)
            yield record

    def reached(self, attempt: int) -> int:
        """The newest step of an attempt; 0 where it is not on record."""
        key = self._newest_of.get(attempt)
        return 0 if key is None else self._courses[key].reached

    def marked(self, records: Iterable[Record], origin: Origin | None = None) -> Iterator[Placed]:
        """The same records, read again: whether they led to ``origin``, by default the newest state.

        Left out are attempts that have begun since, and lines that two attempts have found in memory, the second time.
        """
        limits = self._limits(origin)
        others = self._others(limits, math.inf if origin is None else origin.step)
        again = Lineage()
        for record in records:
            key = again._place(record)
            if key is None or not (key in self._courses or key == _Key.outside(0)):
                continue
            step = _number(record, "resumed_at" if is_start(record) else "step") or 0
            led = record.get("event") == "skip" or step <= limits.get(key, -1)
            agreed = _number(record, "agreed")
            yield Placed(record, led, (step if agreed is None else agreed + 1) > others.get(key, math.inf))

    def _place(self, record: Record) -> _Key | None:
        """Which course it belongs to; None: there already."""
        attempt, step = _number(record, "attempt"), _number(record, "step")
        attempt = max(self._newest.attempt, 0) if attempt is None else attempt
        if is_start(record):
            return self._begin(attempt, Origin(_number(record, "rests_on"), record["resumed_at"]))
        if record.get("event") != "step" or step is None:
            key = self._newest_of.get(attempt, self._newest)
        elif attempt not in self._newest_of:
            key = self._begin(attempt, Origin(None, step - 1))  # its start is not on record
        else:
            key = self._newest_of[attempt]
        if (course := self._courses.get(key)) is not None:
            if record.get("event") == "step" and step is not None:
                if key != self._newest and step <= course.reached:
                    return None
                course.reached = max(course.reached, step)
            elif (agreed := _number(record, "agreed")) is not None:
                course.agreed = min(course.agreed, agreed)
        return key

    def _begin(self, attempt: int, origin: Origin) -> _Key:
        before = self._newest_of.get(attempt)
        key = _Key(attempt, 0 if before is None else before.number + 1)
        self._courses[key] = _Course(resumed_at=origin.step, base=self._find(origin), reached=origin.step)
        self._newest = self._newest_of[attempt] = key
        return key

    def _find(self, origin: Origin) -> _Key:
        """The newest course of the attempt that came to this step; where there is none, the newest of all."""
        if origin.attempt == OUTSIDE:
            return _Key.outside(origin.step)
        newest = None if origin.attempt is None else self._newest_of.get(origin.attempt)
        if newest is None:
            return self._newest
        for number in range(newest.number, -1, -1):
            course = self._courses[key := newest._replace(number=number)]
            if course.resumed_at <= origin.step <= course.reached:
                return key
        return newest

    def _limits(self, origin: Origin | None) -> dict[_Key, float]:
        """The courses behind a state, and the last step of each that led there."""
        key, limit = (self._newest, math.inf) if origin is None else (self._find(origin), float(origin.step))
        limits = {key: limit}
        while (course := self._courses.get(key)) is not None:
            key, limit = course.base, min(limit, course.resumed_at)
            limits[key] = limit
        return limits

    def _others(self, limits: dict[_Key, float], step: float) -> dict[_Key, float]:
        """The last step of each course whose further ones are known to be others than those that led to ``step``."""
        found: dict[_Key, float] = {}
        for key, course in self._courses.items():
            if course.resumed_at > found.get(course.base, math.inf):
                found[key] = -1
            elif course.agreed < step and limits.get(key, -1) <= course.agreed:
                found[key] = course.agreed
        return found


def is_start(record: Record) -> bool:
    """Whether it says where an attempt resumed."""
    return record.get("event") == "start" and _number(record, "resumed_at") is not None


def from_outside(record: Record) -> bool:
    """Whether an attempt began with steps of which this record can know nothing: the state was imported."""
    return is_start(record) and record["resumed_at"] > 0 and record.get("rests_on") == OUTSIDE


def course(read: Callable[[], Iterable[Record]], origin: Origin | None = None) -> Iterator[Record]:
    """The records that led to a state, by default the newest; ``read`` is called twice."""
    return (placed.record for placed in Lineage(read()).marked(read(), origin) if placed.led)


def effective(records: Iterable[Record], origin: Origin | None = None) -> tuple[list[Record], int]:
    """The records that led to a state, and how many step records did not, for ledgers that fit into memory."""
    everything = list(records)
    placed = list(Lineage(everything).marked(everything, origin))
    return [p.record for p in placed if p.led], sum(p.record.get("event") == "step" for p in placed if not p.led)


def _number(record: Record, name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int and value >= 0 else None
