"""Saves beside training by several ranks: failures, slowness and departures are everybody's, at the same place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import saving_jobs as jobs
from tests.support.ranks import RankFailed, run_ranks
from tests.support.saving_jobs import committed


@pytest.mark.parametrize(("world_size", "failing"), [(2, 0), (2, 1), (3, 1)])
def test_a_failed_save_is_told_at_the_same_step_on_all_ranks(world_size: int, failing: int, tmp_path: Path) -> None:
    """Case c29: a background failure that nobody is told of."""
    results = run_ranks(jobs.fail_some, world_size, str(tmp_path), "sharded", {failing: (6,)}, 3)
    assert [error for _, error in results] == [""] * world_size
    seen = results[0][0]
    assert [each for each, _ in results] == [seen] * world_size, "also in which step"
    (failure,) = [event for event in seen if event[0] == "not saved"]
    assert failure[1:3] == (6, "step 6 was not saved: the network is gone (failure 1 of 3 allowed in a row)")
    assert 7 <= failure[4] <= 9
    assert [event[1] for event in seen if event[0] == "saved"] == committed(str(tmp_path)) == [3, 9, 10]


def test_failures_of_different_ranks_in_a_row_end_all_with_the_same_error(tmp_path: Path) -> None:
    results = run_ranks(jobs.fail_some, 2, str(tmp_path), "sharded", {0: (3,), 1: (6,)}, 1)
    (seen, error), other = results
    assert other == (seen, error)
    assert [event[1] for event in seen] == [3]
    assert error.startswith("SaveFailed: ")
    assert committed(str(tmp_path)) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "the network is gone" in summary["message"]


def test_the_last_save_is_tried_whatever_became_of_those_before(tmp_path: Path) -> None:
    for seen, error in run_ranks(jobs.fail_some, 2, str(tmp_path), "sharded", {0: (9,)}, 0):
        assert error == ""
        assert [event[:2] for event in seen] == [("saved", 3), ("saved", 6), ("not saved", 9), ("saved", 10)]


def test_the_budget_is_of_failures_in_a_row(tmp_path: Path) -> None:
    for seen, error in run_ranks(jobs.fail_some, 2, str(tmp_path), "sharded", {1: (3, 9)}, 1):
        assert error == ""
        assert [event[:2] for event in seen] == [("not saved", 3), ("saved", 6), ("not saved", 9), ("saved", 10)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_slow_in_writing_holds_nobody_back(slow: int, tmp_path: Path) -> None:
    """By the order of events: steps 6 to 9 are done by all while the save of step 5 waits for the end of 9."""
    for seen in run_ranks(jobs.one_slow_rank, 2, str(tmp_path), slow, 5, "wait"):
        assert seen[:10] == [1, 2, 3, 4, 5, 6, 7, 8, [], 9]
        assert [event for event in seen if isinstance(event, tuple)] == [("saved", 5), ("saved", 10), ("saved", 14)]
    assert committed(str(tmp_path)) == [5, 10, 14]


@pytest.mark.parametrize("slow", [0, 1])
def test_what_is_skipped_for_a_slow_rank_is_skipped_by_all(slow: int, tmp_path: Path) -> None:
    results = run_ranks(jobs.one_slow_rank, 2, str(tmp_path), slow, 2, "skip")
    assert results[0] == results[1]
    told = [event[:2] for event in results[0] if isinstance(event, tuple)]
    assert told[:3] == [("not saved", 4), ("not saved", 6), ("not saved", 8)]
    assert [] in results[0]
    assert [step for what, step in told if what == "saved"] == committed(str(tmp_path))
    assert {2, 14} <= set(committed(str(tmp_path)))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["saves_skipped"] == len([what for what, _ in told if what == "not saved"])


@pytest.mark.parametrize("leaving", [0, 1])
def test_an_exception_does_not_lose_the_save_in_flight(leaving: int, tmp_path: Path) -> None:
    """Case c29: the program ended before the write. The peers meet the end of the others only after it."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(jobs.leave_while_saving, 2, str(tmp_path), "raise", leaving, True, 3)
    assert "ZeroDivisionError" in failed.value.errors[leaving]
    assert committed(str(tmp_path)) == [2]


def test_an_exception_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(jobs.leave_while_saving, 2, str(tmp_path), "raise", 1, False, 3, timeout=60)
    assert "ZeroDivisionError" in failed.value.errors[1]
    assert committed(str(tmp_path)) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_sys_exit_does_not_lose_the_save_in_flight(world_size: int, tmp_path: Path) -> None:
    run_ranks(jobs.leave_while_saving, world_size, str(tmp_path), "exit", world_size - 1, True, 3)
    assert committed(str(tmp_path)) == [2]


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_leaving_the_loop_waits_for_the_save_in_flight(world_size: int, at: int, tmp_path: Path) -> None:
    seen = run_ranks(jobs.leave_while_saving, world_size, str(tmp_path), "break", world_size - 1, True, at)
    assert seen == [[("saved", 2)]] * world_size
    assert committed(str(tmp_path)) == [2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    kept = "saved" if at == 2 else "NOT saved (call checkpointer.maybe_save)"
    assert summary["message"] == f"the program left the loop; {kept} at step {at} of 10"
    assert summary["status"] == "interrupted"
