"""Which checkpoint to restore first, and which to distrust because of what came of it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Checkpoint, Manifest
from elastic_runner.errors import ElasticRunnerError, NonFiniteError, names
from elastic_runner.history import DOUBTFUL, FROM_OUTSIDE, HANG, End


class Health(IntEnum):
    """How far a checkpoint is trusted, best first."""

    HEALTHY = 0
    """Nothing is known against it."""
    SUSPECT = 1
    """It was found damaged, or led to failures."""
    NON_FINITE = 2
    """It holds NaN or infinity."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint that restore may try."""

    manifest: Manifest
    """What it is."""
    health: Health
    """How far it is trusted."""
    doubt: str = ""
    """Why it was put back behind others, in words; empty for a healthy one."""


def candidates(checkpoints: Sequence[Checkpoint], reasons: Mapping[str, str] | None = None) -> list[Candidate]:
    """All in the order in which to try them: healthy newest first, then suspects, then non-finite ones.

    ``reasons``: words for suspects by manifest path, and for those that are blamed and not marked yet.
    """
    judged = [_judge(checkpoint, reasons or {}) for checkpoint in checkpoints]
    return sorted(judged, key=lambda c: (c.health, -c.manifest.step, -c.manifest.attempt))


def health(checkpoint: Checkpoint, distrusted: Container[str] = ()) -> Health:
    """How far a checkpoint is trusted; ``distrusted`` holds paths of further suspects."""
    if checkpoint.manifest.non_finite:
        return Health.NON_FINITE
    if checkpoint.marks.suspect or checkpoint.manifest.path in distrusted:
        return Health.SUSPECT
    return Health.HEALTHY


def _judge(checkpoint: Checkpoint, reasons: Mapping[str, str]) -> Candidate:
    manifest, trusted, doubts = checkpoint.manifest, health(checkpoint, reasons), []
    if manifest.non_finite:
        doubts.append(describe_non_finite(manifest))
    if checkpoint.marks.suspect or manifest.path in reasons:
        why = reasons.get(manifest.path) or f"see {', '.join(checkpoint.marks.suspicions)}"
        doubts.append(f"suspect: {why}")
    return Candidate(manifest=manifest, health=trusted, doubt="; ".join(doubts))


def describe_non_finite(manifest: Manifest, most: int = 3) -> str:
    """Which tensors hold NaN or infinity, the first few by name."""
    names = manifest.non_finite
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"NaN or infinity in {', '.join(names[:most])}{rest}"


def blamed(ends: Iterable[End], times: int) -> dict[str, str]:
    """Checkpoints, by manifest path with a reason, that led to the same failure ``times`` times; ``times`` 0: none.
    Besides those of steps in which replicas may have differed, or that came to something else than before.

    Not one from which a newer checkpoint came, and not where the same failure came about without it as well: then it
    is the failure's step, its samples or the program, going back does not help, and nothing further is demoted.
    """
    known = list(ends)
    led_on = {end.restored for end in known if end.saved is not None}
    failures: dict[tuple[int, str], list[End]] = defaultdict(list)
    for end in known:
        if end.step is not None and end.kind not in _NOT_OF_THE_STATE:
            failures[end.step, end.kind].append(end)
    found: dict[str, str] = {}
    for (step, kind), same in failures.items():
        for path, loads in Counter(end.restored for end in same if not end.in_memory).items():
            if path is None or path in led_on or not 0 < times <= loads:
                continue
            if all(end.went_through(path) for end in same):
                found[path] = f"led {loads} times to {kind} in step {step}, and to no newer checkpoint"
    return {**found, **_of_doubtful_steps(known)}


def _of_doubtful_steps(ends: Iterable[End]) -> dict[str, str]:
    """All that an attempt may have saved after the last step that nothing speaks against."""
    return {
        paths.manifest(step, end.attempt): f"written after step {end.agreed}, {DOUBTFUL[end.kind]}"
        for end in ends
        if end.kind in DOUBTFUL and end.agreed is not None and end.step is not None
        for step in range(end.agreed + 1, end.step)
    }


def memory_distrusted(ends: Sequence[End], times: int) -> int:
    """The newest attempt whose memory may be what fails; 0: none. ``ends``: on record, oldest first.

    It is the last one, if the last ``times`` are the same failure (``times`` 0: never), or one with doubtful steps.
    """
    differed = max((end.attempt for end in ends if end.kind in DOUBTFUL), default=0)
    return max(differed, _last_of_the_same(ends, times))


def _last_of_the_same(ends: Sequence[End], times: int) -> int:
    last = [end for end in ends if end.step is not None and end.kind not in _NOT_OF_THE_STATE][-times or len(ends) :]
    same = len(last) == times > 0 and len({(end.step, end.kind) for end in last}) == 1
    return last[-1].attempt if same else 0


_NOT_OF_THE_STATE = {
    *names(ElasticRunnerError), "MemoryError", "OutOfMemoryError", "KeyboardInterrupt", "SystemExit",
    HANG, *FROM_OUTSIDE,
}  # fmt: skip
"""Failures that no other state would have kept away: of storage, peers, configuration, program, machine."""
_NOT_OF_THE_STATE -= {NonFiniteError.__name__}
