"""Global batches that always fail: which failures are their samples' fault, and how a run passes over them for good."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from elastic_runner import paths
from elastic_runner.config import CheckpointConfig, DataConfig, RunConfig, TrainingConfig
from elastic_runner.data.audit import audit
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.order import samples_at
from elastic_runner.data.skips import START, Skip, begins
from elastic_runner.data.streams import ShardedStreams
from elastic_runner.data.tally import tally
from elastic_runner.errors import ConfigError
from elastic_runner.history import HANG, End, write_end
from elastic_runner.storage import Storage, open_storage
from elastic_runner.train.past import Past
from elastic_runner.train.record import MainRecord
from elastic_runner.train.replay import done_beyond
from elastic_runner.train.skips import next_skip, unanswered
from tests.support.place import SoloPlace

SAVED = paths.manifest(4, 1)


def end(kind: str = "ValueError", step: int | None = 5, first: int | None = 8, **more: Any) -> End:
    last = None if first is None else first + 2
    epoch = None if first is None else 0
    message = more.pop("message", f"rank 1: {kind}: bad\nmore")
    return End(
        attempt=more.pop("attempt", 1), kind=kind, step=step, restored=SAVED, epoch=epoch, first=first, last=last,
        message=message, **more,
    )  # fmt: skip


SKIP = Skip(epoch=0, first=8, last=10, step=5, reason="step 5 failed 2 times with them: rank 1: ValueError: bad")
BAD = end()


@pytest.mark.parametrize(
    "ends",
    [
        [BAD, BAD],
        [end("KeyError"), BAD, BAD],
        *[[BAD, end(kind), BAD] for kind in ("SIGKILL", HANG, "PeerLost", "StorageError", "NonFiniteError")],
        [BAD, end("ReplicasDiffer", 9, 16), BAD],
    ],
)
def test_what_fails_twice_with_the_same_samples_is_skipped(ends: list[End]) -> None:
    assert next_skip(ends, [], times=2, most=1) == SKIP


@pytest.mark.parametrize(
    "ends",
    [
        [],
        [BAD],
        [BAD, end("KeyError")],
        [BAD, end(step=6)],
        [BAD, end(first=6)],
        [BAD, BAD, end(first=12)],
        [BAD, end("SIGSEGV", 5, None), BAD],
        [end(first=None)] * 2,
        [end(step=None, first=None)] * 2,
        *[[end(kind)] * 2 for kind in (HANG, "SIGKILL", "SIGTERM", "PeerLost", "PhaseTimeout", "StorageFull")],
        *[[end(kind)] * 2 for kind in ("NonFiniteError", "KeyboardInterrupt", "SystemExit", "ConfigError")],
        [end("RuntimeError", message="rank 0: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.")]
        * 2,
    ],
)
def test_what_may_have_another_cause_is_not(ends: list[End]) -> None:
    assert next_skip(ends, [], times=2, most=9) is None


def test_a_known_skip_is_not_made_again_and_there_are_so_many_in_a_run() -> None:
    after = [BAD, BAD, end(first=10), end(first=10)]
    assert next_skip([BAD, BAD], [SKIP], times=2, most=9) is None
    found = next_skip(after, [SKIP], times=2, most=2)
    assert found is not None and (found.first, found.last, found.step) == (10, 12, 5)
    assert next_skip(after, [SKIP], times=2, most=1) is None
    assert next_skip(after, [], times=3, most=9) is None
    assert next_skip(after, [], times=0, most=9) is None


def test_what_a_skip_answers_speaks_against_no_state() -> None:
    others = [end("ReplicasDiffer"), end("SIGKILL"), end(first=10)]
    assert unanswered([BAD, *others, BAD], [SKIP]) == others


def test_it_needs_failures_to_be_counted() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.demote_after"):
        RunConfig(training=TrainingConfig(skip_failing=1), checkpoint=CheckpointConfig(demote_after=0))


# The data.


def test_where_a_batch_may_begin() -> None:
    skips = [Skip(epoch=e, first=a, last=a + 2, step=1, reason="bad") for e, a in ((0, 8), (0, 10), (1, 0))]
    places = [(epoch, position) for epoch in range(-1, 4) for position in range(0, 14, 2)]

    def found(after: tuple[int, int]) -> list[tuple[int, int]]:
        return [place for place in places if begins(place, after, skips)]

    assert found((0, 6)) == [(0, 6), (1, 2), (2, 0)]
    assert found((0, 8)) == [(0, 12), (1, 2), (2, 0)]
    assert found(START) == [START, (0, 0)]


class Brittle(Dataset[torch.Tensor]):
    """Sample i is i, but for the bad ones."""

    def __init__(self, bad: Sequence[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_loader_goes_on_behind_it_whatever_was_prefetched(workers: int) -> None:
    """A bad sample in the third batch and one in the last; the skips come while the loader is running."""
    order = samples_at(range(20), length=20, seed=0, epoch=0)
    config = DataConfig(global_batch=4, shards=2, loader_workers=workers)
    loader = ElasticLoader(Brittle([order[9], order[19]]), config, SoloPlace())

    def take(step: int) -> list[int]:
        loader.begin(step)
        taken = [sample for part in loader.microbatches() for sample in part.batch.tolist()]
        loader.commit()
        return taken

    third = Skip(epoch=0, first=8, last=12, step=3, reason="bad")
    assert [take(1), take(2)] == [order[:4], order[4:8]]
    loader.skip([third])
    assert take(3) == order[12:16]
    loader.skip([third, Skip(epoch=0, first=16, last=20, step=4, reason="bad")])
    assert take(4) == samples_at(range(4), length=20, seed=0, epoch=1)


def test_streams_refuse() -> None:
    streams = ShardedStreams(lambda *_: iter([]), DataConfig(global_batch=4, shards=2), SoloPlace())  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"training\.skip_failing needs an ElasticLoader"):
        streams.skip([])


# The record.


def line(step: int, first: int) -> Record:
    return {"event": "step", "step": step, "epoch": 0, "first": first, "last": first + 2, "padded": 0, "dropped": 0,
            "length": 20, "attempt": 1, "loss": 1.0}  # fmt: skip


def opened(storage: Storage, attempt: int = 3, **training: Any) -> Past:
    record = MainRecord(storage, attempt=attempt, target_step=9, restarts=0)
    return Past(storage, record, RunConfig(training=TrainingConfig(**{"skip_failing": 1, **training})))


@pytest.mark.parametrize("appends", [True, False])
def test_a_skip_is_put_on_record_once_and_no_checkpoint_is_blamed(appends: bool, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path) if appends else f"memory://skips-{uuid.uuid4().hex}")
    for attempt in (1, 2):
        write_end(storage, replace(BAD, attempt=attempt))
    assert SAVED in opened(storage, skip_failing=0).blamed()
    past = opened(storage)
    assert (past.blamed(), past.distrusted(), past.skips) == ({}, 0, [SKIP])
    later = opened(storage, attempt=4, skip_failing=0)
    assert later.skips == [SKIP], "for good, also when it is turned off"
    assert later.blamed() == {}
    told = [r for r in read_records(storage) if r["event"] == "skip"]
    assert [(r["first"], r["last"], r["step"], r["attempt"]) for r in told] == [(8, 10, 5, 3)]


def test_steps_before_it_are_a_measure_for_their_replay_and_later_ones_are_not() -> None:
    records = [
        {"event": "start", "resumed_at": 0},
        *(line(n, 2 * n - 2) for n in range(1, 8)),
        SKIP.record(),
        line(6, 12),
    ]
    assert {step: done.line["first"] for step, done in done_beyond(records, 2).items()} == {3: 4, 4: 6, 6: 12}


RUN: list[Record] = [
    {"event": "start", "resumed_at": 0, "attempt": 1, "last_batch": "drop"},
    *(line(n, 2 * n - 2) for n in range(1, 5)),
    {"event": "start", "resumed_at": 4, "attempt": 2, "last_batch": "drop"},
    SKIP.record(),
    *(line(n, 2 * n) | {"attempt": 2} for n in range(5, 10)),
]
"""Positions 8 and 9 are skipped; without digests."""


def coverage(records: list[Record]) -> tuple[str, tuple[str, ...]]:
    finding = next(f for f in audit(lambda: iter(records)).findings if f.name == "coverage")
    return finding.verdict, finding.faults


def test_what_is_skipped_on_record_is_told_and_no_fault() -> None:
    found = audit(lambda: iter(RUN))
    assert {f.name: f.count for f in found.findings if f.count} == {"rates": 9}
    [portion] = found.portions
    assert (portion.kind, portion.positions, portion.reason, portion.is_fault) == (
        "skipped",
        ((8, 10),),
        SKIP.reason,
        False,
    )
    assert (tally(RUN).skipped, tally(RUN).gaps) == (2, 0)


@pytest.mark.parametrize(
    "records",
    [
        [r for r in RUN if r["event"] != "skip"],
        [r if r["event"] != "skip" else r | {"epoch": 1} for r in RUN],
        [r if r["event"] != "skip" else r | {"reason": ""} for r in RUN],
        [r if r["event"] != "skip" else r | {"last": "10"} for r in RUN],
    ],
)
def test_what_is_not_on_record_is_a_fault(records: list[Record]) -> None:
    verdict, faults = coverage(records)
    assert verdict == "refuted" and faults[0].startswith("2 samples skipped in epoch 0: positions 8 to 9")


def test_a_skip_larger_than_a_batch_does_not_hide_what_is_missing() -> None:
    wide = [r if r["event"] != "skip" else r | {"first": 0, "last": 20} for r in RUN]
    assert "a skip of 20 samples is on record, more than a global batch has" in coverage(wide)[1]


def test_a_skip_put_on_record_afterwards_excuses_nothing() -> None:
    late = [*(r for r in RUN if r["event"] != "skip"), SKIP.record()]
    told = {f.name: f.faults for f in audit(lambda: iter(late)).findings if f.count}
    assert "takes its samples from position 10 of epoch 0, not 8" in told["resumes"][0]
