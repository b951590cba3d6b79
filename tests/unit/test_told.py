"""What a tracker is told: each step once, and again from where the courses of two attempts part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner import paths
from elastic_runner.errors import Fenced
from elastic_runner.storage import open_storage
from elastic_runner.tracking import told
from elastic_runner.tracking.told import Fresh, Piece, Told
from elastic_runner.tracking.values import rows, values_of


def step(number: int, attempt: int = 1) -> dict[str, Any]:
    return {"event": "step", "step": number, "attempt": attempt, "loss": 1.0 / number, "time": 0.0}


def evaluation(number: int, attempt: int = 1) -> dict[str, Any]:
    return {"event": "evaluation", "step": number, "attempt": attempt, "metrics": {"loss": 2.0}, "time": 0.0}


def course(owners: list[int]) -> list[Piece]:
    """Of a run whose step i was done by ``owners[i - 1]``."""
    pieces: list[Piece] = []
    for number, attempt in enumerate(owners, 1):
        told.extend(pieces, step(number, attempt))
    return pieces


OWNERS = st.lists(st.integers(1, 3), max_size=12)


@given(one=OWNERS, other=OWNERS)
def test_courses_are_the_same_as_long_as_the_same_attempts_did_the_steps(one: list[int], other: list[int]) -> None:
    # Attempts' numbers only grow along a course.
    one, other = sorted(one), sorted(other)
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert told.common(course(one), course(other)) == (same or -1)


@given(owners=OWNERS, at=st.integers(0, 14))
def test_a_course_is_cut_at_a_step(owners: list[int], at: int) -> None:
    owners = sorted(owners)
    assert told.cut(course(owners), at) == course(owners[:at])


def test_several_evaluations_of_a_step_and_one_before_the_first() -> None:
    test_set = {**evaluation(1), "metrics": {"test": 1.0}}
    records = [evaluation(0), step(1), evaluation(1), test_set, step(2)]
    fresh = Fresh(-1)
    assert [r for r in [*records, evaluation(1), test_set] if fresh.take(r)] == records


@pytest.mark.parametrize("missing", ["step", "attempt", "time"])
def test_lines_that_lack_something_are_passed_over(missing: str) -> None:
    torn = {name: value for name, value in step(2).items() if name != missing}
    assert not Fresh(-1).take(torn) and not Fresh(-1).take({**evaluation(2), "metrics": None})
    assert [row["step"] for row in rows([step(1), torn, step(3)])] == [1, 3]


def test_of_steps_done_twice_the_first_is_told_and_a_missing_evaluation_still_comes() -> None:
    first = [step(1), step(2), evaluation(2), step(3)]
    again = [step(2, 2), evaluation(2, 2), step(3, 2), evaluation(3, 2), step(4, 2), evaluation(3, 2)]
    fresh = Fresh(0)
    assert [r for r in [*first, {"event": "start"}, *again] if fresh.take(r)] == [*first, again[3], again[4]]


def test_what_is_held_is_not_told_again() -> None:
    fresh = Fresh(2)
    records = [step(1), step(2), evaluation(2), step(3)]
    assert [r for r in records if fresh.take(r)] == [step(3)]


def test_values_have_names_and_nulls_are_left_out() -> None:
    record = {
        **step(4, 2),
        "grad_norm": None,
        "lr": 0.1,
        "epoch": 0,
        "world": 3,
        "metrics": {"accuracy": 0.5, "loss": 9.0},
    }
    assert values_of(record) == {
        "train/loss": 0.25, "train/lr": 0.1, "train/epoch": 0, "train/accuracy": 0.5, "run/attempt": 2, "run/world": 3,
    }  # fmt: skip
    assert values_of(evaluation(4)) == {"validation/loss": 2.0}


def test_a_row_a_step_with_what_was_evaluated_after_it() -> None:
    records = [{"event": "start", "resumed_at": 0}, step(1), step(2), evaluation(2), step(3)]
    assert [sorted(row) for row in rows(records)] == [
        ["run/attempt", "step", "train/loss"],
        ["run/attempt", "step", "train/loss", "validation/loss"],
        ["run/attempt", "step", "train/loss"],
    ]


def test_it_is_kept_for_the_next_attempt(tmp_path: Any) -> None:
    storage = open_storage(str(tmp_path))
    assert told.read(storage, "mine") == Told()
    kept = Told(attempt=3, run_id="x", course=[(1, 10), (3, 12)])
    told.write(storage, "mine", kept)
    assert told.read(storage, "mine") == kept and kept.step == 12
    with pytest.raises(Fenced):
        told.write(storage, "mine", Told(attempt=2, run_id="x"))
    assert told.read(storage, "mine") == kept, "an older attempt that wakes up changes nothing"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": "x"}', b'{"run_id": "x", "course": [1]}'])
def test_where_that_is_damaged_all_is_told_again(tmp_path: Any, damage: bytes) -> None:
    storage = open_storage(str(tmp_path))
    storage.put(paths.tracker("mine"), damage)
    assert told.read(storage, "mine") == Told()
