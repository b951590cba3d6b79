"""Whether the workers are started again after a failure: small policies over the record of how attempts ended. Pure.

A policy looks at the ends of attempts, oldest first, the latest last, and says why it is of no use to start again, or
nothing. The record lies in the run directory, so that all agents judge by the same, also after a requeue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from elastic_runner.errors import CheckpointError, ExitCode, PeerLost, PhaseTimeout, StorageError, names
from elastic_runner.history import FROM_OUTSIDE, HANG, End
from elastic_runner.verdict import Verdict

Cause: TypeAlias = Literal["crash", "hang", "storage", "start", "peer"]
"""What an attempt ended of. A preemption and a change of membership are none: they cost nothing."""
Policy: TypeAlias = Callable[[Sequence[End]], Verdict | None]

_HANGS = {HANG, *names(PhaseTimeout)}
_STORAGE = {*names(StorageError), *names(CheckpointError)}
_PEERS = {*names(PeerLost)}


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Restarts allowed in a row, by cause, without progress in between, which gives them all back."""

    crash: int = 5
    """A worker raised an error or was killed."""
    hang: int = 5
    """A phase took longer than its limit."""
    storage: int = 5
    """The storage failed."""
    start: int = 5
    """No step was reached."""
    peer: int = 10
    """A peer was lost and nobody could say how: a network that comes and goes."""


def cause_of(end: End) -> Cause:
    """Under which budget an end falls."""
    if end.kind in _HANGS:
        return "hang"
    if end.kind in _STORAGE:
        return "storage"
    if end.kind in _PEERS:
        return "peer"
    return "start" if end.step is None else "crash"


_PROGRESS = 10
"""Steps beyond all that earlier attempts have reached that count as progress."""


def since_progress(ends: Sequence[End]) -> list[End]:
    """The ends of attempts since the last one that came on: by a checkpoint, or by many steps. That one's included."""
    last = reached = 0
    for number, end in enumerate(ends):
        if end.saved is not None or (end.step or 0) >= reached + _PROGRESS:
            last = number
        reached = max(reached, end.step or 0)
    return list(ends[last:])


def within_budget(budgets: Budgets) -> Policy:
    """Objects when a cause has used up its restarts."""

    def judge(ends: Sequence[End]) -> Verdict | None:
        cause = cause_of(ends[-1])
        allowed: int = getattr(budgets, cause)
        spent = [end for end in since_progress(ends) if cause_of(end) == cause]
        if len(spent) <= allowed:
            return None
        kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(end.kind for end in spent).items())
        said = f"{allowed} of {allowed} restarts after a {cause} are used, without progress ({kinds}); the last: "
        said += ends[-1].message
        return Verdict(code=ExitCode.FAILED, message=said, final=True)

    return judge


def same_start(times: int = 2) -> Policy:
    """Objects when nothing has ever been trained and the same error comes at the start again."""

    def judge(ends: Sequence[End]) -> Verdict | None:
        last = list(ends[-times:])
        untrained = all((end.step or 1) == 1 and end.saved is None and end.restored is None for end in ends)
        if len(last) < times or not untrained or not _alike(last) or last[-1].kind in FROM_OUTSIDE:
            return None
        said = f"the same failure {times} times before a first step was done: {last[-1].message}"
        return Verdict(code=ExitCode.DO_NOT_RETRY, message=said, final=True)

    return judge


def same_step(times: int = 5) -> Policy:
    """Objects when the same failure comes at the same step again and again: from memory, from the newest checkpoint,
    and from the one before."""

    def judge(ends: Sequence[End]) -> Verdict | None:
        last = ends[-1]
        if last.step is None or last.kind in FROM_OUTSIDE or cause_of(last) != "crash":
            return None
        same = [end for end in ends if (end.step, end.kind) == (last.step, last.kind)]
        if len(same) < times or any(end.saved is not None for end in ends[ends.index(same[-times]) + 1 :]):
            return None
        of = f" ({last.samples})" if last.samples else ""
        said = f"step {last.step}{of} has failed {times} times in the same way: {last.message}"
        return Verdict(code=ExitCode.DO_NOT_RETRY, message=said, final=True)

    return judge


def first_objection(ends: Sequence[End], policies: Sequence[Policy]) -> Verdict | None:
    """Why the workers are not to be started again; None when they are. ``ends``: at least one."""
    return next((verdict for policy in policies if (verdict := policy(ends)) is not None), None)


def default_policies(budgets: Budgets) -> tuple[Policy, ...]:
    """What ``elastic-runner launch`` goes by."""
    return same_start(), same_step(), within_budget(budgets)


def _alike(ends: Sequence[End]) -> bool:
    return len({(end.kind, end.step) for end in ends}) == 1
