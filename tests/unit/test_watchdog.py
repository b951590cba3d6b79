"""Verdicts of the watchdog, by a made-up clock and made-up records."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner import heartbeat
from elastic_runner.heartbeat import MOVING, SIZE, Beat, Heart, Lane, Moved
from elastic_runner.launch.watchdog import (
    LATE,
    LOOK_EVERY,
    STOPPED_PATIENCE,
    Gap,
    Hang,
    Sight,
    Watchdog,
    awake,
    judge,
)


def beat(rank: int, *, since: float, limit: float = 60, step: int = 41, phase: str = "step", progress: int = 0) -> Beat:
    return Beat(
        number=9, pid=100 + rank, rank=rank, attempt=2, step=step, progress=progress, since=since, limit=limit,
        learned=False, phase=phase,
    )  # fmt: skip


def sight(rank: int, training: Beat | None, *, saving: Beat | None = None, stopped: float | None = None) -> Sight:
    return Sight(local_rank=rank, pid=100 + rank, training=training, saving=saving, stopped=stopped)


def test_a_limit_that_was_learned_is_told_apart() -> None:
    known = dict(number=1, pid=1, rank=0, attempt=1, step=5, progress=0, since=0.0, limit=2.0, phase="step")
    for learned in (True, False):
        hang = judge([Sight(local_rank=0, pid=1, training=Beat(**known, learned=learned))], 3.0)
        assert hang is not None and hang.learned == learned


def test_within_their_limits_nobody_hangs() -> None:
    sights = [sight(0, beat(0, since=0)), sight(1, beat(1, since=1), saving=beat(1, since=0, limit=100))]
    assert judge(sights, 60) is None


def test_a_stopped_one_is_named_and_who_waits_for_it() -> None:
    sights = [sight(0, beat(0, since=10)), sight(1, beat(1, since=10), stopped=11)]
    assert judge(sights, 11 + STOPPED_PATIENCE - 0.1) is None
    hang = judge(sights, 12.1)
    assert hang is not None
    assert (hang.local_rank, hang.rank, hang.pid, hang.attempt, hang.phase, hang.step) == (1, 1, 101, 2, "step", 41)
    assert hang.seconds == pytest.approx(1.1)
    assert hang.reason == (
        "rank 1 is stopped by a signal (state T) for 1.1 s in phase step after step 41; rank 0 has waited for 2.1 s"
    )


def test_past_its_limit_in_either_lane() -> None:
    hang = judge([sight(0, beat(0, since=0, limit=5))], 5.5)
    assert hang is not None and (hang.rank, hang.phase, hang.seconds) == (0, "step", 5.5)
    assert "5 s are allowed (timeouts.step)" in hang.reason
    idle = beat(0, since=0, limit=0, phase="")
    hang = judge([sight(0, idle, saving=beat(0, since=2, limit=30, phase="save"))], 33)
    assert hang is not None and (hang.rank, hang.phase, hang.seconds) == (0, "save", 31)
    assert hang.reason == (
        "rank 0: the save beside training has gone on for 31.0 s, no byte has moved for 31.0 s, "
        "30 s are allowed (timeouts.save)"
    )


def test_a_learned_limit_says_what_to_change() -> None:
    hang = judge([sight(0, replace(beat(0, since=0, limit=5), learned=True))], 6)
    assert hang is not None and "timeouts.learned_factor" in hang.reason


def test_outside_of_phases_there_is_no_limit() -> None:
    assert judge([sight(0, beat(0, since=0, limit=0, phase=""))], 1e9) is None


def test_a_worker_that_never_wrote_is_left_to_others_but_named_when_they_wait_for_it() -> None:
    assert judge([sight(0, None)], 1e9) is None
    hang = judge([sight(0, beat(0, since=0, limit=180, phase="setup", step=-1)), sight(1, None)], 181)
    assert hang is not None and (hang.local_rank, hang.rank) == (1, None)
    assert "local rank 1 is behind: it has given no sign of life; rank 0 has been in phase setup" in hang.reason


@pytest.mark.parametrize(
    "behind",
    [
        beat(1, since=99, step=40),  # the lowest step, though it entered last
        beat(1, since=99, progress=0),  # as far as its peers but less far within the step
        beat(1, since=0, progress=1),  # nothing but time tells them apart
        beat(1, since=0, limit=0, phase="", step=40),  # left the loop
    ],
)
def test_the_laggard_is_named_although_another_is_past_its_limit(behind: Beat) -> None:
    late = beat(0, since=10, progress=1)
    sights = [sight(0, late), sight(1, behind), sight(2, replace(late, rank=2))]
    hang = judge(sights, 100)
    assert hang is not None and hang.rank == 1


def test_a_stopped_one_goes_before_a_late_one() -> None:
    hang = judge([sight(0, beat(0, since=0, step=3)), sight(1, beat(1, since=0), stopped=99.9)], 100)
    assert hang is not None and hang.rank == 1


def test_several_that_wait_are_counted() -> None:
    sights = [sight(rank, beat(rank, since=10 + rank, progress=1)) for rank in range(3)]
    hang = judge([*sights, sight(3, beat(3, since=20, progress=0))], 90)
    assert hang is not None and hang.rank == 3
    assert hang.reason.endswith("3 others have waited for 80.0 s")


def test_a_late_save_names_its_phase_and_rank_and_those_that_wait_for_it() -> None:
    """Case c17: rank 0 writes; the others are further on, at the agreement that follows."""
    writing = beat(0, since=10, limit=1800, phase="save", progress=0)
    hang = judge([sight(0, writing), sight(1, beat(1, since=12, limit=1800, phase="save", progress=1))], 1811)
    assert hang is not None and (hang.rank, hang.phase) == (0, "save")
    assert hang.reason == (
        "rank 0 has been in phase save after step 41 for 1801.0 s, no byte has moved for 1801.0 s, "
        "1800 s are allowed (timeouts.save); rank 1 has waited for 1799.0 s"
    )


@pytest.mark.parametrize("phase", sorted(MOVING))
def test_while_bytes_move_a_save_and_a_load_may_take_their_time(phase: str) -> None:
    """Case c17. Who stands still is named, although it came later than those that go on or wait."""
    moves, stands = beat(0, since=0, limit=1800, phase=phase), beat(1, since=5, limit=1800, phase=phase)

    def verdict(now: float) -> Hang | None:
        return judge([replace(sight(0, moves), moved=7000.0), replace(sight(1, stands), moved=5400.0)], now)

    assert verdict(7200) is None
    hang = verdict(7201)
    assert hang is not None and (hang.rank, hang.phase) == (1, phase)
    assert f"in phase {phase} after step 41 for 7196.0 s, no byte has moved for 1801.0 s" in hang.reason


def test_a_save_beside_training_is_judged_by_its_bytes_and_a_step_is_not() -> None:
    """Case c17."""
    saving = beat(0, since=0, limit=1800, phase="save")

    def verdict(now: float, *, since: float) -> Hang | None:
        return judge([replace(sight(0, beat(0, since=since, limit=60), saving=saving), moved=7000.0)], now)

    assert verdict(8800, since=8790) is None
    late = verdict(8801, since=8790)
    assert late is not None and late.phase == "save"
    slow = verdict(7001, since=6940)
    assert slow is not None and slow.phase == "step" and "byte" not in slow.reason


def test_at_the_same_point_it_is_not_said_who_waits() -> None:
    hang = judge([sight(0, beat(0, since=10)), sight(1, beat(1, since=11))], 90)
    assert hang is not None and "at the same point for 79.0 s: see the stacks" in hang.reason


times = st.floats(0, 1000)


@given(times, times, st.lists(st.tuples(times, times), max_size=4))
def test_awake_is_what_lies_outside_of_all_gaps(a: float, b: float, edges: list[tuple[float, float]]) -> None:
    since, now = sorted((a, b))
    cuts = sorted(edge for pair in edges for edge in pair)
    gaps = [Gap(begin=begin, end=end) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    seconds = awake(since, now, gaps)
    assert -1e-6 <= seconds <= now - since
    whole = sum(gap.end - gap.begin for gap in gaps)
    assert seconds >= now - since - whole - 1e-6
    assert awake(since, now, [Gap(begin=0, end=1000)]) == pytest.approx(0, abs=1e-9)


class Node:
    """A watchdog over pages of this process; the kernel's word is made up."""

    def __init__(self, workers: int) -> None:
        self.states: dict[int, str] = {}
        handles = []
        for _ in range(workers):
            handles.append(os.memfd_create("test"))
            os.ftruncate(handles[-1], SIZE)
        self.pages = [mmap.mmap(handle, SIZE) for handle in handles]
        self.dog = Watchdog(handles, state=lambda pid: self.states.get(pid, "S"))
        for handle in handles:
            os.close(handle)

    def heart(self, rank: int, pid: int, lane: Lane = Lane.TRAINING, step: int = 41) -> Heart:
        heart = Heart(self.pages[rank], lane, rank=rank, position=lambda: (1, step))
        heart._pid = pid
        return heart


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(2)
    yield node
    node.dog.close()
    for page in node.pages:
        page.close()


