"""The watchdog: judges by the heartbeats and the kernel's word whether a worker hangs, and which one.

It needs nothing of the workers: one that is stopped, or holds the GIL for ever, is noticed like any other.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_runner import heartbeat
from elastic_runner.heartbeat import MOVING, Beat, Lane, counts_from
from elastic_runner.launch import kernel

LOOK_EVERY = 0.5
"""Seconds between looks at most."""
STOPPED_PATIENCE = 1.0
"""Seconds that a worker may be stopped by a signal."""
LATE = 2.0
"""A look that comes so many seconds late: this process stood still as well, as when a scheduler suspends the job."""
_SOONEST = 0.01
_GAPS_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The worker that holds up the others, as far as this node can see."""

    local_rank: int
    """Its place on this node."""
    rank: int | None
    """Its global rank; None when it has not begun."""
    pid: int
    """Its process."""
    attempt: int
    """Number of the run's attempt; 0 when not known."""
    phase: str
    """The phase it is in; empty outside of all."""
    step: int
    """The last step that it has finished; -1 before any."""
    seconds: float
    """How long it has been there, or stopped."""
    reason: str
    """In words, with who waits for it."""
    learned: bool = False
    """Whether the limit that was passed was a learned one, which may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A time in which nobody on this node ran, by time.monotonic."""

    begin: float
    """When it began."""
    end: float
    """When it was over."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One worker at one look."""

    local_rank: int
    """Its place on this node."""
    pid: int
    """Its process."""
    training: Beat | None = None
    """What the program does; None before it said so."""
    saving: Beat | None = None
    """What the save beside it does; None before the first one."""
    stopped: float | None = None
    """Since when it has been seen stopped by a signal, by time.monotonic."""
    moved: float = 0.0
    """When bytes of a checkpoint last moved here, or where it waits for them, by time.monotonic; 0: never."""

    def begun(self, beat: Beat) -> float:
        """When the time began that the beat's limit is for."""
        return counts_from(beat.phase, beat.since, self.moved)


def awake(since: float, now: float, gaps: Iterable[Gap]) -> float:
    """Seconds from ``since`` to ``now`` in which this node ran."""
    return now - since - sum(max(0.0, min(gap.end, now) - max(gap.begin, since)) for gap in gaps)


def judge(sights: Sequence[Sight], now: float, gaps: Iterable[Gap] = ()) -> Hang | None:
    """The worker that hangs; None when all may go on. Pure."""

    def spent(since: float) -> float:
        return awake(since, now, gaps)

    def late(sight: Sight, beat: Beat | None) -> bool:
        return beat is not None and beat.limit > 0 and spent(sight.begun(beat)) > beat.limit

    stopped = [sight for sight in sights if sight.stopped is not None]
    training = [sight for sight in sights if late(sight, sight.training)]
    saving = [sight for sight in sights if late(sight, sight.saving)]
    if any(spent(sight.stopped) >= STOPPED_PATIENCE for sight in stopped if sight.stopped is not None) or (
        stopped and (training or saving)
    ):
        return _stopped(min(stopped, key=lambda sight: (_place(sight), sight.stopped)), sights, spent)
    if training:
        laggard = min(sights, key=_place)
        return _late(laggard, laggard if laggard in training else training[0], sights, spent)
    if saving:
        return _late_save(min(saving, key=lambda sight: sight.begun(sight.saving) if sight.saving else 0.0), spent)
    return None


def _place(sight: Sight) -> tuple[int, int, float]:
    """Where a worker is in the job; the least is behind. One that has not begun is behind all."""
    beat = sight.training
    return (-2, 0, 0.0) if beat is None else (beat.step, beat.progress, sight.begun(beat))


def _stopped(sight: Sight, sights: Sequence[Sight], spent: Callable[[float], float]) -> Hang:
    seconds = spent(sight.stopped if sight.stopped is not None else 0.0)
    said = f"{_name(sight)} is stopped by a signal (state T) for {seconds:.1f} s {_where(sight.training)}"
    return _hang(sight, sight.training, seconds, said + _waiting(sight, sights, spent))


