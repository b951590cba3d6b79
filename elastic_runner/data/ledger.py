"""The ledger: one line per committed optimizer step, from which repeats and gaps are counted.

Each attempt appends to files of its own (JSON lines). Its first line says at which step it resumed; what earlier
attempts recorded beyond that step was lost and done again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_runner import paths
from elastic_runner.data.runs import Runs, total
from elastic_runner.data.skips import START, Skip, begins
from elastic_runner.errors import NotFound, StorageError
from elastic_runner.storage import Storage

log = logging.getLogger(__name__)

Record = dict[str, Any]

_SEGMENT_LINES = 256
_TORN = b"#torn\n"
"""Ends what an error may have left of a line, so that nobody takes it for one; it lacks its line break at least."""


class LedgerWriter:
    """Appends records of one attempt; used on global rank 0 only, by the steps and by a save beside them.

    Where the storage can append, each line is there at once and survives the process; ``flush`` makes it survive the
    machine. Object stores get a new segment every 256 lines and at each ``flush``. What is not flushed belongs to
    steps that will be done again. Trouble with the storage does not stop a step: its line waits for the next try.
    """

    def __init__(self, storage: Storage, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt
        self._segment = 0
        self._pending: list[bytes] = []
        self._appended = False
        self._trouble = False
        self._torn = False
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, record: Record) -> None:
        """Add one record."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            waiting = len(self._pending)
        try:
            if not self._append_pending() and waiting % _SEGMENT_LINES == 0:
                self.flush()
        except StorageError as error:
            if not self._trouble:
                log.warning("ledger lines wait in memory until the storage takes them: %s", error)
            self._trouble = True

    def flush(self) -> None:
        """Make all records so far durable. Raises StorageError."""
        with self._flushing:
            if self._append_pending():
                self._sync()
                return
            with self._lock:
                lines = list(self._pending)
            if lines:
                self._storage.put(paths.ledger_segment(self._attempt, self._segment), b"".join(lines))
                self._segment += 1
                self._trouble = False
                with self._lock:
                    del self._pending[: len(lines)]

    def _sync(self) -> None:
        if not self._appended:
            return
        self._appended = False  # before: a line that comes meanwhile is of the next flush
        try:
            self._storage.sync(paths.ledger_segment(self._attempt, 0))
        except StorageError:
            self._appended = True
            raise

    def _append_pending(self) -> bool:
        """Append what waits, where the storage can; whether nothing waits any more."""
        with self._lock:
            # One by one: of several in one call, an error would leave some written and all to be written again.
            while self._pending:
                line = (_TORN if self._torn else b"") + self._pending[0]
                self._torn = True
                if not self._storage.append(paths.ledger_segment(self._attempt, 0), line):
                    return False
                self._torn = self._trouble = False
                self._appended = True
                del self._pending[0]
            return True


def read_records(storage: Storage) -> Iterator[Record]:
    """All records in order of attempt; a torn last line of a segment is left out."""
    for name in storage.list(paths.LEDGER):
        try:
            data = storage.read(f"{paths.LEDGER}/{name}")
        except NotFound:
            continue
        yield from parse(data.splitlines(keepends=True))


def parse(lines: Iterable[bytes]) -> Iterator[Record]:
    """Records of whole lines; what is torn is left out."""
    for line in lines:
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record


def is_start(record: Record) -> bool:
    """Whether it says where an attempt resumed."""
    return record.get("event") == "start" and isinstance(record.get("resumed_at"), int)


def limits(records: Iterable[Record], resume_at: int | None = None) -> list[int | None]:
    """For what lies before each attempt's start, and last for what follows all: the step beyond which it was lost.

    None: nothing of it was lost. ``resume_at``: where an attempt that is about to start resumes.
    """
    limit = resume_at
    result = [limit]
    for resumed_at in reversed([r["resumed_at"] for r in records if is_start(r)]):
        limit = resumed_at if limit is None else min(limit, resumed_at)
        result.append(limit)
    return result[::-1]


