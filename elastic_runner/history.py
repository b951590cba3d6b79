"""How attempts ended: one small file for each that failed, beside its record, by the first rank that had the error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

from elastic_runner import paths
from elastic_runner.errors import AlreadyExists, NotFound, ReplayDiverged, ReplicasDiffer
from elastic_runner.storage import Storage

HANG = "Hang"
"""Kind of an end that the watchdog brought about."""
FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
"""Kinds of ends that say nothing of the program: the worker was killed."""
DOUBTFUL = {
    ReplicasDiffer.__name__: "the last in which all replicas agreed",
    ReplayDiverged.__name__: "the last that came to the same as before",
}
"""Kinds of ends that speak against what was saved after the step ``agreed``, and what that step is."""
_RECENT = 64
"""Ends to read: each is a request, at every start."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt failed."""

    attempt: int
    """Its number."""
    kind: str
    """Type of the error that came first."""
    step: int | None
    """The step under way; None before the loop began."""
    restored: str | None
    """Path of the manifest that it started from; None: from step 0."""
    saved: str | None = None
    """Path of the newest manifest that it committed itself; none of a step that is doubtful."""
    rank: int | None = None
    """The rank that failed first."""
    message: str = ""
    """What it said, or what is known of it, in one line."""
    epoch: int | None = None
    """Of the samples of that step; None: not known, as for the other two."""
    first: int | None = None
    """Their first position in the epoch's order."""
    last: int | None = None
    """One past their last position."""
    in_memory: bool = False
    """Whether it went on from a snapshot in memory; ``restored`` is then the checkpoint behind that."""

    learned_limit: bool = False
    """A hang: whether it was judged by a limit that was learned from earlier durations, which may be wrong."""

    agreed: int | None = None
    """The last step that nothing speaks against, by replicas or by the ledger; None: nothing was compared."""

    @property
    def samples(self) -> str:
        """The samples of that step, in words."""
        return "" if self.last is None else f"epoch {self.epoch}, positions {self.first} to {self.last - 1}"

    def went_through(self, path: str) -> bool:
        """Whether the state that failed had been in this checkpoint: loaded from it, or saved to it on the way."""
        if self.restored == path:
            return True
        # Not ``saved``: what was still being written when the failure came is not in it, and may be there by now.
        step, attempt = paths.committed(path) or (0, 0)
        return attempt == self.attempt and self.step is not None and step < self.step


def encode(end: End) -> str:
    """An end as JSON."""
    return json.dumps(asdict(end))


def decode(text: str | bytes) -> End:
    """An end as it was written; what other versions say besides is left out. Raises ValueError, TypeError."""
    known = {field.name for field in fields(End)}
    return End(**{name: value for name, value in dict(json.loads(text)).items() if name in known})


def write_end(storage: Storage, end: End) -> None:
    """Put an end on record, unless another rank has."""
    record = {**asdict(end), "time": time.time()}
    with suppress(AlreadyExists):
        storage.create(paths.attempt_end(end.attempt), json.dumps(record, indent=1).encode())


def read_ends(storage: Storage, most: int = _RECENT) -> list[End]:
    """The latest ends on record, oldest first; torn ones are left out."""
    return list(_newest_first(storage, most))[::-1]


def read_ends_since_saved(storage: Storage) -> list[End]:
    """The same from the last attempt on that has saved something, however many: no budget looks further back."""
    ends = []
    for end in _newest_first(storage):
        ends.append(end)
        if end.saved is not None:
            break
    return ends[::-1]


def _newest_first(storage: Storage, most: int | None = None) -> Iterator[End]:
    numbers = sorted(n for name in storage.list(paths.ATTEMPTS) if (n := paths.ended_attempt(name)) is not None)
    for number in numbers[::-1][:most]:
        with suppress(NotFound, ValueError, TypeError):
            yield decode(storage.read(paths.attempt_end(number)))
