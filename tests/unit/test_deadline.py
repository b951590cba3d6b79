"""Deadlines per phase, with limits of milliseconds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from elastic_runner import heartbeat
from elastic_runner.config import TimeoutConfig
from elastic_runner.environment import Environment
from elastic_runner.heartbeat import SIZE, Heart, Lane, Moved, moved_at, read
from elastic_runner.worker import deadline
from elastic_runner.worker.course import Course
from elastic_runner.worker.deadline import PhaseWatch
from elastic_runner.worker.limits import ENOUGH, Learned
from elastic_runner.worker.watches import watches


class Expiry:
    """Collects what the watch says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.came = threading.Event()

    def __call__(self, message: str) -> None:
        self.messages.append(message)
        self.came.set()


def watch(expiry: Expiry, **limits: float) -> PhaseWatch:
    return PhaseWatch(limits, lambda: "rank 3 on host h", expiry)


def test_expiry_names_place_phase_limit_and_field() -> None:
    expiry = Expiry()
    with watch(expiry, save=0.05).phase("save"):
        assert expiry.came.wait(10)
    [message] = expiry.messages
    for word in ("rank 3 on host h", "phase 'save'", "0.05 s", "timeouts.save"):
        assert word in message


def test_expires_once() -> None:
    expiry = Expiry()
    watched = watch(expiry, step=0.02)
    with watched.phase("step"):
        assert expiry.came.wait(10)
        assert watched._thread is not None
        watched._thread.join(10)
        assert not watched._thread.is_alive()
    assert len(expiry.messages) == 1


def test_phases_in_time_do_not_expire() -> None:
    expiry = Expiry()
    watched = watch(expiry, step=5, save=0.05)
    for _ in range(100):
        with watched.phase("step"), watched.phase("save"):
            pass
    with watched.phase("step"):
        assert not expiry.came.wait(0.2), "the clock of a phase that was left ran on"
    watched.close()


def test_outer_clock_stands_still_during_an_inner_phase() -> None:
    """c17: a save may take longer than the step that it is called in."""
    expiry = Expiry()
    watched = watch(expiry, step=0.3, save=30)
    with watched.phase("step"):
        with watched.phase("save"):
            assert not expiry.came.wait(0.5)
        entered = time.monotonic()
        assert expiry.came.wait(10), "the outer clock did not go on"
    assert time.monotonic() - entered > 0.15
    assert "phase 'step'" in expiry.messages[0]


