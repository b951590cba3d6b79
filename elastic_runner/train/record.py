"""The run's record: ledger lines and the summary, written by global rank 0. A failure is written by who had it.

Steps do not wait for the storage: what a save has to say is written from the thread that saves.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_runner import paths
from elastic_runner.config import ReplayPolicy
from elastic_runner.data.ledger import LedgerWriter, Record, read_records
from elastic_runner.data.lineage import OUTSIDE, Lineage, Origin, course
from elastic_runner.data.skips import Skip, recorded
from elastic_runner.data.tally import Tally, batch_size
from elastic_runner.errors import NotFound, StorageError
from elastic_runner.observability.summary import RunSummary, Status, decode, encode
from elastic_runner.storage import Storage
from elastic_runner.tracking.feed import History
from elastic_runner.tracking.trackers import Trackers
from elastic_runner.train.lines import StepLines, missing
from elastic_runner.train.replay import Divergence, Replay, done_beyond

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Past:
    """What led to the state that the attempt begins with."""

    tally: Tally = field(default_factory=Tally)
    """Its steps."""
    lost: int = 0
    """Steps that did not lead there."""
    summary: dict[str, Any] = field(default_factory=dict)
    """What the summary says of the newest step and evaluation."""
    batch: int | None = None
    """Samples in the newest step's global batch; None before the first."""

    def add(self, record: Record, *, led: bool) -> None:
        """The next one."""
        event = record.get("event")
        if not led:
            self.lost += event == "step"
            return
        self.tally.add(record)
        if event == "evaluation":
            self.summary |= {"validation": record["metrics"], "validation_step": record["step"]}
        elif event == "step":
            self.summary["train_loss"] = record["loss"]
            self.batch = batch_size(record)


