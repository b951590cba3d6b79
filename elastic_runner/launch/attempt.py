"""How an attempt came to its end on this node: what the agent puts on record, and what a person reads."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from elastic_runner.errors import ExitCode
from elastic_runner.history import HANG, End
from elastic_runner.launch.watchdog import Hang
from elastic_runner.verdict import RunPlace, Verdict


@dataclass(frozen=True, kw_only=True)
class Over:
    """Why an attempt is over."""

    cause: Literal["finished", "workers", "hang", "membership"]
    """All workers finished; one ended badly; one hangs; the rendezvous has ended the round."""
    reason: str = ""
    """In words: of the rendezvous, or of the hang."""
    verdict: Verdict | None = None
    """What a worker said of its own end."""
    hang: Hang | None = None
    """Who hangs."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the agent knows of the workers of an attempt."""

    number: int
    """The attempt, as the agents count."""
    codes: Mapping[int, int]
    """Exit codes by local rank, as in subprocess.Popen.returncode, in the order of their ends; only of those that
    ended by themselves."""
    ranks: Mapping[int, int]
    """Global ranks by local rank."""
    steps: Mapping[int, int]
    """Last finished steps by local rank."""
    stands: Mapping[int, str]
    """Phase and last finished step in words, by local rank; only of those that have said so."""
    host: str
    """This node's name."""
    place: RunPlace | None
    """The run; None when no worker got so far as to say."""
    out_of_memory: bool = False
    """Whether the kernel has killed for want of memory meanwhile."""


def end_of(over: Over, seen: Seen) -> End | None:
    """What goes on record; None for what is no failure."""
    said = over.verdict
    if over.hang is not None:
        end = _end(seen, kind=HANG, rank=over.hang.rank, step=over.hang.step, message=over.hang.reason)
        return replace(end, learned_limit=over.hang.learned)
    if over.cause != "workers" or (said is not None and said.no_failure):
        return None
    if said is not None and not said.consequence:
        return _end(seen, kind=said.kind, rank=said.rank, step=said.step, message=said.message)
    local = first_killed(seen.codes)
    if local is not None:
        name = _signal(seen.codes[local])
        why = ": the kernel has killed for want of memory" if name == "SIGKILL" and seen.out_of_memory else ""
        message = f"{_who(seen, local)} was killed by {name}{_where(seen, local)}{why}"
        return _end(seen, kind=name, rank=seen.ranks[local], step=seen.steps.get(local), message=message)
    # Who lost a peer ends after that peer, which may have left without a word, or as if all were well.
    left = [local for local, code in seen.codes.items() if not code and said is not None]
    local = [*left, *(local for local, code in seen.codes.items() if code)][0]
    if said is not None and said.rank == seen.ranks[local]:
        return _end(seen, kind=said.kind, rank=said.rank, step=said.step, message=said.message)
    how = f"exit code {seen.codes[local]}"
    message = f"{_who(seen, local)} {'left' if left else 'ended'} with {how}{_where(seen, local)}"
    return _end(seen, kind=how, rank=seen.ranks[local], step=seen.steps.get(local), message=message)


def time_to_save(codes: Collection[int], running: Collection[int | None], hurry: float) -> float:
    """Seconds that workers which were asked to stop still have.

    ``codes``: of peers that have ended; ``running``: last finished steps of the others, -1 before any and None where
    that is not known; ``hurry``: where peers are missing, but what they took part in may still end.
    """
    if any(codes) and all(step == -1 for step in running):
        return 0.0  # they wait for those peers, and have nothing to save
    missing = any(code not in (ExitCode.FINISHED, ExitCode.INTERRUPTED) for code in codes)
    return hurry if missing and None not in running else math.inf


def last_word(over: Over, seen: Seen) -> Verdict | None:
    """A worker's verdict after which no attempt follows; None when there is none.

    A program that fails when its run is finished has failed all the same. One that is killed then has done its work.
    """
    said = over.verdict
    if said is None or not said.final:
        return None
    bad = next((local for local, code in seen.codes.items() if code > 0), None)
    if said.code != ExitCode.FINISHED or bad is None:
        return said
    message = f"{_who(seen, bad)} ended with exit code {seen.codes[bad]} after the run was finished"
    return Verdict(code=ExitCode.FAILED, message=message, final=True)


def unhealthy(stuck: list[int]) -> Verdict:
    """Of the node, whose local ranks ``stuck`` are."""
    which = ", ".join(map(str, stuck))
    return Verdict(
        code=ExitCode.UNHEALTHY_NODE,
        message=f"local ranks {which} do not die: they are stuck in the kernel (device or file system). "
        "This node needs attention; start again on another one",
        final=True,
    )


def first_killed(codes: Mapping[int, int]) -> int | None:
    """The local rank that was killed first; the others' errors follow from that."""
    return next((local for local, code in codes.items() if code < 0), None)


def describe(over: Over, end: End | None, seen: Seen) -> str:
    """One line: what came first, where, and what followed from it."""
    step = max(seen.steps.values(), default=-1)
    after = f" after step {step}" if step >= 0 else ""
    first = end.message if end is not None else over.reason or (over.verdict.message if over.verdict else "")
    blamed = end or over.verdict
    others = ", ".join(
        f"rank {seen.ranks[local]} {_signal(code) if code < 0 else f'exit code {code}'}"
        for local, code in seen.codes.items()
        if code and (blamed is None or seen.ranks[local] != blamed.rank)
    )
    what = f"{first} (then {others})" if first and others else first or others
    return f"attempt {_number(seen)} is over{after}: {what}"


def tail(file: Path, lines: int = 20, most: int = 8192) -> str:
    """The last lines of a log, of its last ``most`` bytes."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - most))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


def _number(seen: Seen) -> int:
    """The run's own where it is known, which goes on when the job is started again."""
    return seen.number if seen.place is None else seen.place.attempt


def _end(seen: Seen, *, kind: str, rank: int | None, step: int | None, message: str) -> End:
    place = seen.place
    under_way = None if step is None or step < 0 else step + 1
    return End(
        attempt=_number(seen),
        kind=kind,
        step=under_way,
        restored=place.restored if place else None,
        saved=place.saved if place else None,
        rank=rank,
        message=message,
    )


def _who(seen: Seen, local: int) -> str:
    return f"rank {seen.ranks[local]} on {seen.host}"


def _where(seen: Seen, local: int) -> str:
    return f" {seen.stands[local]}" if local in seen.stands else ""


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
