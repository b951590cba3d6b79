"""Budgets of any size end a job some day: as many ends are read as have brought nothing (cases c01, c02)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner import paths
from elastic_runner.history import End, read_ends_since_saved, write_end
from elastic_runner.launch.agent import Agent
from elastic_runner.launch.restart import Budgets, same_start, same_step, within_budget
from elastic_runner.storage import LocalStorage
from elastic_runner.verdict import RunPlace


def end(attempt: int, saved: bool = False, step: int | None = 5, kind: str = "SIGKILL") -> End:
    path = paths.manifest(5, attempt) if saved else None
    return End(attempt=attempt, kind=kind, step=step, restored=None, saved=path)


def known_ends(directory: Path, last: End) -> list[End]:
    agent = object.__new__(Agent)
    agent._handler, agent._ends = None, []  # type: ignore[assignment]
    return agent._known_ends(RunPlace(url=str(directory), options={}, attempt=last.attempt), last)


@pytest.mark.parametrize("allowed", [64, 150])
def test_a_budget_beyond_what_is_read_at_a_start_ends_a_job(allowed: int, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for number in range(1, allowed):
        write_end(storage, end(number))
    judge = within_budget(Budgets(crash=allowed))
    assert judge(known_ends(tmp_path, end(allowed))) is None
    assert judge(known_ends(tmp_path, end(allowed + 1))) is not None


def test_no_more_is_read_than_from_the_last_checkpoint_on(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    ends = [end(number, saved=number in (3, 6)) for number in range(1, 10)]
    for each in ends:
        write_end(storage, each)
    storage.put(paths.attempt_end(5), b"{")
    storage.put(paths.attempt_end(8), b"{")
    assert [each.attempt for each in read_ends_since_saved(storage)] == [6, 7, 9]


ENDS = st.lists(
    st.builds(
        end,
        attempt=st.just(1),
        saved=st.booleans(),
        step=st.sampled_from([None, 1, 5]),
        kind=st.sampled_from(["KeyError", "SIGKILL"]),
    ),
    min_size=1,
    max_size=20,
)


@given(ENDS)
def test_policies_judge_by_these_as_by_all(ends: list[End]) -> None:
    last = max((number for number, each in enumerate(ends) if each.saved), default=0)
    for policy in (same_start(), same_step(times=3), within_budget(Budgets(crash=2, start=2))):
        assert policy(ends[last:]) == policy(ends)