def _late(sight: Sight, first: Sight, sights: Sequence[Sight], spent: Callable[[float], float]) -> Hang:
    """``sight`` is behind; ``first`` is past its limit, and another one where ``sight`` is not."""
    beat = sight.training
    if sight is first and beat is not None:
        said = f"{_name(sight)} {_stands(sight, beat, spent)}{_allowed(beat)}"
    else:
        past = first.training
        assert past is not None
        stands = "has given no sign of life" if beat is None else _stands(sight, beat, spent)
        said = f"{_name(sight)} is behind: it {stands}; {_name(first)} {_stands(first, past, spent)}{_allowed(past)}"
    learned = first.training is not None and first.training.learned
    return _hang(sight, beat, spent(beat.since) if beat else 0.0, said + _waiting(sight, sights, spent), learned)


def _late_save(sight: Sight, spent: Callable[[float], float]) -> Hang:
    beat = sight.saving
    assert beat is not None
    goes_on = f"the save beside training has gone on for {spent(beat.since):.1f} s{_still(sight, beat, spent)}"
    return _hang(sight, beat, spent(beat.since), f"{_name(sight)}: {goes_on}{_allowed(beat)}")


def _hang(sight: Sight, beat: Beat | None, seconds: float, reason: str, learned: bool = False) -> Hang:
    known = sight.training or sight.saving
    return Hang(
        local_rank=sight.local_rank, rank=known.rank if known else None, pid=sight.pid,
        attempt=known.attempt if known else 0, phase=beat.phase if beat else "", step=beat.step if beat else -1,
        seconds=seconds, reason=reason, learned=learned,
    )  # fmt: skip


def _name(sight: Sight) -> str:
    known = sight.training or sight.saving
    return f"rank {known.rank}" if known else f"local rank {sight.local_rank}"


def _where(beat: Beat | None) -> str:
    if beat is None:
        return "before its first phase"
    phase = f"in phase {beat.phase}" if beat.phase else "outside of all phases"
    return phase if beat.step < 0 else f"{phase} after step {beat.step}"


def _stands(sight: Sight, beat: Beat, spent: Callable[[float], float]) -> str:
    return f"has been {_where(beat)} for {spent(beat.since):.1f} s{_still(sight, beat, spent)}"


def _still(sight: Sight, beat: Beat, spent: Callable[[float], float]) -> str:
    return f", no byte has moved for {spent(sight.begun(beat)):.1f} s" if beat.phase in MOVING else ""


def _allowed(beat: Beat) -> str:
    why = "learned: timeouts.learned_factor, learned_floor" if beat.learned else f"timeouts.{beat.phase}"
    return f", {beat.limit:.4g} s are allowed ({why})"


def _waiting(laggard: Sight, sights: Sequence[Sight], spent: Callable[[float], float]) -> str:
    """Who waits for the laggard; where nobody is further on, records do not tell who waits for whom."""
    others = [sight for sight in sights if sight is not laggard and sight.training and sight.training.phase]
    if not others:
        return ""
    longest = max(spent(sight.training.since) for sight in others if sight.training)
    who = _name(others[0]) if len(others) == 1 else f"{len(others)} others"
    have = "has" if len(others) == 1 else "have"
    ahead = laggard.stopped is not None or any(_place(sight)[:2] > _place(laggard)[:2] for sight in others)
    if ahead:
        return f"; {who} {have} waited for {longest:.1f} s"
    return f"; {who} {have} been at the same point for {longest:.1f} s: see the stacks"


