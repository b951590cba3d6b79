"""How a node is doing: told by its agent's thread, asked by others, none of which waits for the other.

Live: the agent's own loop turns. Ready: all workers of the node are in their training loop.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from elastic_runner.heartbeat import Beat, Figures
from elastic_runner.launch.restart import Cause
from elastic_runner.observability.metrics import NodeMetrics

Beats: TypeAlias = Mapping[int, Beat | None]
"""The last beat of each worker by local rank; None before it has given one."""
RestartCause: TypeAlias = Cause | Literal["membership", "preemption"]
"""What ended an attempt after which there is another; membership: nodes came or went, or another node's worker failed;
preemption: another node was asked to stop."""
CAUSES = (*get_args(Cause), "membership", "preemption")

WATCHING = "watching the workers"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To a yes-or-no question."""

    yes: bool
    """Whether it is so."""
    why: str
    """In words, one line."""


@dataclass(frozen=True, kw_only=True)
class _Doing:
    what: str
    since: float
    within: float | None


class Health:
    """Of one node. ``clock``: seconds, as time.monotonic, by which heartbeats are written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._doing = _Doing(what="starting", since=self._started, within=None)
        self._restarts = Counter(dict.fromkeys(CAUSES, 0))
        self._attempt = self._world_size = 0
        self._beats: Callable[[], Beats] = dict
        self._earlier = _Sums()

    def doing(self, what: str, *, within: float | None) -> None:
        """The agent does this from now on, and will be back ``within`` so many seconds; None: that is not known."""
        self._doing = _Doing(what=what, since=self._clock(), within=within)

    def begin(self, attempt: int, world_size: int, beats: Callable[[], Beats]) -> None:
        """An attempt has begun; ``beats``: reads those of its workers."""
        with self._lock:
            self._attempt, self._world_size, self._beats = attempt, world_size, beats

    def end(self, cause: RestartCause) -> None:
        """It is over, its workers are gone, and there will be another one."""
        with self._lock:
            self._earlier = self._earlier.plus(self._beats())
            self._restarts[cause] += 1
            self._world_size, self._beats = 0, dict

    def live(self) -> Answer:
        """Whether the agent is where it may be."""
        doing = self._doing
        spent = self._clock() - doing.since
        if doing.within is None or spent <= doing.within:
            return Answer(yes=True, why=doing.what)
        return Answer(yes=False, why=f"{doing.what}: no turn for {spent:.0f} s, {doing.within:.0f} s are allowed")

    def ready(self) -> Answer:
        """Whether all workers of this node are in their loop."""
        doing = self._doing
        if doing.what != WATCHING:
            return Answer(yes=False, why=doing.what)
        with self._lock:
            return _in_loop(self._beats())

    def metrics(self) -> NodeMetrics:
        """Everything at this moment."""
        ready, now = self.ready().yes, self._clock()
        with self._lock:
            beats = self._beats()
            sums, beat = self._earlier.plus(beats), _speaker(beats)
            return NodeMetrics(
                ready=ready,
                attempt=self._attempt,
                world_size=self._world_size,
                restarts=dict(self._restarts),
                step=sums.furthest if beat is None else beat.step if beat.step >= 0 else None,
                steps=sums.steps,
                samples=sums.samples,
                samples_per_second=0.0 if beat is None else beat.figures.last_rate,
                goodput=sums.useful / max(now - self._started, 1e-9),
                heartbeat_ages={each.rank: max(0.0, now - each.at) for each in beats.values() if each is not None},
                checkpoint_age=now - sums.saved_at if sums.saved_at else None,
                saves=sums.saves,
                saves_failed=sums.saves_failed,
                saves_skipped=sums.saves_skipped,
                save_seconds=sums.save_seconds,
                save_stall=sums.save_stall,
            )


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What attempts have come to, all together."""

    furthest: int | None = None
    useful: float = 0.0
    steps: int = 0
    samples: int = 0
    saves: int = 0
    saves_failed: int = 0
    saves_skipped: int = 0
    save_seconds: float = 0.0
    save_stall: float = 0.0
    saved_at: float = 0.0

    def plus(self, beats: Beats) -> _Sums:
        """With an attempt that has come so far."""
        beat = _speaker(beats)
        if beat is None:
            return self
        figures = beat.figures
        return _Sums(
            furthest=max(self.furthest or 0, beat.step) if beat.step >= 0 else self.furthest,
            useful=self.useful + _useful(figures, beat.step, self.furthest or 0),
            steps=self.steps + figures.steps,
            samples=self.samples + figures.samples,
            saves=self.saves + figures.saves,
            saves_failed=self.saves_failed + figures.saves_failed,
            saves_skipped=self.saves_skipped + figures.saves_skipped,
            save_seconds=figures.save_seconds or self.save_seconds,
            save_stall=self.save_stall + figures.save_stall,
            saved_at=max(self.saved_at, figures.saved_at),
        )


def _useful(figures: Figures, step: int, furthest: int) -> float:
    """Seconds in steps beyond ``furthest``; ``step``: the attempt's last. Its first one is not in ``step_seconds``."""
    timed = figures.steps - 1
    if timed < 1:
        return 0.0
    fresh = step - max(step - timed, furthest)
    return figures.step_seconds * min(max(fresh, 0), timed) / timed


def _speaker(beats: Beats) -> Beat | None:
    """Steps and saves are the job's, alike on all ranks: one speaks for the node."""
    return next((beats[rank] for rank in sorted(beats) if beats[rank] is not None), None)


def _in_loop(beats: Beats) -> Answer:
    if not beats:
        return Answer(yes=False, why="no worker runs")
    for local, beat in sorted(beats.items()):
        if beat is None:
            return Answer(yes=False, why=f"local rank {local} has given no sign of life")
        if beat.step < 0:
            phase = f"in phase {beat.phase}" if beat.phase else "outside of all phases"
            return Answer(yes=False, why=f"rank {beat.rank} is {phase}, before its first step")
    return Answer(yes=True, why=f"{len(beats)} workers in their loop")
