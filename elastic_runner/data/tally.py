"""The tally: what the steps that led to a state used, counted one by one; repeats and gaps are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_runner.data.ledger import Record
from elastic_runner.data.lineage import Lineage, from_outside
from elastic_runner.data.runs import Runs, total
from elastic_runner.data.skips import START, Skip, begins


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
    _imported: int = 0
    """The step of the imported state that all began with; which samples that had used is not known."""
    _used: Runs = field(default_factory=Runs)
    """Positions used in this epoch."""
    _skips: list[Skip] = field(default_factory=list)
    """On record so far."""

    def add(self, record: Record) -> None:
        """Count one record; those other than steps, skips and starts are passed over."""
        if record.get("event") != "step":
            if (skip := Skip.of(record)) is not None:
                self._skips.append(skip)
            elif from_outside(record):
                self._imported = record["resumed_at"]
            return
        first, last, epoch = record["first"], record["last"], record["epoch"]
        before = self._last
        at = (before["epoch"], before["last"]) if before else START
        if before is None and self._imported:
            at = (epoch, first)
            self._used.add(0, first)
        if epoch > max(at[0], 0):
            self._end_epochs(record)
        elif epoch < at[0]:
            # What was used of an epoch that had ended is no longer known in detail; all of it counts.
            self._used = Runs()
            self._used.add(0, last)
        follows = record["step"] == (before["step"] if before else self._imported) + 1
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
    ends = rest < batch_size(record) and rest <= record["dropped"]
    return rest if ends else 0


def tally(records: Iterable[Record]) -> Tally:
    """Count all of ``records``."""
    result = Tally()
    for record in records:
        result.add(record)
    return result


def count(read: Callable[[], Iterable[Record]]) -> tuple[Tally, int]:
    """What led to the present state, and how many step records were lost; ``read`` is called twice."""
    lineage, result, lost = Lineage(read()), Tally(), 0
    for record, led, _ in lineage.marked(read()):
        if led:
            result.add(record)
        else:
            lost += record.get("event") == "step"
    return result, lost


def batch_size(step: Record) -> int:
    """Samples in a step's global batch, by its line."""
    size: int = step["last"] - step["first"] + step["padded"]
    return size