class Watchdog:
    """Looks at the workers of one node. ``handles``: their heartbeat pages by local rank, which stay the caller's.

    Times are of time.monotonic, in seconds. ``state``: the kernel's word on a process.
    """

    def __init__(self, handles: Sequence[int], *, state: Callable[[int], str] = kernel.state) -> None:
        self._pages = [mmap.mmap(handle, heartbeat.SIZE) for handle in handles]
        self._state = state
        self._pids: dict[int, int] = {}
        self._stopped: dict[int, float] = {}
        self._gaps: deque[Gap] = deque(maxlen=_GAPS_KEPT)
        self._due: float | None = None
        self._seen: tuple[list[Sight], float] = ([], time.monotonic())

    def begin(self, pids: Mapping[int, int]) -> None:
        """Watch these workers from now on: process ids by local rank. Records of others are forgotten."""
        self._pids = dict(pids)
        self._stopped.clear()
        self._gaps.clear()
        self._due = None
        for rank, pid in pids.items():
            heartbeat.forget_others(self._pages[rank], pid)

    def look(self, now: float) -> Hang | None:
        """Judge all workers. A look much later than ``wait_s`` asked for: nobody's clock ran meanwhile."""
        if self._due is not None and now - self._due > LATE:
            self._gaps.append(Gap(begin=self._due, end=now))
        self._due = None
        # One that has ended is behind nobody.
        sights = [
            self._sight(rank, pid, now) for rank, pid in self._pids.items() if self._state(pid) not in kernel.ENDED
        ]
        self._seen = (sights, now)
        return judge(sights, now, self._gaps)

    def wait_s(self, now: float) -> float:
        """Seconds until the next look is worth it. The caller comes back by then, or it is taken as suspended."""
        ends = [LOOK_EVERY]
        for sight in self._seen[0]:
            if sight.stopped is not None:
                ends.append(STOPPED_PATIENCE - awake(sight.stopped, now, self._gaps))
            for beat in (sight.training, sight.saving):
                if beat is not None and beat.limit > 0:
                    ends.append(beat.limit - awake(sight.begun(beat), now, self._gaps))
        wait = max(_SOONEST, min(ends))
        self._due = now + wait
        return wait

    def describe(self) -> list[str]:
        """One line per local rank: what the last look saw."""
        sights, now = self._seen
        return [_line(sight, lambda since: awake(since, now, self._gaps)) for sight in sights]

    def beats(self) -> dict[int, Beat | None]:
        """What each worker does now, by local rank; None: it has not said so. From any thread."""
        return {rank: heartbeat.read(self._pages[rank], Lane.TRAINING) for rank in self._pids}

    def steps(self) -> dict[int, int]:
        """The last finished step of each worker that has said so, by local rank; -1 before any."""
        return {rank: beat.step for rank, beat in self.beats().items() if beat is not None}

    def stands(self) -> dict[int, str]:
        """In which phase, and after which step, each worker is that has said so, in words, by local rank."""
        return {rank: _where(beat) for rank, beat in self.beats().items() if beat is not None}

    def close(self) -> None:
        """Let go of the pages."""
        for page in self._pages:
            page.close()
        self._pages = []

    def _sight(self, rank: int, pid: int, now: float) -> Sight:
        page = self._pages[rank]
        training, saving = heartbeat.read(page, Lane.TRAINING), heartbeat.read(page, Lane.SAVING)
        # Behind a wrapper, such as a shell script, the process that trains is not the one that was started.
        processes = {pid, training.pid if training else pid}
        if kernel.STOPPED in map(self._state, processes):
            self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)
        stopped = self._stopped.get(rank)
        moved = heartbeat.moved_at(page)
        return Sight(local_rank=rank, pid=pid, training=training, saving=saving, stopped=stopped, moved=moved)


def _line(sight: Sight, spent: Callable[[float], float]) -> str:
    beat = sight.training
    known = f", {_name(sight)}" if beat else ""
    parts = [f"local rank {sight.local_rank}{known}, pid {sight.pid}"]
    parts.append("no sign of life yet" if beat is None else f"{_where(beat)}, {spent(beat.since):.1f} s")
    if beat is not None and beat.limit:
        parts[-1] += f"{_still(sight, beat, spent)} of at most {beat.limit:.4g}"
    if sight.saving is not None and sight.saving.phase:
        goes_on = f"saving for {spent(sight.saving.since):.1f} s{_still(sight, sight.saving, spent)}"
        parts.append(f"{goes_on} of at most {sight.saving.limit:.4g}")
    if sight.stopped is not None:
        parts.append(f"stopped for {spent(sight.stopped):.1f} s")
    return "; ".join(parts)
