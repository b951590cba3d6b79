"""The run's record: ledger lines and the summary, written by global rank 0. A failure is written by who had it.

Steps do not wait for the storage: what a save has to say is written from the thread that saves.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic_runner import paths
from elastic_runner.config import ReplayPolicy
from elastic_runner.data.ledger import LedgerWriter, Record, Tally, effective, read_records, tally
from elastic_runner.data.skips import Skip, recorded
from elastic_runner.errors import NotFound, StorageError
from elastic_runner.observability.summary import RunSummary, Status, decode, encode
from elastic_runner.storage import Storage
from elastic_runner.train.lines import StepLines, missing
from elastic_runner.train.replay import Divergence, Done, Replay, done_beyond

log = logging.getLogger(__name__)


class _Past(NamedTuple):
    resumed_at: int
    records: list[Record]
    """What led there."""
    lost: int
    """Steps that did not."""
    done: dict[int, Done]
    """What is on record of those that come next."""


class RunRecord:
    """Events of one attempt, in order. A rank keeps lines for its snapshots, and writes down its own failure alone."""

    def __init__(self, storage: Storage, *, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt
        self.lines = StepLines(lambda line: None, attempt)
        """Lines of steps that may have to wait."""
        self.divergence: Divergence | None = None
        """What came to something else when it was done again; known on global rank 0."""

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

    def recover(self, lines: bytes, resumed_at: int) -> None:
        """The attempt continues from a snapshot that these came with: put on record what is not there."""

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

    def __init__(self, storage: Storage, *, attempt: int, target_step: int, restarts: int) -> None:
        super().__init__(storage, attempt=attempt)
        self._ledger = LedgerWriter(storage, attempt)
        self.lines = StepLines(self._ledger.append, attempt)
        self._read: list[Record] | None = None
        self._past: _Past | None = None
        self._replay: Replay | None = None
        self._tally: Tally | None = None
        self._lock = threading.RLock()
        """Of the summary and the tally; never held while the storage is asked."""
        self._publishing = threading.Lock()
        # What the run stood at stays true until the attempt has restored.
        self._summary = read_summary(storage) or RunSummary(status="running")
        self._set(status="running", attempt=attempt, target_step=target_step, restarts=restarts, message="")
        self._publish()

    def start(self, resumed_at: int, facts: Mapping[str, Any], *, replay: ReplayPolicy = "off") -> None:
        """Count what led here, then open the ledger of this attempt."""
        self.lines.hold(False)  # the program went back on its own: what was done since is on record as lost
        past, self._past = self._past, None
        if past is None or past.resumed_at != resumed_at:
            past = self._look_back(resumed_at)
        counts = tally(past.records)
        with self._lock:
            self._tally = counts
        self.divergence = self._replay = None
        if replay != "off" and past.done:
            self._replay = Replay(past.done, dict(facts), stops=replay == "stop")
        self._set(step=resumed_at, lost_steps=past.lost)
        for record in past.records:
            if record["event"] == "evaluation":
                self._set(validation=record["metrics"], validation_step=record["step"])
            elif record["event"] == "step":
                self._set(train_loss=record["loss"])
        self._append({"event": "start", "resumed_at": resumed_at, **facts})
        self._publish()

    def recover(self, lines: bytes, resumed_at: int) -> None:
        """Put on record what is not there, before the attempt's own first line."""
        past = self._past = self._look_back(resumed_at)
        for line in list(missing(lines, past.records, resumed_at)):
            self._ledger.append(line)
            past.records.append(line)

    def _look_back(self, resumed_at: int) -> _Past:
        everything, self._read = self._read, None  # read once: it may be long
        everything = list(read_records(self._storage)) if everything is None else everything
        records, lost = effective(everything, resumed_at)
        return _Past(resumed_at, records, lost, done_beyond(everything, resumed_at))

    def step(self, record: dict[str, Any]) -> None:
        """Add a line; the summary follows at the next save."""
        record = {"event": "step", **_as_json(record)}
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
        self._read = list(read_records(self._storage))
        return recorded(self._read)

    def skip(self, skip: Skip) -> None:
        """Put it on record, durably: no later attempt may come to another decision. Raises StorageError."""
        log.warning("epoch %d, positions %d to %d: skipped: %s", skip.epoch, skip.first, skip.last - 1, skip.reason)
        self._append(skip.record())
        self._ledger.flush()
        if self._read is not None:
            self._read.append(skip.record())

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


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def read_summary(storage: Storage) -> RunSummary | None:
    """The summary of a run; None when there is none yet."""
    try:
        return decode(storage.read(paths.SUMMARY))
    except (NotFound, ValueError, TypeError, AttributeError):  # missing, torn, or not a summary
        return None
