"""What a step that was done again, and came to something else, points to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.data.ledger import Record
from elastic_runner.train.replay import KEPT_STEPS, Done, Replay, diagnose, done_beyond, tolerance

START: Record = {
    "event": "start", "resumed_at": 0, "world": 2, "strategy": "ddp", "determinism": "elastic", "precision": "fp32",
    "device": "cpu", "threads": 1, "global_batch": 8, "shards": 4,
}  # fmt: skip
OTHER = {"epoch": 1, "first": -8, "last": 0, "digest": "other", "rng": "other", "lr": 0.5, "scale": 2.0, "loss": 2.0,
         "grad_norm": 3.0}  # fmt: skip
"""Another value for each field that is compared, in the order in which they tell."""


def line(step: int, **changes: Any) -> Record:
    return {
        "event": "step", "step": step, "epoch": 0, "first": 8 * step - 8, "last": 8 * step, "digest": f"of {step}",
        "rng": f"in {step}", "lr": 0.1, "scale": 1.0, "loss": 1.0 / step, "grad_norm": 1.5, "updated": True, **changes,
    }  # fmt: skip


def start(**changes: Any) -> Record:
    return {**START, **changes}


@pytest.mark.parametrize(
    ("what", "updates", "cause"),
    [
        *[(name, 1, "data") for name in ("epoch", "first", "last", "digest")],
        ("rng", 1, "random numbers"),
        ("lr", 1, "schedule"),
        ("scale", 1, "scaler"),
        ("loss", 0, "parameters"),
        ("grad_norm", 0, "gradients"),
        ("loss", 1, "optimizer"),
        ("grad_norm", 1, "optimizer"),
        ("loss", 2, "computation"),
    ],
)
def test_the_first_thing_that_differs_names_the_cause(what: str, updates: int, cause: str) -> None:
    """Whatever differs besides as a consequence."""
    later = list(OTHER)[list(OTHER).index(what) :]
    new = line(7, **{name: OTHER[name] for name in later})
    found = diagnose(line(7), new, updates=updates, tolerance=0.0)
    assert found is not None
    assert (found.step, found.what, found.old, found.new, found.cause) == (7, what, line(7)[what], new[what], cause)
    assert str(found).startswith(f"step 7 was done again and its {what} is {new[what]}, where the ledger has")


def test_rounding_is_allowed_for_in_results_only() -> None:
    assert diagnose(line(1), line(1, loss=1.009, grad_norm=1.6), updates=0, tolerance=0.01) is None
    for changes in ({"loss": 1.02}, {"grad_norm": 1.7}, {"lr": 0.1000001}, {"loss": None}):
        assert diagnose(line(1), line(1, **changes), updates=0, tolerance=0.01) is not None
    late = diagnose(line(1), line(1, loss=1.02), updates=5, tolerance=0.01)
    assert late is not None and late.cause == "optimizer", "a small difference at first shows later"


def test_what_one_of_two_lines_lacks_is_not_compared() -> None:
    """Of an older version, or of streams, whose samples have no numbers. A loss that is not finite is null."""
    old = {name: value for name, value in line(1).items() if name != "rng"}
    assert diagnose(old, line(1), updates=0, tolerance=0.0) is None
    assert diagnose(line(1, digest=None), line(1), updates=0, tolerance=0.0) is None
    assert diagnose(line(1, loss=None), line(1, loss=None), updates=0, tolerance=0.0) is None


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ({}, {"world": 3, "strategy": "fsdp"}, 0.0),
        ({"determinism": "order"}, {}, 0.01),
        ({}, {"determinism": "off"}, None),
        ({"determinism": "off"}, {"determinism": "order"}, None),
    ],
)
def test_how_far_attempts_may_differ(old: Record, new: Record, allowed: float | None) -> None:
    assert tolerance(start(**old), start(**new)) == allowed


@pytest.mark.parametrize(
    ("old", "new", "exact"),
    [
        ({}, {}, True),
        ({"threads": 2}, {}, False),
        ({"world": 1}, {}, False),
        ({}, {"strategy": "fsdp"}, False),
        ({"device": "cuda"}, {"device": "cuda"}, False),
        ({"world": 3}, {"world": 3}, False),
        ({"world": 3, "strategy": "fsdp"}, {"world": 3, "strategy": "fsdp"}, True),
    ],
)
def test_order_is_exact_only_where_the_same_sums_are_made(old: Record, new: Record, exact: bool) -> None:
    before, now = (start(determinism="order", **changes) for changes in (old, new))
    assert tolerance(before, now) == (0.0 if exact else 0.01)
    assert tolerance(before, {**now, "precision": "bf16"}) == (0.0 if exact else 0.05)


@pytest.mark.parametrize("other", [{"shards": 2}, {"global_batch": 4}, {"device": "cuda"}])
def test_other_batches_and_other_generators_are_no_measure(other: Record) -> None:
    assert tolerance(start(**other), start(shards=4, global_batch=8)) is None


def test_a_ledger_without_facts_is_no_measure_to_the_bit() -> None:
    assert tolerance({"event": "start", "resumed_at": 0}, START) == 0.01


def replayed(done: dict[int, Done], new: list[Record], **facts: Any) -> Replay:
    replay = Replay(done, start(**facts), stops=False)
    for one in new:
        if not replay.over:
            replay.compare(one)
    return replay


@given(
    steps=st.integers(1, 12),
    differs_at=st.integers(1, 14),
    field=st.sampled_from(list(OTHER)),
    skipped=st.sets(st.integers(1, 12)),
)
def test_the_first_divergence_is_found_once_and_only_then(
    steps: int, differs_at: int, field: str, skipped: set[int]
) -> None:
    """Steps whose update was skipped say nothing of the optimizer's state."""
    old = [line(n, updated=n not in skipped) for n in range(1, steps + 1)]
    new = [one if one["step"] < differs_at else {**one, field: OTHER[field]} for one in old]
    replay = replayed(done_beyond([START, *old], 0), new)
    assert replay.over and replay.equal == min(steps, differs_at - 1)
    if differs_at > steps:
        assert replay.divergence is None and replay.event() == {"event": "replay", "equal": steps}
        return
    found = replay.divergence
    assert found is not None and (found.step, found.what) == (differs_at, field)
    updates = sum(n not in skipped for n in range(1, differs_at))
    if field in ("loss", "grad_norm") and updates:
        assert found.cause == ("optimizer" if updates == 1 else "computation")
    assert replay.event()["agreed"] == differs_at - 1


