"""The ledger: what was written is read, what was lost is counted as lost, and repeats and gaps are seen."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_runner import paths
from elastic_runner.data.ledger import LedgerWriter, Record, effective, read_records, tally
from elastic_runner.data.partition import Cursor, LastBatch, next_batch
from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = str(tmp_path) if request.param == "local" else f"memory://ledger-{uuid.uuid4().hex}"
    opened = open_storage(url)
    yield opened
    opened.delete("")


def steps(
    count: int,
    *,
    length: int = 20,
    size: int = 6,
    policy: LastBatch = "drop",
    cursor: Cursor | None = None,
    first_step: int = 1,
) -> list[Record]:
    """The step records of an undisturbed run."""
    records, cursor = [], cursor or Cursor()
    for step in range(first_step, first_step + count):
        batch = next_batch(cursor, length=length, size=size, policy=policy)
        records.append(
            {"event": "step", "step": step, "epoch": batch.epoch, "first": batch.first, "last": batch.last}
            | {"padded": batch.padded, "dropped": batch.dropped, "length": length}
        )
        cursor = batch.after
    return records


def counts(records: list[Record]) -> dict[str, int]:
    """What is amiss."""
    return {name: value for name, value in asdict(tally(records)).items() if name in ("repeated", "skipped", "gaps")}


FINE = {"repeated": 0, "skipped": 0, "gaps": 0}


# Writing and reading.


def test_what_is_appended_and_flushed_is_read_in_order(storage: Storage) -> None:
    written = [{"event": "step", "step": step} for step in range(1, 601)]
    for attempt, part in ((1, written[:300]), (2, written[300:])):
        writer = LedgerWriter(storage, attempt)
        for record in part:
            writer.append(record)
        writer.flush()
        writer.flush()  # nothing is pending: nothing is written twice
    assert list(read_records(storage)) == written


def test_local_lines_are_there_without_a_flush(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    LedgerWriter(storage, 1).append({"event": "start", "resumed_at": 0})
    assert list(read_records(storage)) == [{"event": "start", "resumed_at": 0}]


def test_object_stores_get_a_segment_when_it_is_full() -> None:
    storage = open_storage(f"memory://ledger-{uuid.uuid4().hex}")
    writer = LedgerWriter(storage, 3)
    for number in range(257):
        writer.append({"event": "step", "step": number})
    assert storage.list(paths.LEDGER) == ["000003-000000.jsonl"]
    assert len(list(read_records(storage))) == 256
    writer.flush()
    assert len(list(read_records(storage))) == 257
    storage.delete("")


def test_failed_flush_keeps_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://ledger-{uuid.uuid4().hex}")
    writer = LedgerWriter(storage, 1)
    writer.append({"event": "step", "step": 1})

    def refuse(path: str, data: bytes) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(storage, "put", refuse)
        writer.flush()
    writer.append({"event": "step", "step": 2})
    writer.flush()
    assert [record["step"] for record in read_records(storage)] == [1, 2]
    storage.delete("")


@pytest.mark.parametrize("torn", [b'{"event":"step","st', b'{"event":"step","step":3}', b"\xff\xfe", b'{"a\n', b"7\n"])
def test_torn_tail_of_one_attempt_is_left_out_and_the_next_is_read(storage: Storage, torn: bytes) -> None:
    whole = json.dumps({"event": "step", "step": 1}).encode() + b"\n"
    storage.put(paths.ledger_segment(1, 0), whole + torn)
    storage.put(paths.ledger_segment(2, 0), whole.replace(b"1", b"2"))
    assert [record["step"] for record in read_records(storage)] == [1, 2]


def test_no_ledger_is_an_empty_one(storage: Storage) -> None:
    assert list(read_records(storage)) == []
    assert counts([]) == FINE


# What led to the present state.


def start(resumed_at: int) -> Record:
    return {"event": "start", "resumed_at": resumed_at}


def test_effective_rewinds_at_each_resume_and_counts_what_was_lost() -> None:
    run = steps(10)
    evaluation = {"event": "evaluation", "step": 5, "metrics": {}}
    saved = {"event": "saved", "step": 5}
    records = [start(0), *run[:5], evaluation, saved, start(4), *run[4:8], start(6), *run[6:]]
    kept, lost = effective(records)
    assert lost == 1 + 2
    assert [record for record in kept if record["event"] == "step"] == run
    assert evaluation not in kept
    assert saved not in kept
    assert counts(kept) == FINE
    assert tally(kept).steps == 10


def test_effective_takes_the_step_that_an_attempt_is_about_to_resume_at() -> None:
    kept, lost = effective([start(0), *steps(7)], 5)
    assert ([record["step"] for record in kept if record["event"] == "step"], lost) == ([1, 2, 3, 4, 5], 2)


def test_effective_passes_over_foreign_records() -> None:
    assert effective([{"note": "by hand"}, start(0)], 0) == ([{"note": "by hand"}, start(0)], 0)


@given(cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=6))
def test_any_history_of_kills_ends_in_the_undisturbed_run(cuts: list[tuple[int, int]]) -> None:
    """Each attempt does some steps; the next resumes some steps further back. Every sample is still used once, and a
    reader gets each step once, from the attempt that led to the result (case c67)."""
    run, records, at, done, lost = steps(100), [start(0)], 0, 0, 0
    for forward, back in [*cuts, (8, 0)]:
        records += run[at : at + forward]
        done, at = at + forward, max(0, at + forward - back)
        records.append(start(at))
        lost += done - at
    kept, counted = effective(records)
    assert counted == lost
    assert [record for record in kept if record["event"] == "step"] == run[:at]
    assert counts(kept) == FINE


# Counting.


@given(
    length=st.integers(1, 60),
    size=st.integers(1, 20),
    policy=st.sampled_from(["drop", "pad"]),
    count=st.integers(1, 40),
)
def test_undisturbed_run_counts_each_sample_and_nothing_amiss(
    length: int, size: int, policy: LastBatch, count: int
) -> None:
    assume(policy == "pad" or length >= size)
    records = steps(count, length=length, size=size, policy=policy)
    result = tally(records)
    assert counts(records) == FINE
    assert result.steps == count
    assert result.samples + result.padded == count * size
    whole_epochs = records[-1]["epoch"]
    in_epoch = [r for r in records if r["epoch"] == whole_epochs]
    assert result.samples + result.dropped == whole_epochs * length + in_epoch[-1]["last"] + in_epoch[-1]["dropped"]


@given(
    length=st.integers(20, 60),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    policies=st.tuples(st.sampled_from(["drop", "pad"]), st.sampled_from(["drop", "pad"])),
    before=st.integers(1, 15),
)
def test_another_batch_size_counts_what_no_longer_fits_as_dropped(
    length: int, sizes: tuple[int, int], policies: tuple[LastBatch, LastBatch], before: int
) -> None:
    """c49, c57: dropped, since the configuration says so, and not skipped, which would be a fault."""
    old = steps(before, length=length, size=sizes[0], policy=policies[0])
    ended = old[-1]["last"] + old[-1]["dropped"] == length
    cursor = Cursor(epoch=old[-1]["epoch"] + ended, position=0 if ended else old[-1]["last"])
    new = steps(30, length=length, size=sizes[1], policy=policies[1], cursor=cursor, first_step=before + 1)
    assert counts([*old, *new]) == FINE
    result = tally([*old, *new])
    last = new[-1]
    own_tail = length - last["last"] if policies[1] == "drop" and length - last["last"] < sizes[1] else 0
    assert result.samples + result.dropped == last["epoch"] * length + last["last"] + own_tail


def test_streams_of_unknown_length_are_counted_without_an_end() -> None:
    records = [
        {"event": "step", "step": 1, "epoch": 0, "first": 0, "last": 4, "padded": 0, "dropped": 0, "length": None},
        {"event": "step", "step": 2, "epoch": 1, "first": 0, "last": 4, "padded": 0, "dropped": 3, "length": None},
    ]
    assert counts(records) == FINE
    assert (tally(records).samples, tally(records).dropped) == (8, 3)


def without_steps(records: list[Record], removed: set[int]) -> list[Record]:
    """The records, renumbered, as a run would write that passes over some batches."""
    kept = [record for record in records if record["step"] not in removed]
    return [{**record, "step": number} for number, record in enumerate(kept, 1)]


@given(removed=st.sets(st.integers(1, 29), min_size=1, max_size=12))
def test_batches_passed_over_are_counted_as_skipped(removed: set[int]) -> None:
    records = steps(30, length=20, size=5)  # 30 steps end in the middle of an epoch, at a batch that is there
    result = tally(without_steps(records, removed))
    assert result.skipped == 5 * len(removed)
    assert result.repeated == 0


@given(data=st.data(), length=st.integers(10, 40))
@settings(max_examples=60)
def test_batches_done_again_are_counted_as_repeated(data: st.DataObject, length: int) -> None:
    """c48: a batch of the same epoch once more, at the same or another place in it."""
    records = steps(6, length=length, size=length // 6)
    at = data.draw(st.integers(1, 5))
    again = data.draw(st.integers(0, at - 1))
    doubled = [*records[:at], records[again], *records[at:]]
    result = tally([{**record, "step": number} for number, record in enumerate(doubled, 1)])
    assert result.repeated == length // 6
    assert result.skipped == 0
    assert result.gaps > 0


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=12))
def test_any_sequence_within_an_epoch_is_counted_like_by_hand(spans: list[tuple[int, int]]) -> None:
    records: list[Record] = []
    uses: Counter[int] = Counter()
    for step, (first, size) in enumerate(spans, 1):
        uses.update(range(first, first + size))
        records.append(
            {"event": "step", "step": step, "epoch": 0, "first": first, "last": first + size}
            | {"padded": 0, "dropped": 0, "length": 1000}
        )
    result = tally(records)
    assert result.samples == uses.total()
    assert result.repeated == uses.total() - len(uses)
    assert result.skipped == max(uses) + 1 - len(uses)
    in_order = all(f == (0 if i == 0 else sum(spans[i - 1])) for i, (f, _) in enumerate(spans))
    assert (result.gaps == 0) == in_order


def test_missing_and_doubled_step_numbers_are_gaps() -> None:
    records = steps(6)
    for numbers in ([1, 2, 4, 5, 6, 7], [1, 2, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]):
        assert tally([{**r, "step": n} for r, n in zip(records, numbers, strict=True)]).gaps == 1


def test_whole_epochs_passed_over_are_skipped() -> None:
    records = steps(8, length=20, size=10)
    assert counts(without_steps(records, {3, 4, 5, 6})) == {"repeated": 0, "skipped": 40, "gaps": 1}


def test_going_back_to_an_epoch_that_ended_repeats_its_samples() -> None:
    """c48: after a resume the order of epoch 0 came back."""
    records = steps(4, length=20, size=10)
    result = tally([*records[:3], {**records[0], "step": 4}])
    assert (result.repeated, result.gaps) == (10, 1)


def test_other_events_are_passed_over() -> None:
    others: list[dict[str, Any]] = [start(0), {"event": "saved", "step": 1}, {"event": "evaluation", "step": 1}, {}]
    assert asdict(tally([*others, *steps(3), *others])) == asdict(tally(steps(3)))
