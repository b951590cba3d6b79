"""What any policy keeps stays, and some checkpoints stay whatever the policies say."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.checkpoint.manifest import Checkpoint, Manifest
from elastic_runner.checkpoint.marks import LEASE_SECONDS, Marks
from elastic_runner.checkpoint.retention import (
    Best,
    EveryHours,
    EverySteps,
    Newest,
    Policy,
    Retention,
    decide,
    retention_of,
)
from elastic_runner.checkpoint.trust import Health, health
from elastic_runner.config import CheckpointConfig
from tests.support.committed import checkpoint, manifest

NOW = 1e9
SUSPECT = Marks(suspicions=("step/suspect",))


def kept(
    checkpoints: Iterable[Checkpoint],
    *policies: Policy,
    newest: Manifest | None = None,
    unhealthy: int = 2,
    unusable: Collection[str] = (),
) -> list[tuple[int, int]]:
    """Step and attempt of those that stay, oldest first."""
    found = sorted(checkpoints, key=lambda c: (c.manifest.step, c.manifest.attempt), reverse=True)
    decision = decide(
        found,
        Retention(policies=policies, unhealthy=unhealthy),
        newest=newest or found[0].manifest,
        unusable=unusable,
        now=NOW,
    )
    places = {c.manifest.path: (c.manifest.step, c.manifest.attempt) for c in found}
    assert {*decision.keep, *decision.delete} == set(places) and not {*decision.keep} & {*decision.delete}
    assert all(decision.keep.values()) and all(decision.delete.values()), "each has a reason"
    return sorted(places[path] for path in decision.keep)


def steps_kept(steps: Iterable[int], *policies: Policy, **how: Any) -> list[int]:
    return [step for step, _ in kept([checkpoint(s) for s in steps], *policies, **how)]


@pytest.mark.parametrize(
    ("steps", "keep", "newest", "left"),
    [
        ([1], 1, 1, [1]),
        ([1, 2], 1, 2, [2]),
        ([1, 2, 3, 4], 3, 4, [2, 3, 4]),
        ([1, 2], 3, 2, [1, 2]),
        ([9, 10, 100, 2500], 2, 2500, [100, 2500]),
        ([1, 2], 0, 2, [2]),
        # later ones that the run did not continue from neither count nor go
        ([1, 2, 8, 9], 1, 2, [2, 8, 9]),
        ([1, 2, 8, 9], 3, 2, [1, 2, 8, 9]),
    ],
)
def test_the_newest_stay(steps: list[int], keep: int, newest: int, left: list[int]) -> None:
    assert steps_kept(steps, Newest(keep), newest=manifest(newest), unhealthy=keep) == left


def test_every_so_many_steps_also_where_saves_fall_elsewhere() -> None:
    assert steps_kept(range(10, 101, 10), EverySteps(50)) == [50, 100]
    assert steps_kept(range(7, 106, 7), EverySteps(50)) == [56, 105]
    # What is kept does not depend on what was deleted before.
    left: list[int] = []
    for step in range(7, 500, 7):
        left = steps_kept([*left, step], EverySteps(50), Newest(2))
    assert left == [56, 105, 154, 203, 252, 301, 350, 406, 455, 490, 497]


def test_every_so_many_hours_by_the_writers_clocks() -> None:
    def at(hours: dict[int, float]) -> list[int]:
        made = [checkpoint(step, created=NOW + 3600 * hour) for step, hour in hours.items()]
        return [step for step, _ in kept(made, EveryHours(2))]

    assert at({1: 0, 2: 1, 3: 2.5, 4: 3, 5: 4.4, 6: 4.5, 7: 5}) == [1, 3, 6, 7]
    # The clock is set back by days: from then on it counts anew.
    assert at({1: 0, 2: 3, 3: -90, 4: -89, 5: -88, 6: -87}) == [1, 2, 3, 5, 6]


def test_best_by_a_metric() -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: float("nan"), 5: 0.5}
    made = [checkpoint(step, metrics={"score": score}) for step, score in scores.items()] + [checkpoint(6)]
    assert kept(made, Best(1, "score", "max")) == [(2, 1), (6, 1)]
    assert kept(made, Best(2, "score", "max")) == [(2, 1), (5, 1), (6, 1)], "of equal ones the newer"
    assert kept(made, Best(1, "score", "min")) == [(3, 1), (6, 1)]
    assert kept(made, Best(3, "another", "max")) == [(6, 1)]


def test_c69_the_best_is_kept_across_a_restart() -> None:
    """Case c69, scores .5 .9 | restart | .6 .7: only the manifests are carried over, and exactly k remain besides."""
    left: list[Checkpoint] = []
    retention = retention_of(CheckpointConfig(keep=1, keep_best=1, best_metric="score", best_mode="max"))
    for step, attempt, score in ((1, 1, 0.5), (2, 1, 0.9), (3, 2, 0.6), (4, 2, 0.7)):
        made = checkpoint(step, attempt, metrics={"score": score})
        left = [made, *left]
        decision = decide(left, retention, newest=made.manifest, now=NOW)
        left = [c for c in left if c.manifest.path in decision.keep]
    assert [c.manifest.metrics["score"] for c in left] == [0.7, 0.9]
    assert "number 1 by score (0.9)" in decision.keep[left[1].manifest.path]


@pytest.mark.parametrize("last", [40, 200])
def test_c72_non_finite_ones_never_evict_a_healthy_one(last: int) -> None:
    """keep 2, NaN at 25, saves to 40: both healthy ones stay, and of the others the newest two, to be looked at."""
    left: list[Checkpoint] = []
    retention = retention_of(CheckpointConfig(keep=2))
    for step in range(5, last + 1, 5):
        made = checkpoint(step, non_finite=("w",) if step >= 25 else ())
        left = [made, *left]
        decision = decide(left, retention, newest=made.manifest, now=NOW)
        left = [c for c in left if c.manifest.path in decision.keep]
    assert [c.manifest.step for c in left] == [last, last - 5, 20, 15]
    assert "NaN or infinity in w" in decision.keep[left[0].manifest.path]


def test_a_run_that_went_back_leaves_the_non_finite_ones_behind() -> None:
    made = [checkpoint(s) for s in (15, 20)] + [checkpoint(s, non_finite=("w",)) for s in (25, 30)]
    again = [checkpoint(s, 2) for s in (25, 30, 35)]
    assert kept(made + again[:1], Newest(2), newest=again[0].manifest) == [(20, 1), (25, 1), (25, 2), (30, 1)]
    assert kept(made + again, Newest(2)) == [(30, 2), (35, 2)]


@pytest.mark.parametrize("how", ["unusable", "suspect"])
def test_a_distrusted_one_takes_no_healthy_ones_place(how: str) -> None:
    made = {s: checkpoint(s, marks=SUSPECT if s == 2 and how == "suspect" else None) for s in (1, 2, 3, 4)}
    unusable = [made[2].manifest.path] if how == "unusable" else []
    assert kept([made[s] for s in (1, 2, 3)], Newest(2), unusable=unusable) == [(1, 1), (2, 1), (3, 1)]
    assert kept(made.values(), Newest(2), unusable=unusable) == [(3, 1), (4, 1)]


def test_another_attempt_makes_a_step_usable() -> None:
    found = [checkpoint(s) for s in (1, 2, 3)] + [checkpoint(2, 2)]
    assert kept(found, Newest(2), unusable=[manifest(2).path]) == [(2, 2), (3, 1)]


def test_a_mark_is_on_one_attempt_s_checkpoint_only() -> None:
    made = [checkpoint(1, marks=Marks(pinned=True)), checkpoint(1, 2), *(checkpoint(s, 2) for s in (2, 3))]
    assert kept(made, Newest(1), unhealthy=1) == [(1, 1), (3, 2)]
    assert kept(made[:2], Newest(1), unhealthy=1) == [(1, 1), (1, 2)]
    assert kept([checkpoint(1), made[1]], Newest(1), unhealthy=1) == [(1, 2)]
    suspect = [checkpoint(2, 2, marks=SUSPECT), checkpoint(2), checkpoint(3)]
    assert kept(suspect, Newest(2)) == [(2, 1), (2, 2), (3, 1)]


def test_what_is_read_stays_until_its_lease_is_old() -> None:
    def read(since: float) -> list[tuple[int, int]]:
        return kept([checkpoint(1, marks=Marks(readers=(since,))), checkpoint(2)], Newest(1), unhealthy=1)

    assert read(NOW - 60) == read(NOW + 60) == [(1, 1), (2, 1)]
    assert read(NOW - LEASE_SECONDS - 1) == [(2, 1)]


def test_every_field_of_the_configuration_has_its_policy() -> None:
    config = CheckpointConfig(keep=4, keep_every=100, keep_hours=1.5, keep_best=2, best_metric="f1", best_mode="max")
    assert retention_of(config) == Retention(
        policies=(Newest(4), EverySteps(100), EveryHours(1.5), Best(2, "f1", "max")), unhealthy=4
    )
    assert retention_of(CheckpointConfig()).policies == (Newest(3),)


policies = st.lists(
    st.one_of(
        st.builds(Newest, st.integers(0, 4)),
        st.builds(EverySteps, st.integers(1, 9)),
        st.builds(EveryHours, st.floats(0.1, 9)),
        st.builds(Best, st.integers(0, 3), st.sampled_from(["a", "b"]), st.sampled_from(["min", "max"])),
    ),
    max_size=3,
)
checkpoints = st.builds(
    checkpoint,
    st.integers(1, 20),
    st.integers(1, 3),
    marks=st.builds(
        Marks,
        pinned=st.booleans(),
        suspicions=st.sampled_from([(), (), ("step/suspect",)]),
        readers=st.sampled_from([(), (), (NOW - 60,), (NOW - 10 * LEASE_SECONDS,)]),
    ),
    metrics=st.dictionaries(st.sampled_from(["a", "b"]), st.floats()),
    created=st.floats(NOW - 1e5, NOW),
    non_finite=st.sampled_from([(), (), ("w",)]),
)


@settings(deadline=None)
@given(
    found=st.lists(checkpoints, min_size=1, unique_by=lambda c: c.manifest.path),
    policies=policies,
    unhealthy=st.integers(0, 4),
    data=st.data(),
)
def test_whatever_the_policies_and_the_history(
    found: list[Checkpoint], policies: list[Policy], unhealthy: int, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(found)).manifest
    unusable = {c.manifest.path for c in found if data.draw(st.booleans())} - {newest.path}
    left = set(kept(found, *policies, newest=newest, unhealthy=unhealthy, unusable=unusable))
    places = {(c.manifest.step, c.manifest.attempt): c for c in found}
    here = (newest.step, newest.attempt)
    healthy = [p for p, c in places.items() if p <= here and health(c, unusable) == Health.HEALTHY]
    assert here in left
    assert left >= {place for place in places if place > here}, "nothing in the future is touched"
    assert left >= {p for p, c in places.items() if c.marks.pinned or c.marks.being_read(NOW)}
    if healthy:
        assert max(healthy) in left
    for policy in policies:
        if isinstance(policy, Newest):
            assert {step for step, _ in left} >= set(sorted({step for step, _ in healthy})[-max(1, policy.count) :])


@settings(deadline=None)
@given(data=st.data(), policies=policies)
def test_deleting_is_final_and_needs_no_memory(policies: list[Policy], data: st.DataObject) -> None:
    """Over a whole run, deciding again changes nothing, and each state's newest healthy one is there."""
    left: list[Checkpoint] = []
    for step in range(1, 15):
        made = checkpoint(
            step,
            metrics={"a": data.draw(st.floats(0, 1))},
            non_finite=("w",) if data.draw(st.integers(0, 3)) == 0 else (),
            created=NOW + 3600 * step,
        )
        before, left = left, [made, *left]
        for _ in range(2):
            decision = decide(left, Retention(policies=tuple(policies), unhealthy=2), newest=made.manifest, now=NOW)
            again, left = left, [c for c in left if c.manifest.path in decision.keep]
        assert again == left
        for healthy in [c for c in [made, *before] if not c.manifest.non_finite][:1]:
            assert healthy in left
