"""Learned limits: a phase that repeats need not wait for its deadline to be known as hung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from elastic_runner.config import TimeoutConfig

LEARNED = ("step",)
"""Phases that repeat and whose durations are alike. Saves and evaluations depend on too much else."""

RECENT = 1000
"""At least so many of the last durations count, at most twice as many."""
ENOUGH = 10
"""Durations seen before they are believed: the first steps still warm up."""

_OF_LIMITS = ("learned_factor", "learned_floor")


def deadlines(timeouts: TimeoutConfig) -> dict[str, float]:
    """Seconds by phase."""
    return {field.name: getattr(timeouts, field.name) for field in fields(timeouts) if field.name not in _OF_LIMITS}


class Learned:
    """The limit of one phase: ``factor`` times its longest recent duration, not below ``floor`` (seconds)."""

    def __init__(self, factor: float, floor: float) -> None:
        self._factor = factor
        self._floor = floor
        self._seen = 0
        # Two blocks instead of a window: the older one is dropped when the newer one is full.
        self._before = self._now = 0.0

    def took(self, seconds: float) -> None:
        """One more duration."""
        if self._seen and self._seen % RECENT == 0:
            self._before, self._now = self._now, 0.0
        self._seen += 1
        self._now = max(self._now, seconds)

    def limit(self, most: float) -> float:
        """Seconds that the next one may take, never more than ``most``; ``most`` while too little is known."""
        if self._seen < ENOUGH:
            return most
        return min(most, max(self._floor, self._factor * max(self._before, self._now)))


def learners(timeouts: TimeoutConfig) -> Mapping[str, Learned]:
    """By phase; none where it is switched off."""
    if not timeouts.learned_factor:
        return {}
    return {name: Learned(timeouts.learned_factor, timeouts.learned_floor) for name in LEARNED}
