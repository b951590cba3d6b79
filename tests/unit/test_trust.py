"""Which checkpoint is tried first, and which one is to blame for a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner import paths
from elastic_runner.checkpoint.marks import Marks
from elastic_runner.checkpoint.trust import Health, blamed, candidates, memory_distrusted
from elastic_runner.errors import NonFiniteError
from elastic_runner.history import End
from tests.support.committed import checkpoint

SUSPECT = Marks(suspicions=("step-0000000050/suspect-000001-000002.json",))


def test_healthy_ones_come_first_then_suspects_then_non_finite_ones() -> None:
    found = [
        checkpoint(70, non_finite=("model.w", "optimizer.w.exp_avg", "a", "b")),
        checkpoint(60, 2, marks=SUSPECT),
        checkpoint(60, 1),
        checkpoint(50, marks=SUSPECT),
        checkpoint(40, non_finite=("w",), marks=SUSPECT),
        checkpoint(30),
        checkpoint(20),
    ]
    order = candidates(found, {found[-1].manifest.path: "led 2 times to ValueError"})
    assert [(c.manifest.step, c.manifest.attempt) for c in order] == [
        (60, 1), (30, 1), (60, 2), (50, 1), (20, 1), (70, 1), (40, 1),
    ]  # fmt: skip
    assert [c.health for c in order] == [Health.HEALTHY] * 2 + [Health.SUSPECT] * 3 + [Health.NON_FINITE] * 2
    doubts = {c.manifest.step: c.doubt for c in order}
    assert doubts[30] == ""
    assert doubts[50] == "suspect: see step-0000000050/suspect-000001-000002.json"
    assert doubts[20] == "suspect: led 2 times to ValueError"
    assert doubts[70] == "NaN or infinity in model.w, optimizer.w.exp_avg, a and 1 more"


def at(step: int, attempt: int = 1) -> str:
    return paths.manifest(step, attempt)


def end(attempt: int, restored: str | None, step: int | None = 23, kind: str = "ValueError", **saved: str) -> End:
    return End(attempt=attempt, kind=kind, step=step, restored=restored, **saved)


def test_c04_the_same_failure_again_and_again_is_the_checkpoint_s() -> None:
    ends = [end(2, at(20)), end(3, at(20))]
    assert blamed(ends[:1], 2) == {}
    assert blamed(ends, 2) == {at(20): "led 2 times to ValueError in step 23, and to no newer checkpoint"}
    assert blamed(ends, 3) == {}
    assert blamed(ends, 0) == {}


def test_the_attempt_that_wrote_it_does_not_count_but_is_no_excuse() -> None:
    wrote = end(1, None, saved=at(20))
    assert blamed([wrote, end(2, at(20))], 2) == {}
    assert blamed([wrote, end(2, at(20)), end(3, at(20))], 2).keys() == {at(20)}
    # Step 20 was still being written when the failure was put on record.
    assert blamed([end(1, None, saved=at(10)), end(2, at(20)), end(3, at(20))], 2).keys() == {at(20)}


@pytest.mark.parametrize(
    "other",
    [end(4, at(10)), end(4, at(10), saved=at(20, 4)), end(4, None)],
    ids=["older", "older, and saved anew", "fresh"],
)
def test_c04_the_same_failure_without_it_clears_it(other: End) -> None:
    """So that never more than one is demoted for one failure."""
    assert blamed([end(2, at(20)), end(3, at(20)), other, end(5, at(20, 4)), end(6, at(20, 4))], 2) == {}


def test_c04_a_deterministic_failure_demotes_one_checkpoint_only() -> None:
    """The whole story of a run that fails in step 23 from whatever it starts: the cycles are bounded."""
    ends: list[End] = []
    stored, demoted = {at(10): 10}, set()
    for attempt in range(1, 40):
        demoted |= blamed(ends, 2).keys()
        restored = max((path for path in stored if path not in demoted), key=lambda path: (stored[path], path))
        saved = {"saved": at(20, attempt)} if stored[restored] < 20 else {}
        stored.update({path: 20 for path in saved.values()})
        ends.append(end(attempt, restored, **saved))
    assert demoted == {at(20, 1)}


def test_a_checkpoint_from_which_a_newer_one_came_is_not_to_blame() -> None:
    assert blamed([end(2, at(20)), end(3, at(20)), end(4, at(20), 33, saved=at(30, 4))], 2) == {}


def test_other_steps_and_other_kinds_are_other_failures() -> None:
    assert blamed([end(2, at(20), 23), end(3, at(20), 24), end(4, at(20), 23, "KeyError")], 2) == {}


@pytest.mark.parametrize(
    "kind", ["StorageTimeout", "SaveFailed", "Fenced", "ConfigError", "KeyboardInterrupt", "OutOfMemoryError"]
)
def test_failures_that_no_other_state_would_keep_away_never_count(kind: str) -> None:
    assert blamed([end(n, at(20), kind=kind) for n in (2, 3, 4)], 2) == {}


def test_nan_counts_and_what_comes_before_the_first_step_does_not() -> None:
    assert blamed([end(n, at(20), kind=NonFiniteError.__name__) for n in (2, 3)], 2).keys() == {at(20)}
    assert blamed([end(n, at(20), None) for n in (2, 3)], 2) == {}
    assert blamed([end(n, None) for n in (2, 3)], 2) == {}


@given(
    ends=st.lists(
        st.builds(
            End,
            attempt=st.integers(1, 9),
            kind=st.sampled_from(["A", "B"]),
            step=st.sampled_from([None, 5, 6]),
            restored=st.sampled_from([None, at(1), at(2)]),
            saved=st.sampled_from([None, None, at(3)]),
        ),
        max_size=8,
    ),
    times=st.integers(1, 3),
)
def test_only_what_was_loaded_often_enough_is_blamed(ends: list[End], times: int) -> None:
    for path, reason in blamed(ends, times).items():
        assert sum(e.restored == path and e.saved is None and e.step is not None for e in ends) >= times
        assert "led" in reason


def same(attempt: int, step: int | None = 30, kind: str = "ValueError", **more: bool) -> End:
    return End(attempt=attempt, kind=kind, step=step, restored="step-0000000020/manifest-000001.json", **more)


@pytest.mark.parametrize(
    ("ends", "times", "newest"),
    [
        ([same(2), same(3)], 2, 3),
        ([same(2)], 2, 0),
        ([same(2), same(3, step=31)], 2, 0),
        ([same(2), same(3, kind="TypeError")], 2, 0),
        ([same(2), same(3, kind="PeerLost"), same(4)], 2, 4),
        ([same(2), same(3), same(4, step=50)], 2, 0),
        ([same(2), same(3), same(4)], 3, 4),
        ([same(2), same(3)], 0, 0),
        ([same(2, None), same(3, None)], 2, 0),
        ([], 2, 0),
    ],
)
def test_memory_is_distrusted_after_the_same_failure_again(ends: list[End], times: int, newest: int) -> None:
    assert memory_distrusted(ends, times) == newest


def test_what_went_on_from_memory_does_not_blame_the_checkpoint_behind_it() -> None:
    """It may be memory that is wrong; only what was restored from storage counts."""
    assert blamed([same(2), same(3, in_memory=True)], 2) == {}
    assert list(blamed([same(2), same(3, in_memory=True), same(4)], 2)) == ["step-0000000020/manifest-000001.json"]


def differing(attempt: int, step: int, agreed: int | None, kind: str = "ReplicasDiffer") -> End:
    return End(attempt=attempt, kind=kind, step=step, restored=at(20), agreed=agreed)


def test_what_was_saved_after_replicas_last_agreed_is_distrusted_at_once() -> None:
    """Checkpoints of that attempt, and all that was in memory by then."""
    ends = [differing(3, 33, 30), differing(4, 33, 30, kind="ValueError")]
    assert blamed(ends, 2).keys() == blamed(ends, 0).keys() == {at(31, 3), at(32, 3)}
    assert (memory_distrusted(ends, 2), memory_distrusted(ends[1:], 2)) == (3, 0)
    assert blamed([differing(3, 31, None)], 2) == {}, "it began so, and has saved nothing"