def marked(records: Iterable[Record], known: Sequence[int | None]) -> Iterator[tuple[Record, bool]]:
    """Each record, and whether it led to the present state; ``known``: their ``limits``, read before.

    Of starts: whether any step of the attempt could. Skips always do, they are for good. Two readings, so that a ledger
    need not fit into memory.
    """
    left = iter(known)
    limit = next(left)
    for record in records:
        if is_start(record):
            limit = next(left, None)  # none: an attempt that has started since
        resumed_at: int = record.get("resumed_at", 0)
        yield record, limit is None or record.get("event") == "skip" or record.get("step", resumed_at) <= limit


def effective(records: Iterable[Record], resume_at: int | None = None) -> tuple[list[Record], int]:
    """The records that led to the present state, and how many step records were lost; see ``limits``."""
    everything = list(records)
    both = list(marked(everything, limits(everything, resume_at)))
    return [r for r, led in both if led], sum(r.get("event") == "step" for r, led in both if not led)


@dataclass(kw_only=True)
class Tally:
    """Counts over effective records, one step at a time."""

    steps: int = 0
    """Committed optimizer steps."""
    samples: int = 0
    """Samples used, padding not counted."""
    repeated: int = 0
    """Samples used again within an epoch."""
    skipped: int = 0
    """Samples passed over and not used later in their epoch, other than its dropped tail; those of skips among them."""
    padded: int = 0
    """Samples used again to fill an epoch's last batch."""
    dropped: int = 0
    """Samples in tails of epochs that fill no batch."""
    gaps: int = 0
    """Steps that do not follow on the one before: one is missing, doubled, or took its samples out of order. What is
    skipped on record makes none."""
    _last: Record | None = None
    _used: Runs = field(default_factory=Runs)
    """Positions used in this epoch."""
    _skips: list[Skip] = field(default_factory=list)
    """On record so far."""

    def add(self, record: Record) -> None:
        """Count one record; those other than steps and skips are passed over."""
        if record.get("event") != "step":
            if (skip := Skip.of(record)) is not None:
                self._skips.append(skip)
            return
        first, last, epoch = record["first"], record["last"], record["epoch"]
        before = self._last
        at = (before["epoch"], before["last"]) if before else START
        if epoch > max(at[0], 0):
            self._end_epochs(record)
        elif epoch < at[0]:
            # What was used of an epoch that had ended is no longer known in detail; all of it counts.
            self._used = Runs()
            self._used.add(0, last)
        follows = record["step"] == (before["step"] if before else 0) + 1
        self.gaps += not (follows and begins((epoch, first), at, self._skips))
        self._use(first, last)
        self.steps += 1
        self.samples += last - first
        self.padded += record["padded"]
        self.dropped += record["dropped"]
        self._last = record

    def _use(self, first: int, last: int) -> None:
        passed = self._used.end
        again = total(self._used.add(first, last))
        filled = max(0, min(last, passed) - first) - again
        self.repeated += again
        self.skipped += max(0, first - passed) - filled

    def _end_epochs(self, record: Record) -> None:
        before, length = self._last, record.get("length")
        if length is not None:
            dropped = (_dropped_after(before) if before else 0) + record["dropped"] - _dropped_after(record)
            epochs = record["epoch"] - (before["epoch"] if before else 0)
            self.skipped += max(0, epochs * length - self._used.end - dropped)
        self._used = Runs()


def _dropped_after(record: Record) -> int:
    """Of what a step dropped, the tail of its own epoch; the rest was left of the epoch before."""
    if record.get("length") is None:
        return 0
    rest = record["length"] - record["last"]
    ends = rest < record["last"] - record["first"] + record["padded"] and rest <= record["dropped"]
    return rest if ends else 0


def tally(records: Iterable[Record]) -> Tally:
    """Count all of ``records``."""
    result = Tally()
    for record in records:
        result.add(record)
    return result


def count(read: Callable[[], Iterable[Record]]) -> tuple[Tally, int]:
    """What led to the present state, and how many step records were lost; ``read`` is called twice."""
    result, lost = Tally(), 0
    for record, led in marked(read(), limits(read())):
        if led:
            result.add(record)
        else:
            lost += record.get("event") == "step"
    return result, lost
