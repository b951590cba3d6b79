"""Skips: global batches that a run passes over for good, as its ledger has them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_runner.data.partition import Cursor


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A global batch that is never trained on, in whatever attempt and at whatever world size."""

    epoch: int
    """0-based."""
    first: int
    """First position in the epoch's order."""
    last: int
    """One past the last position."""
    step: int
    """The step that took the next samples instead."""
    reason: str
    """Why, in one line."""

    def record(self) -> dict[str, Any]:
        """For the ledger."""
        return {"event": "skip", **asdict(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Skip | None:
        """None where it is another record, or something in it is missing or impossible."""
        counts = {name: record.get(name) for name in ("epoch", "first", "last", "step")}
        known = {name: value for name, value in counts.items() if type(value) is int and value >= 0}
        if record.get("event") != "skip" or len(known) < len(counts) or known["first"] >= known["last"]:
            return None
        return cls(**known, reason=str(record.get("reason", "")))


def recorded(records: Iterable[Mapping[str, Any]]) -> list[Skip]:
    """Those of a ledger: of all attempts, since none goes back behind a skip."""
    return [skip for record in records if (skip := Skip.of(record)) is not None]


def jumps(skips: Iterable[Skip]) -> dict[Cursor, Cursor]:
    """From where a skipped batch would begin to where the next one does, as ``next_batch`` wants it."""
    return {Cursor(epoch=s.epoch, position=s.first): Cursor(epoch=s.epoch, position=s.last) for s in skips}


START = (-1, 0)
"""Epoch and position before all that a run uses."""


def begins(here: tuple[int, int], after: tuple[int, int], skips: Sequence[Skip]) -> bool:
    """Whether a batch may begin ``here``, an epoch and a position, once all before ``after`` is used: there or, where
    that ended its epoch, at the next one's start, what is skipped passed over."""
    over = {(skip.epoch, skip.first): (skip.epoch, skip.last) for skip in skips}
    reached = [(after[0] + 1, 0), after]
    while reached:
        place = reached.pop()
        if place in over:
            reached += [(place[0] + 1, 0), over[place]]
        elif place == here:
            return True
    return False
