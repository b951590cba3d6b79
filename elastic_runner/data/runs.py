"""Runs of positions: which part of an epoch was used, in little memory however long it is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

Run = tuple[int, int]
"""First position and one past the last."""


@dataclass
class Runs:
    """A set of positions as sorted runs that lie apart: a single one while an epoch is used in order."""

    _runs: list[Run] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the largest position; 0 when there is none."""
        return self._runs[-1][1] if self._runs else 0

    def add(self, first: int, last: int) -> list[Run]:
        """Add a run; what of it was there already."""
        start = bisect_left(self._runs, first, key=lambda run: run[1])
        stop = bisect_right(self._runs, last, key=lambda run: run[0])
        near = self._runs[start:stop]  # all that it overlaps or touches: they become one
        merged = [*near, (first, last)]
        self._runs[start:stop] = [(min(a for a, _ in merged), max(b for _, b in merged))]
        return [(max(a, first), min(b, last)) for a, b in near if max(a, first) < min(b, last)]

    def holes(self, end: int) -> list[Run]:
        """What is not in the set below ``end``."""
        edges = [0, *(min(edge, end) for run in self._runs for edge in run), end]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def total(runs: list[Run]) -> int:
    """How many positions they have."""
    return sum(last - first for first, last in runs)
