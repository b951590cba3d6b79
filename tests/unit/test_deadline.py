"""Deadlines per phase, with limits of milliseconds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_runner.worker.deadline import PhaseWatch


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


LEAVE = """
import sys, threading
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
