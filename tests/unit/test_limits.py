"""Learned limits: durations are made up, none is waited for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.config import TimeoutConfig
from elastic_runner.worker.deadline import PhaseWatch
from elastic_runner.worker.limits import ENOUGH, RECENT, Learned, deadlines, learners

MOST = 600.0
durations = st.floats(0.001, 500)


def taught(*series: float, factor: float = 10, floor: float = 60) -> Learned:
    learned = Learned(factor, floor)
    for seconds in series:
        learned.took(seconds)
    return learned


@given(st.lists(durations, min_size=1, max_size=60), st.floats(2, 20), st.floats(0, 1))
def test_no_alarm_within_the_factor_of_the_longest(series: list[float], factor: float, part: float) -> None:
    following = min(MOST, part * factor * max(series))
    assert following <= taught(*series, factor=factor, floor=0.001).limit(MOST)


@given(st.lists(durations, max_size=60), st.floats(0.1, 1000))
def test_never_above_the_configured_limit_nor_below_the_floor(series: list[float], floor: float) -> None:
    limit = taught(*series, floor=floor).limit(MOST)
    assert min(floor, MOST) <= limit <= MOST


def test_too_few_are_not_believed() -> None:
    assert taught(*[1.0] * (ENOUGH - 1)).limit(MOST) == MOST
    assert taught(*[1.0] * ENOUGH).limit(MOST) == 60
    assert taught(*[8.0] * ENOUGH).limit(MOST) == 80


@given(st.integers(0, RECENT - 1))
def test_a_long_one_counts_for_a_thousand_and_is_forgotten_after_two(before: int) -> None:
    learned = taught(*[1.0] * before, 30.0, *[1.0] * (RECENT - 1), floor=1)
    assert learned.limit(MOST) == 300
    for _ in range(RECENT + 1):
        learned.took(1.0)
    assert learned.limit(MOST) == 10


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_hour_gives_no_alarm(seed: int) -> None:
    """Steps around 1 s; one of a hundred takes up to 40 times as long."""
    draw, learned, now = random.Random(seed), Learned(10, 60), 0.0
    while now < 3600:
        seconds = draw.lognormvariate(0, 0.4) * (draw.uniform(5, 40) if draw.random() < 0.01 else 1)
        seconds = min(seconds, 55.0)
        assert seconds <= learned.limit(MOST)
        learned.took(seconds)
        now += seconds
    assert learned.limit(1e9) <= 550, "a hang is noticed nevertheless"


def test_only_steps_are_learned_and_it_can_be_switched_off() -> None:
    assert set(learners(TimeoutConfig())) == {"step"}
    assert learners(TimeoutConfig(learned_factor=0)) == {}
    phases = deadlines(TimeoutConfig(step=7))
    assert phases["step"] == 7 and "first_step" in phases
    assert not any(name.startswith("learned") for name in phases)


def test_after_a_hang_that_may_have_been_none_only_given_limits_count() -> None:
    learned = Learned(2, 0.1)
    for _ in range(ENOUGH):
        learned.took(0.1)
    watch = PhaseWatch({"step": 60.0}, lambda: "", learned={"step": learned})
    try:
        with watch.phase("step"):
            assert watch._stack[-1].limit == pytest.approx(0.2)
        watch.believe_no_more()
        with watch.phase("step"):
            assert watch._stack[-1].limit == 60.0
    finally:
        watch.close()
