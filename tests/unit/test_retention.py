"""The newest n stay, and the only usable one is never deleted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.checkpoint.manifest import Manifest
from elastic_runner.checkpoint.retention import superseded


def manifests(*steps: int, attempt: int = 1) -> list[Manifest]:
    return [Manifest(step=s, attempt=attempt, world_size=1, format="full", files=()) for s in steps]


@pytest.mark.parametrize(
    ("steps", "keep", "newest", "deleted"),
    [
        ([1], 1, 1, []),
        ([1, 2], 1, 2, [1]),
        ([1, 2, 3, 4], 3, 4, [1]),
        ([1, 2], 3, 2, []),
        ([9, 10, 100, 2500], 2, 2500, [9, 10]),
        ([1, 2], 0, 2, [1]),
        # later ones that the run did not continue from neither count nor go
        ([1, 2, 8, 9], 1, 2, [1]),
        ([1, 2, 8, 9], 3, 2, []),
    ],
)
def test_the_newest_stay(steps: list[int], keep: int, newest: int, deleted: list[int]) -> None:
    assert superseded(manifests(*steps), keep=keep, newest=newest) == deleted


def test_a_damaged_one_takes_no_usable_ones_place() -> None:
    bad = [m.path for m in manifests(2)]
    assert superseded(manifests(1, 2, 3), keep=2, newest=3, unusable=bad) == []
    assert superseded(manifests(1, 2, 3, 4), keep=2, newest=4, unusable=bad) == [1, 2]


def test_another_attempt_makes_a_step_usable() -> None:
    bad = [m.path for m in manifests(2)]
    found = manifests(1, 2, 3) + manifests(2, attempt=2)
    assert superseded(found, keep=2, newest=3, unusable=bad) == [1]


@given(
    steps=st.sets(st.integers(1, 30), min_size=1),
    keep=st.integers(0, 5),
    bad=st.sets(st.integers(1, 30)),
    data=st.data(),
)
def test_what_was_just_saved_and_enough_usable_ones_stay(
    steps: set[int], keep: int, bad: set[int], data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    bad -= {newest}
    gone = set(superseded(manifests(*steps), keep=keep, newest=newest, unusable=[m.path for m in manifests(*bad)]))
    usable = {step for step in steps if step <= newest and step not in bad}
    assert newest not in gone
    assert all(step < newest for step in gone)
    assert len(usable - gone) == min(len(usable), max(1, keep))
    assert sorted(usable - gone) == sorted(usable)[-max(1, keep) :]
