"""Counting: repeats, gaps, and what is skipped, dropped and padded."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_runner.data.ledger import Record
from elastic_runner.data.partition import Cursor, LastBatch, next_batch
from elastic_runner.data.tally import tally


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
    others: list[Record] = [
        {"event": "start", "resumed_at": 0},
        {"event": "saved", "step": 1},
        {"event": "evaluation", "step": 1},
        {},
    ]
    assert asdict(tally([*others, *steps(3), *others])) == asdict(tally(steps(3)))


def test_an_imported_state_goes_on_from_samples_that_nobody_knows() -> None:
    """Its first step makes no gap, nor has skipped what came before."""
    imported: Record = {"event": "start", "resumed_at": 7, "rests_on": 0}
    records = [imported, *steps(8, first_step=8, cursor=Cursor(epoch=2, position=12))]
    assert counts(records) == FINE
    assert counts([{**imported, "resumed_at": 6}, *records[1:]]) == {**FINE, "gaps": 1}
    assert counts(records[1:]) != FINE