def test_sample_digests_are_compared_only_where_batches_are_cut_alike() -> None:
    done = done_beyond([start(shards=2), line(1)], 0)
    assert replayed(done, [line(1, digest="cut otherwise")]).divergence is None
    assert replayed(done, [line(1, digest="cut otherwise")], shards=2).divergence is not None


@given(
    attempts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=5),
    resumed_at=st.integers(0, 12),
)
def test_the_newest_line_of_each_step_counts(attempts: list[tuple[int, int]], resumed_at: int) -> None:
    records, newest = [], {}
    for number, (began, steps) in enumerate(attempts):
        records += [start(attempt=number), *[line(began + n, attempt=number) for n in range(1, steps + 1)]]
        newest.update({began + n: number for n in range(1, steps + 1)})
    found = done_beyond(records, resumed_at)
    assert {step: done.line["attempt"] for step, done in found.items()} == {
        step: number for step, number in newest.items() if step > resumed_at
    }
    assert all(done.line["attempt"] == done.start["attempt"] for done in found.values())


def test_what_is_not_to_be_relied_on_is_left_out() -> None:
    first = [START, *[line(n, attempt=1) for n in range(1, 6)]]

    def left(*more: Record) -> dict[int, int]:
        return {step: done.line["attempt"] for step, done in done_beyond([*first, *more], 1).items()}

    again = [START, line(2, attempt=2)]
    went_on = {"event": "replay", "equal": 1, "agreed": 2, "stops": False}
    assert left(*again, went_on, line(3, attempt=2)) == {2: 2, 3: 2}
    assert left(*again, {**went_on, "stops": True}, line(3, attempt=2)) == {2: 2, 3: 1, 4: 1, 5: 1}
    assert left({"event": "replicas", "after": 5, "agreed": 3}) == {2: 1, 3: 1}
    assert left({"event": "replicas", "after": 5, "agreed": None}) == {2: 1, 3: 1, 4: 1, 5: 1}, "it began so"


def test_memory_is_bounded() -> None:
    found = done_beyond([START, *[line(n) for n in range(1, KEPT_STEPS + 100)]], 10)
    assert len(found) == KEPT_STEPS and min(found) == 11