def test_a_stop_is_noticed_within_two_seconds(node: Node) -> None:
    node.dog.begin({0: 100, 1: 101})
    for rank in range(2):
        node.heart(rank, 100 + rank).beat("step", since=0.0, limit=60)
    now, hang = 0.0, node.dog.look(0.0)
    stopped_at = 0.01  # just after a look: the worst case
    while hang is None:
        wait = node.dog.wait_s(now)
        assert 0 < wait <= LOOK_EVERY
        now += wait
        node.states[101] = "T" if now >= stopped_at else "S"
        hang = node.dog.look(now)
    assert hang.rank == 1
    assert now - stopped_at <= 2


def test_the_next_look_comes_when_something_may_be_over(node: Node) -> None:
    node.dog.begin({0: 100, 1: 101})
    node.heart(0, 100).beat("step", since=0.0, limit=60)
    node.dog.look(59.9)
    assert node.dog.wait_s(59.9) == pytest.approx(0.1)
    node.heart(0, 100).beat("step", since=59.9, limit=60)
    node.heart(1, 101, Lane.SAVING).beat("save", since=0.0, limit=60.2)
    node.dog.look(59.95)
    assert node.dog.wait_s(59.95) == pytest.approx(0.25)
    node.heart(1, 101, Lane.SAVING).beat("", since=60.0, limit=0)
    node.dog.look(60.0)
    assert node.dog.wait_s(60.0) == LOOK_EVERY
    node.states[100] = "T"
    node.dog.look(60.3)
    node.dog.look(61.2)
    assert node.dog.wait_s(61.2) == pytest.approx(0.1)