@pytest.mark.parametrize(("phase", "put_off"), [("save", 40), ("load", 40), ("step", 0)])
def test_bytes_that_move_put_off_the_end_of_a_save_and_of_a_load(
    phase: str, put_off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c17: whichever thread moves them; without an agent this is the only limit."""
    now = [time.monotonic()]
    for module in (deadline, heartbeat):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    moved, expiry = Moved(), Expiry()
    watched = PhaseWatch({phase: 60}, lambda: "rank 3", expiry, moved=moved)
    with watched.phase(phase):
        begun = now[0]
        now[0] += 40
        moved()
        assert watched._deadline() == begun + put_off + 60
        assert ("without a byte moving" in watched._reason()) == (put_off > 0)
    with watched.phase(phase):
        assert watched._deadline() == now[0] + 60, "bytes of an earlier one do not count"
    watched.close()


def test_inner_phase_expires_first() -> None:
    expiry = Expiry()
    watched = watch(expiry, step=30, data=0.05)
    with watched.phase("step"), watched.phase("data"):
        assert expiry.came.wait(10)
    assert "phase 'data'" in expiry.messages[0]


def test_current_names_the_innermost_phase() -> None:
    watched = watch(Expiry(), step=5, save=5)
    assert watched.current == "idle"
    with watched.phase("step"):
        with watched.phase("save"):
            assert watched.current == "save"
        assert watched.current == "step"
    assert watched.current == "idle"
    watched.close()


def test_an_error_is_reported_in_the_innermost_phase_it_left() -> None:
    watched = watch(Expiry(), step=5, save=5)
    with pytest.raises(ZeroDivisionError), watched.phase("step"), watched.phase("save"):
        raise ZeroDivisionError
    assert watched.current == "save"
    with watched.phase("step"):
        assert watched.current == "step"
    assert watched.current == "idle"
    watched.close()


def test_a_loop_that_an_error_left_was_in_its_phase() -> None:
    """The interpreter ends the generator before anybody can ask where the error came from."""
    watched = watch(Expiry(), step=5)

    def loop() -> Iterator[int]:
        with watched.phase("step"):
            yield 1

    with pytest.raises(ZeroDivisionError):
        for one in loop():
            one / 0
    assert watched.current == "step"
    watched.close()


def test_unknown_phase_is_a_mistake() -> None:
    with pytest.raises(KeyError), watch(Expiry(), step=5).phase("stpe"):
        pass


def test_close_ends_the_thread() -> None:
    watched = watch(Expiry(), step=5)
    with watched.phase("step"):
        pass
    watched.close()
    assert watched._thread is not None
    watched._thread.join(10)
    assert not watched._thread.is_alive()


class Page:
    """What the agent would read."""

    def __init__(self) -> None:
        self.memory = bytearray(SIZE)
        self.heart = Heart(self.memory, Lane.TRAINING, rank=3, position=lambda: (2, 41))

    @property
    def now(self) -> tuple[str, float, int]:
        """Phase, limit, progress."""
        beat = read(self.memory, Lane.TRAINING)
        assert beat is not None and (beat.rank, beat.attempt, beat.step) == (3, 2, 41)
        return beat.phase, beat.limit, beat.progress

    @property
    def since(self) -> float:
        beat = read(self.memory, Lane.TRAINING)
        assert beat is not None
        return beat.since


def test_every_change_of_phase_is_a_beat() -> None:
    page = Page()
    watched = PhaseWatch({"step": 30, "save": 60}, lambda: "rank 3", heart=page.heart)
    with watched.phase("step"):
        entered = page.since
        assert page.now == ("step", 30, 0)
        watched.progress()
        assert page.now == ("step", 30, 1)
        with watched.phase("save"):
            assert page.now == ("save", 60, 0)
            time.sleep(0.05)
        assert page.now == ("step", 30, 1)
        assert entered + 0.05 <= page.since <= time.monotonic(), "the outer clock stood still"
    assert page.now == ("", 0, 0)
    watched.progress()
    assert page.now == ("", 0, 0)
    watched.close()


def test_where_the_agent_judges_the_process_acts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "AFTER_AGENT", 0.4)
    expiry, entered = Expiry(), time.monotonic()
    watched = PhaseWatch({"step": 0.1}, lambda: "rank 3", expiry, heart=Page().heart)
    with watched.phase("step"):
        assert expiry.came.wait(10), "the agent may be stuck itself"
    assert time.monotonic() - entered >= 0.5
    assert "longer than 0.1 s" in expiry.messages[0]


def test_a_phase_that_repeats_is_judged_by_its_own_durations() -> None:
    expiry, page = Expiry(), Page()
    learned = {"step": Learned(2, 0.2)}
    watched = PhaseWatch({"step": 600, "load": 600}, lambda: "rank 3", expiry, learned=learned, heart=page.heart)
    for _ in range(ENOUGH):
        with watched.phase("step"):
            assert page.now[1] == 600
    with watched.phase("load"):
        assert page.now[1] == 600
    with watched.phase("step"):
        assert page.now[1] == 0.2
        beat = read(page.memory, Lane.TRAINING)
        assert beat is not None and beat.learned
    watched.close()
    alone = PhaseWatch({"step": 600}, lambda: "rank 3", expiry, learned=learned)
    with alone.phase("step"):
        assert expiry.came.wait(10)
    assert "timeouts.learned_factor" in expiry.messages[0]


def test_what_failed_or_lay_in_an_inner_phase_is_not_learned_from() -> None:
    learned = Learned(10, 0.001)
    watched = PhaseWatch({"step": 600, "save": 600}, lambda: "rank 3", Expiry(), learned={"step": learned})
    for _ in range(ENOUGH):
        with watched.phase("step"), watched.phase("save"):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), watched.phase("step"):
        time.sleep(0.5)
        raise ZeroDivisionError
    watched.close()
    assert learned.limit(600) < 0.2


def test_a_thread_that_wakes_far_too_late_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM suspends whole jobs; the clock runs on."""
    expiry, ahead = Expiry(), [0.0]
    clock = time.monotonic
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock() + ahead[0]))
    watched = watch(expiry, step=0.3)
    with watched.phase("step"):
        while watched._wakes == math.inf:
            time.sleep(0.001)
        with watched._changed:  # the thread sleeps
            ahead[0] = 3600.0  # what passes while nobody runs
        assert not expiry.came.wait(0.45), "judged by the time of its suspension"
        assert expiry.came.wait(10), "its clock began anew"


def test_both_lanes_are_written_where_an_agent_gave_memory() -> None:
    handle = os.memfd_create("test")
    os.ftruncate(handle, SIZE)
    place = Environment(rank=5, local_rank=1, heartbeats=("/absent", f"/proc/self/fd/{handle}"))
    course = Course(attempt=1, state=SimpleNamespace(step=7))  # type: ignore[arg-type]
    training, saving = watches(TimeoutConfig(), place, training=str, saving=str, course=course)
    with training.phase("step"), saving.phase("save"):
        training.moved()
        page = os.pread(handle, SIZE, 0)
    assert moved_at(bytearray(page)) == saving.moved.at > 0
    beats = [read(bytearray(page), lane) for lane in Lane]
    assert [(beat.phase, beat.limit, beat.rank, beat.step) for beat in beats if beat] == [
        ("step", TimeoutConfig().step, 5, 7),
        ("save", TimeoutConfig().save, 5, 7),
    ]
    os.close(handle)
    for one in (training, saving):
        one.close()


@pytest.mark.parametrize("heartbeats", [(), ("/absent",)])
def test_without_memory_the_process_judges_itself(heartbeats: tuple[str, ...]) -> None:
    environment = Environment(heartbeats=heartbeats)
    training, saving = watches(TimeoutConfig(), environment, training=str, saving=str, course=Course())
    assert training._margin == saving._margin == 0
    with training.phase("step"):
        training.progress()
    training.close()


LEAVE = """
import sys, threading
from elastic_runner.worker.course import Course
from elastic_runner.worker.deadline import PhaseWatch
def stuck():
    threading.Event().wait()
if sys.argv[1:] == ["full pipe"]:
    holder = threading.Thread(target=lambda: print("x" * 10_000_000), daemon=True)
    holder.start()
with PhaseWatch({"step": 0.3}, lambda: "rank 0").phase("step"):
    stuck()
"""


def test_leaving_prints_the_stacks_and_exits_1() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "phase 'step' took longer than 0.3 s" in done.stderr
    assert "in stuck" in done.stderr


def test_leaves_although_nobody_reads_its_output() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVE, "full pipe"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.wait(30) == 1
        finally:
            process.kill()
