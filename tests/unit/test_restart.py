"""Whether workers are started again: budgets by cause, progress, and what no restart cures (cases c01, c02, c04)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.errors import ExitCode
from elastic_runner.history import HANG, End
from elastic_runner.launch.restart import (
    Budgets,
    cause_of,
    default_policies,
    first_objection,
    same_start,
    same_step,
    since_progress,
    within_budget,
)
from elastic_runner.verdict import Verdict


def end(kind: str = "SIGKILL", step: int | None = 5, saved: str | None = None, **more: Any) -> End:
    return End(attempt=1, kind=kind, step=step, restored=more.pop("restored", None), saved=saved, message=kind, **more)


def judged(*ends: End) -> Verdict | None:
    return first_objection(ends, default_policies(Budgets()))


@pytest.mark.parametrize(
    ("kind", "step", "cause"),
    [
        ("SIGKILL", 3, "crash"),
        ("ValueError", 3, "crash"),
        ("ValueError", None, "start"),
        (HANG, None, "hang"),
        ("PhaseTimeout", 3, "hang"),
        ("StorageTimeout", 3, "storage"),
        ("SaveFailed", 3, "storage"),
        ("PeerLost", 3, "peer"),
    ],
)
def test_causes(kind: str, step: int | None, cause: str) -> None:
    assert cause_of(end(kind, step)) == cause


def test_each_cause_has_a_budget_of_its_own() -> None:
    judge = within_budget(Budgets(crash=2, hang=1))
    assert judge([end(), end(HANG), end()]) is None
    assert judge([end(), end(HANG), end(), end(HANG)]) is not None
    objection = judge([end(), end(HANG), end(), end()])
    assert objection is not None and objection.code == ExitCode.FAILED and objection.final
    assert objection.message.startswith(
        "2 of 2 restarts after a crash are used, without progress (SIGKILL 3); the last"
    )


def test_a_checkpoint_gives_all_back_and_its_attempt_counts() -> None:
    judge = within_budget(Budgets(crash=1))
    saved = end(saved="step-0000000010/manifest-000001.json")
    assert since_progress([end(), saved, end()]) == [saved, end()]
    assert judge([end(), saved]) is None
    assert judge([end(), saved, end()]) is not None


def test_steps_are_progress_too_where_there_are_many() -> None:
    """With snapshots, a run comes on without a checkpoint."""
    ends = [end(step=step) for step in (5, 6, 7, 30, 31, 31, 35)]
    assert [e.step for e in since_progress(ends)] == [30, 31, 31, 35]
    assert next(e.step for e in since_progress([*ends, end(step=None), end(step=44)])) == 30
    assert [e.step for e in since_progress([*ends, end(step=None), end(step=45)])] == [45]


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 4))
def test_a_run_that_saves_now_and_then_goes_on_for_ever(saves: list[bool], allowed: int) -> None:
    """However often it is killed, as long as there are never more than the allowed deaths between two checkpoints."""
    judge = within_budget(Budgets(crash=allowed))
    ends: list[End] = []
    since = 0
    for save in saves:
        ends.append(end(saved="x" if save else None))
        since = 1 if save else since + 1
        assert (judge(ends) is not None) == (since > allowed)


def test_the_same_error_before_any_step_ends_the_job_at_the_second_time() -> None:
    twice = judged(end("ImportError", None), end("ImportError", None))
    assert twice is not None and twice.code == ExitCode.DO_NOT_RETRY and "before a first step" in twice.message
    assert judged(end("ImportError", None), end("ValueError", None)) is None
    assert judged(end("SIGKILL", None), end("SIGKILL", None)) is None, "the machine's doing, not the program's"
    trained = end("SIGKILL", 9, saved="x")
    assert judged(trained, end("ImportError", None), end("ImportError", None)) is None
    assert same_start()([end("ImportError", None, restored="x")] * 2) is None


def test_a_step_that_fails_in_the_same_way_ends_the_job_and_is_named() -> None:
    known = [end("SIGKILL", 9, saved="x"), *[end("ValueError", 41, epoch=0, first=640, last=704)] * 3]
    known.append(known[-1])
    assert same_step()(known) is None
    objection = same_step()([*known, known[-1]])
    assert objection is not None and objection.code == ExitCode.DO_NOT_RETRY
    assert objection.message.startswith("step 41 (epoch 0, positions 640 to 703) has failed 5 times")
    assert same_step()([*known, end("KeyError", 41)]) is None
    assert same_step()([*known, end("ValueError", 41, saved="newer")]) is None


def test_the_same_signal_in_the_same_step_is_no_reason() -> None:
    assert same_step()([end("SIGKILL", 41)] * 9) is None
    assert same_step()([end("SIGSEGV", 41)] * 5) is not None