def test_it_sees_bytes_move_from_outside(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case c17."""
    node.dog.begin({0: 100, 1: 101})
    for rank, now in enumerate((60.0, 50.0)):
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda now=now: now))
        node.heart(rank, 100 + rank).beat("load", since=float(rank), limit=60)
        Moved(node.pages[rank])()
    assert node.dog.look(109.8) is None
    assert node.dog.wait_s(109.8) == pytest.approx(0.2)
    hang = node.dog.look(110.1)
    assert hang is not None and (hang.rank, hang.phase) == (1, "load")


def test_a_debugger_and_a_short_stop_are_no_hang(node: Node) -> None:
    node.dog.begin({0: 100})
    for tenth in range(100):
        node.states[100] = "t" if tenth < 50 else "T" if tenth % 8 else "S"
        node.dog.wait_s(tenth / 10)
        assert node.dog.look(tenth / 10) is None


def test_a_job_that_was_suspended_as_a_whole_goes_on(node: Node) -> None:
    node.dog.begin({0: 100})
    node.heart(0, 100).beat("step", since=0.0, limit=60)
    assert node.dog.look(50.0) is None
    node.states[100] = "T"
    assert node.dog.look(50 + node.dog.wait_s(50.0)) is None
    resumed = 50.5 + node.dog.wait_s(50.5) + 3600
    assert node.dog.look(resumed) is None, "stopped as long as this process was"
    node.states[100] = "S"
    assert node.dog.look(resumed + node.dog.wait_s(resumed)) is None
    now = resumed + 0.5
    while now < resumed + 8.5:
        now += node.dog.wait_s(now)
        assert node.dog.look(now) is None, "what is left of its 60 s"
    while now < resumed + 12:
        now += node.dog.wait_s(now)
        if node.dog.look(now) is not None:
            return
    raise AssertionError("its clock goes on where it stood")


def test_a_late_look_counts_only_beyond_the_threshold(node: Node) -> None:
    node.dog.begin({0: 100})
    node.heart(0, 100).beat("step", since=0.0, limit=1)
    node.dog.look(0.0)
    node.dog.wait_s(0.0)
    assert node.dog.look(LOOK_EVERY + LATE - 0.1) is not None


def test_records_of_earlier_workers_are_forgotten(node: Node) -> None:
    node.heart(0, 55).beat("step", since=0.0, limit=1)
    node.heart(1, 101).beat("setup", since=90.0, limit=180)
    node.dog.begin({0: 100, 1: 101})
    assert node.dog.look(100.0) is None
    assert node.dog.describe()[0] == "local rank 0, pid 100; no sign of life yet"
    assert node.dog.describe()[1].endswith("in phase setup after step 41, 10.0 s of at most 180")


def test_a_worker_that_has_ended_is_not_blamed(node: Node) -> None:
    node.dog.begin({0: 100, 1: 101})
    node.heart(1, 101).beat("", since=0.0, limit=0)
    node.heart(0, 100).beat("teardown", since=1.0, limit=60)
    node.states[101] = "Z"
    hang = node.dog.look(62.0)
    assert hang is not None and hang.rank == 0


def test_behind_a_wrapper_the_process_that_writes_counts_too(node: Node) -> None:
    node.dog.begin({0: 100})
    node.heart(0, 777).beat("step", since=0.0, limit=60)
    node.states[777] = "T"
    assert node.dog.look(1.0) is None
    hang = node.dog.look(1.0 + STOPPED_PATIENCE)
    assert hang is not None and "stopped" in hang.reason


def test_it_says_of_each_worker_what_it_saw(node: Node) -> None:
    node.dog.begin({0: 100, 1: 101})
    node.heart(0, 100).beat("step", since=5.0, limit=60)
    node.heart(0, 100, Lane.SAVING).beat("save", since=4.0, limit=1800)
    node.states[101] = "T"
    node.dog.look(6.0)
    node.dog.look(6.5)
    assert node.dog.describe() == [
        "local rank 0, rank 0, pid 100; in phase step after step 41, 1.5 s of at most 60; "
        "saving for 2.5 s, no byte has moved for 2.5 s of at most 1800",
        "local rank 1, pid 101; no sign of life yet; stopped for 0.5 s",
    ]
    assert node.dog.steps() == {0: 41}
    assert node.dog.stands() == {0: "in phase step after step 41"}