class RunRecord:
    """Events of one attempt, in order. A rank keeps lines for its snapshots, and writes down its own failure alone."""

    def __init__(self, storage: Storage, *, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt
        self.lines = StepLines(lambda line: None, attempt)
        """Lines of steps that may have to wait."""
        self.divergence: Divergence | None = None
        """What came to something else when it was done again; known on global rank 0."""

    def restored(self, attempt: int, step: int) -> None:
        """The attempt goes on from a state that ``attempt`` had at ``step``; OUTSIDE: an imported one."""

    def start(self, resumed_at: int, facts: Mapping[str, Any], *, replay: ReplayPolicy = "off") -> None:
        """The attempt continues after step ``resumed_at``. ``replay``: as in the configuration."""
        self.lines.hold(False)  # the program went back on its own: what waits is of a course that has ended

    def step(self, record: dict[str, Any]) -> None:
        """An optimizer step is committed."""
        self.lines.add({"event": "step", **_as_json(record)})

    def skips(self) -> list[Skip]:
        """Global batches that the run passes over; known on global rank 0."""
        return []

    def skip(self, skip: Skip) -> None:
        """From now on it passes over this one, too."""

    def replicas_differ(self, event: Record) -> None:
        """A comparison of the replicas went wrong."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The model after ``step`` was evaluated."""
        self.lines.add({"event": "evaluation", "step": step, "metrics": _as_json(metrics)})

    def recover(self, lines: bytes) -> None:
        """These came with what was ``restored``: put on record what is not there."""

    def saving(self) -> None:
        """A checkpoint is about to be written: what is on record must not be younger than it. Called beside steps."""

    def committed(self, step: int) -> None:
        """A checkpoint is durable. Called beside steps."""

    def not_saved(self, *, skipped: bool) -> None:
        """A save was skipped, or has failed, and training goes on."""

    def end(self, status: Status, message: str = "") -> None:
        """The attempt is over."""

    def fail(self, message: str, *, consequence: bool) -> None:
        """The attempt ends by an error here; ``consequence``: of another rank's, whose reason is the better one.

        The summary says it, unless a newer attempt has it.
        """
        summary = read_summary(self._storage)
        if summary is not None and summary.attempt == self._attempt and not consequence:
            changed = dataclasses.replace(summary, status="failed", message=message, updated=time.time())
            self._storage.put(paths.SUMMARY, encode(changed))


class MainRecord(RunRecord):
    """Global rank 0's: the ledger is written as it goes, the summary at start, save, evaluation and end.

    Threads may call it at once.
    """

    def __init__(
        self, storage: Storage, *, attempt: int, target_step: int, restarts: int, trackers: Trackers | None = None
    ) -> None:
        super().__init__(storage, attempt=attempt)
        self._ledger = LedgerWriter(storage, attempt)
        self._trackers = trackers
        self.lines = StepLines(self._commit, attempt)
        self._lineage: Lineage | None = None
        """As it was read for this start."""
        self._state = Origin(OUTSIDE, 0)
        """What the program has: built anew, restored, or trained."""
        self._replay: Replay | None = None
        self._tally: Tally | None = None
        self._lock = threading.RLock()
        """Of the summary and the tally; never held while the storage is asked."""
        self._publishing = threading.Lock()
        # What the run stood at stays true until the attempt has restored.
        self._summary = read_summary(storage) or RunSummary(status="running")
        self._set(status="running", attempt=attempt, target_step=target_step, restarts=restarts, message="")
        self._publish()

    def restored(self, attempt: int, step: int) -> None:
        """The ledger will say so."""
        self._state = Origin(attempt, step)

    def start(self, resumed_at: int, facts: Mapping[str, Any], *, replay: ReplayPolicy = "off") -> None:
        """Count what led here, then open the ledger of this attempt."""
        self.lines.hold(False)  # the program went back on its own: what was done since is on record as lost
        self._ledger.flush()  # what is counted is what can be read
        if self._state.step != resumed_at:
            self._state = Origin(None, resumed_at)  # restored by the program itself
        start = {"event": "start", "resumed_at": resumed_at, "rests_on": self._state.attempt, **facts}
        past = _Past()
        done = done_beyond(self._look_back(past), resumed_at)
        past.tally.add(start)
        if past.batch not in (None, facts.get("global_batch")):
            log.warning(
                "data.global_batch is %s from here on, and was %d: results will be others than without a restart, and "
                "the audit will say that it is not constant",
                *(facts.get("global_batch"), past.batch),
            )
        with self._lock:
            self._tally = past.tally
        self.divergence = self._replay = None
        if replay != "off" and done:
            self._replay = Replay(done, dict(facts), stops=replay == "stop")
        self._set(step=resumed_at, lost_steps=past.lost, **past.summary)
        self._append(start)
        self._publish()
        if self._trackers is not None:
            self._trackers.begin(history(self._storage, self._state))

    def _commit(self, line: Record) -> None:
        """Of a step or an evaluation."""
        self._ledger.append(line)
        if self._trackers is not None:
            self._trackers.tell(line)

    def recover(self, lines: bytes) -> None:
        """Put on record what is not there, before the attempt's own first line."""
        attempt, step = self._state
        self._lineage = self._lineage or Lineage(read_records(self._storage))
        for line in self._lineage.through(missing(lines, self._lineage.reached(attempt or OUTSIDE), step)):
            self._ledger.append(line)

    def _look_back(self, past: _Past) -> Iterator[Record]:
        """Count what led here, and give what steps done again may be compared with. A ledger need not fit into memory,
        and on an object store each reading takes long: there are two of them."""
        lineage = self._lineage or Lineage(read_records(self._storage))
        self._lineage = None
        for record, led, other in lineage.marked(read_records(self._storage), self._state):
            past.add(record, led=led)
            if not other:
                yield record

    def step(self, record: dict[str, Any]) -> None:
        """Add a line; the summary follows at the next save."""
        record = {"event": "step", **_as_json(record)}
        self._state = Origin(self._attempt, record["step"])
        if self._replay is not None:
            self._replay.compare(record)
            if self._replay.over:
                self._tell_replay()
        self.lines.add(record)
        with self._lock:
            if self._tally is not None:
                self._tally.add(record)
            self._set(step=record["step"], train_loss=record["loss"])

    def _tell_replay(self) -> None:
        """What has come of it, before the line of the step that differs."""
        replay, self._replay = self._replay, None
        if replay is None or not (replay.equal or replay.divergence):
            return
        self.divergence = replay.divergence
        if self.divergence is None:
            log.info("%d steps were done again and came to the same as before", replay.equal)
        else:
            log.warning("the replay check: %s", self.divergence)
        self._append(replay.event())

    def skips(self) -> list[Skip]:
        """Read the ledger for them."""
        self._lineage = Lineage()
        return recorded(self._lineage.through(read_records(self._storage)))

    def skip(self, skip: Skip) -> None:
        """Put it on record, durably: no later attempt may come to another decision. Raises StorageError."""
        log.warning("epoch %d, positions %d to %d: skipped: %s", skip.epoch, skip.first, skip.last - 1, skip.reason)
        self._append(skip.record())
        self._ledger.flush()

    def replicas_differ(self, event: Record) -> None:
        """Add it: what is on record of the steps since the last agreement is not to be relied on."""
        self._append({"event": "replicas", **event})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line and renew the summary."""
        values = _as_json(metrics)
        self.lines.add({"event": "evaluation", "step": step, "metrics": values})
        self._set(validation=values, validation_step=step)
        self._publish_if_possible()

    def saving(self) -> None:
        """Make the ledger durable first: lines beyond a checkpoint are rewound, lines missing below never return."""
        self._ledger.flush()

    def committed(self, step: int) -> None:
        """Renew the summary."""
        self._publish_if_possible()
        if self._trackers is not None:
            self._trackers.saved()

    def not_saved(self, *, skipped: bool) -> None:
        """Count it; the summary tells it when it is renewed."""
        name = "saves_skipped" if skipped else "saves_failed"
        with self._lock:
            self._set(**{name: getattr(self._summary, name) + 1})

    def end(self, status: Status, message: str = "") -> None:
        """Close with ``status``."""
        if status != "failed":
            self._tell_replay()
            self.lines.hold(False)
        self._set(status=status, message=message)
        self._publish()
        if self._trackers is not None:
            self._trackers.end(status, wait=status != "failed")  # the next attempt is not to be kept waiting

    def fail(self, message: str, *, consequence: bool) -> None:
        """Close as failed; the reason of the rank that failed first is kept. Lines that wait are not put on record."""
        told = read_summary(self._storage) if consequence else None
        if told is not None and told.attempt == self._attempt and told.status == "failed":
            message = told.message
        self.end("failed", message)

    def _append(self, record: dict[str, Any]) -> None:
        self._ledger.append({**record, "attempt": self._attempt, "time": round(time.time(), 3)})

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._summary = dataclasses.replace(self._summary, **changes)

    def _publish_if_possible(self) -> None:
        """Trouble with the storage does not stop training: the summary is made anew at the next occasion."""
        try:
            self._publish()
        except StorageError as error:
            log.warning("the summary could not be renewed: %s", error)

    def _publish(self) -> None:
        with self._publishing:  # else an older summary might be written over a newer one
            self._ledger.flush()
            stored = read_summary(self._storage)
            if stored is None or stored.attempt <= self._attempt:  # a newer attempt's word stands
                self._storage.put(paths.SUMMARY, encode(self._now()))

    def _now(self) -> RunSummary:
        with self._lock:
            if (count := self._tally) is not None:
                self._set(
                    samples_seen=count.samples,
                    samples_repeated=count.repeated,
                    samples_skipped=count.skipped,
                    samples_padded=count.padded,
                    samples_dropped=count.dropped,
                )
            self._set(updated=time.time())
            return self._summary


def history(storage: Storage, origin: Origin | None = None) -> History:
    """What trackers are told of it: up to a state, by default the newest."""
    read = partial(read_records, storage)
    return History(lambda: course(read, origin), read)


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity: null."""

    def known(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _as_json(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: known(value) for name, value in values.items()}


def read_summary(storage: Storage) -> RunSummary | None:
    """The summary of a run; None when there is none yet."""
    try:
        return decode(storage.read(paths.SUMMARY))
    except (NotFound, ValueError, TypeError, AttributeError):  # missing, torn, or not a summary
        return None
