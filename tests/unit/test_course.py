"""What is said of an attempt, from how it has come along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.data.source import Span
from elastic_runner.worker.course import Course


def course(step: int, begun_at: int = 0, **known: Any) -> Course:
    state: Any = SimpleNamespace(step=step, begun_at=begun_at, agreed_at=None)
    return Course(attempt=3, state=state, **known)


def test_before_the_loop_began() -> None:
    fresh = Course()
    assert (fresh.position(), fresh.done, fresh.step, fresh.kept) == ((0, -1), None, 0, True)
    end = fresh.end(kind="ValueError", rank=1, message="bad")
    assert (end.step, end.restored, end.saved, end.samples) == (None, None, None, "")


def test_the_end_names_the_step_under_way_and_its_samples() -> None:
    span = Span(epoch=1, first=40, last=48)
    failed = course(6, begun_at=2, span=span, number=7, restored="manifest of 2", in_memory=True, saved_step=4)
    end = failed.end(kind="ValueError", rank=1, message="bad")
    assert failed.position() == (3, 6)
    assert (end.attempt, end.kind, end.rank, end.message) == (3, "ValueError", 1, "bad")
    assert (end.step, end.samples) == (7, "epoch 1, positions 40 to 47")
    assert (end.restored, end.in_memory, end.saved) == ("manifest of 2", True, paths.manifest(4, 3))


def test_a_failure_between_two_steps_is_not_blamed_on_the_samples_of_the_one_before() -> None:
    end = course(7, span=Span(epoch=1, first=40, last=48), number=7).end(kind="ValueError", rank=1, message="bad")
    assert (end.step, end.samples) == (8, "")


def test_the_launcher_hears_what_the_attempt_started_from_and_has_saved() -> None:
    place = course(6, restored="manifest of 2", saved_step=4).place("s3://run", {"key": "value"})
    assert (place.url, place.options, place.attempt) == ("s3://run", {"key": "value"}, 3)
    assert (place.restored, place.saved) == ("manifest of 2", paths.manifest(4, 3))


@pytest.mark.parametrize(
    ("step", "begun_at", "saved_step", "in_memory", "kept"),
    [
        (5, 5, None, False, True),  # as it was found
        (5, 5, None, True, False),  # found in memory, which goes with the attempt
        (6, 5, None, False, False),
        (6, 5, 6, False, True),
        (7, 5, 6, False, False),
        (6, 5, 6, True, True),
    ],
)
def test_what_is_lost_by_leaving(step: int, begun_at: int, saved_step: int | None, in_memory: bool, kept: bool) -> None:
    assert course(step, begun_at, saved_step=saved_step, in_memory=in_memory).kept is kept


def test_what_began_in_memory_is_elsewhere_once_it_is_saved() -> None:
    assert course(5, in_memory=True).in_memory_only
    assert not course(5, in_memory=True, saved_step=5).in_memory_only
    assert not course(5).in_memory_only


@pytest.mark.parametrize(("saved_step", "counts"), [(4, True), (6, False)])
def test_a_checkpoint_after_the_last_agreement_of_replicas_is_no_progress(saved_step: int, counts: bool) -> None:
    hit = course(8, saved_step=saved_step)
    assert hit.state is not None
    hit.state.agreed_at = 5
    end = hit.end(kind="ReplicasDiffer", rank=0, message="")
    assert (end.agreed, end.saved) == (5, paths.manifest(saved_step, 3) if counts else None)
    assert hit.end(kind="ValueError", rank=0, message="").saved == paths.manifest(saved_step, 3)
