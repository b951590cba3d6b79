"""The ledger: one line per committed optimizer step, from which repeats and gaps are counted.

Each attempt appends to files of its own (JSON lines). Its first line says at which step it resumed; what earlier
attempts recorded beyond that step was lost and done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_runner import paths
from elastic_runner.errors import NotFound
from elastic_runner.storage import Storage

Record = dict[str, Any]

_SEGMENT_LINES = 256


class LedgerWriter:
    """Appends records of one attempt; used on global rank 0 only.

    Where the storage can append, each line is there at once. Object stores get a new segment every 256 lines and
    at each ``flush``; what is not flushed when the process dies belongs to steps that will be done again.
    """

    def __init__(self, storage: Storage, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt
        self._segment = 0
        self._pending: list[bytes] = []

    def append(self, record: Record) -> None:
        """Add one record."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self._storage.append(paths.ledger_segment(self._attempt, 0), line):
            return
        self._pending.append(line)
        if len(self._pending) >= _SEGMENT_LINES:
            self.flush()

    def flush(self) -> None:
        """Put what is pending."""
        if self._pending:
            self._storage.put(paths.ledger_segment(self._attempt, self._segment), b"".join(self._pending))
            self._segment += 1
            self._pending = []


def read_records(storage: Storage) -> Iterator[Record]:
    """All records in order of attempt; a torn last line of a segment is left out."""
    for name in storage.list(paths.LEDGER):
        try:
            data = storage.read(f"{paths.LEDGER}/{name}")
        except NotFound:
            continue
        for line in data.splitlines(keepends=True):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record


def effective(records: Iterable[Record], resume_at: int | None = None) -> tuple[list[Record], int]:
    """The records that led to the present state, and how many step records were lost.

    ``resume_at``: where an attempt that is about to start resumes.
    """
    kept: list[Record] = []
    lost = 0

    def rewind(step: int) -> int:
        beyond = sum(r["event"] == "step" and r["step"] > step for r in kept)
        kept[:] = [r for r in kept if not (r["event"] in ("step", "evaluation") and r["step"] > step)]
        return beyond

    for record in records:
        if record.get("event") == "start":
            lost += rewind(record["resumed_at"])
        kept.append(record)
    if resume_at is not None:
        lost += rewind(resume_at)
    return kept, lost


@dataclass(kw_only=True)
class Tally:
    """Counts over effective records, one step at a time."""

    steps: int = 0
    """Committed optimizer steps."""
    samples: int = 0
    """Samples used, padding not counted."""
    repeated: int = 0
    """Samples used twice within an epoch."""
    skipped: int = 0
    """Samples of an epoch never used, other than its dropped tail."""
    padded: int = 0
    """Samples used again to fill an epoch's last batch."""
    dropped: int = 0
    """Samples in tails of epochs that fill no batch."""
    gaps: int = 0
    """Steps missing from, or doubled in, the sequence."""
    _last: Record | None = None

    def add(self, record: Record) -> None:
        """Count one record; records other than steps are passed over."""
        if record.get("event") != "step":
            return
        expected_step, expected_epoch, expected_first = 1, 0, 0
        if (last := self._last) is not None:
            expected_step, expected_epoch, expected_first = last["step"] + 1, last["epoch"], last["last"]
            if record["epoch"] > last["epoch"]:
                if last.get("length") is not None:
                    self.skipped += max(0, last["length"] - last["last"] - last["dropped"])
                expected_epoch, expected_first = last["epoch"] + 1, 0
        self.gaps += record["step"] != expected_step or record["epoch"] != expected_epoch
        self.skipped += max(0, record["first"] - expected_first)
        self.repeated += max(0, min(expected_first, record["last"]) - record["first"])
        self.steps += 1
        self.samples += record["last"] - record["first"]
        self.padded += record["padded"]
        self.dropped += record["dropped"]
        self._last = record


def tally(records: Iterable[Record]) -> Tally:
    """Count all of ``records``."""
    result = Tally()
    for record in records:
        result.add(record)
    return result
