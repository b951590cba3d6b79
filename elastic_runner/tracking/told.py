"""What a tracker has been told, and what of the record it is to be told now. Pure, but for reading and writing it down.

A course is a list of pieces, (attempt, last step): who did the steps up to there. Two courses are the same up to some
step when their pieces are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from elastic_runner import paths
from elastic_runner.errors import Fenced, NotFound
from elastic_runner.storage import Storage
from elastic_runner.tracking.values import Record, is_whole

Piece = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Told:
    """As it is kept in the run directory for the next attempt."""

    attempt: int = 0
    """Who says so."""
    run_id: str | None = None
    """The tool's own name of the run; None: it has not been opened."""
    course: list[Piece] = field(default_factory=list)
    """Whose steps the tool has for good."""

    @property
    def step(self) -> int:
        """The last of them; -1: none, not even an evaluation before the first."""
        return self.course[-1][1] if self.course else -1


def read(storage: Storage, name: str) -> Told:
    """What is kept of the tracker ``name``. Raises StorageError."""
    try:
        kept = json.loads(storage.read(paths.tracker(name)))
        course = [(attempt, step) for attempt, step in kept["course"]]
        return Told(attempt=kept["attempt"], run_id=kept["run_id"], course=course)
    except (NotFound, ValueError, TypeError, KeyError):  # missing, torn, or not ours: all is told again
        return Told()


def write(storage: Storage, name: str, told: Told) -> None:
    """Keep it. Raises Fenced when a newer attempt has the tool, StorageError."""
    if (newer := read(storage, name).attempt) > told.attempt:
        raise Fenced(f"attempt {newer} has taken over")
    storage.put(paths.tracker(name), json.dumps(asdict(told)).encode())


def extend(course: list[Piece], record: Record) -> None:
    """Add the next step to a course."""
    if course and course[-1][0] == record["attempt"]:
        course.pop()
    course.append((record["attempt"], record["step"]))


def cut(course: Iterable[Piece], step: int) -> list[Piece]:
    """The course up to ``step``."""
    result: list[Piece] = []
    for attempt, last in course:
        before = result[-1][1] if result else 0
        if step <= before:
            break
        result.append((attempt, min(last, step)))
    return result


def common(one: Iterable[Piece], other: Iterable[Piece]) -> int:
    """The last step up to which two courses are the same; -1: they differ from the first."""
    same = -1
    for (attempt, last), (other_attempt, other_last) in zip(one, other, strict=False):
        if attempt != other_attempt:
            break
        same = min(last, other_last)
        if last != other_last:
            break
    return same


class Fresh:
    """Passes each step and each step's evaluations once, in order: of steps that were done twice the first."""

    def __init__(self, after: int) -> None:
        self._after = self._step = after
        self._evaluated: set[tuple[str, ...]] = set()
        """What was evaluated since the last step, by the names of its values."""

    def take(self, record: Record) -> bool:
        """Whether the record is to be told."""
        if not is_whole(record):
            return False
        step = record["step"]
        if record["event"] == "step":
            if step <= self._step:
                return False
            self._step, self._evaluated = step, set()
            return True
        names = tuple(record["metrics"])
        if step <= self._after or step < self._step or names in self._evaluated:
            return False
        self._evaluated.add(names)
        return True
