"""One piece of work beside training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from elastic_runner.checkpoint.background import Background


class Work:
    """Goes on until it is let go."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.error = error

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def background() -> Background:
    return Background(nullcontext)


def test_idle(background: Background) -> None:
    assert (background.busy, background.ended, background.wait(0), background.outcome()) == (False, False, True, None)


def test_from_start_to_outcome(background: Background) -> None:
    work = Work()
    background.start("save", work)
    assert work.begun.wait(60)
    assert (background.busy, background.ended, background.wait(0.01)) == (True, False, False)
    work.go.set()
    assert background.wait(60)
    assert (background.busy, background.ended) == (True, True), "the outcome is still to be taken"
    assert background.wait(0)
    assert background.outcome() is None
    assert (background.busy, background.ended) == (False, False)


class Unusual(BaseException):
    """Like torch's CheckpointException."""


@pytest.mark.parametrize("error", [OSError("disk"), Unusual(), SystemExit(3), KeyboardInterrupt()])
def test_every_error_comes_out_once(error: BaseException, background: Background) -> None:
    work = Work(error)
    work.go.set()
    background.start("save", work)
    assert background.outcome() is error
    assert background.outcome() is None
    background.start("next", lambda: None)
    assert background.outcome() is None, "an error of the one before"


def test_one_at_a_time(background: Background) -> None:
    work = Work()
    background.start("save of step 1", work)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must be taken first"):
            background.start("save of step 2", lambda: None)
        work.go.set()  # and its outcome must be taken, too
        assert background.wait(60)
    assert background.outcome() is None
    background.start("save of step 2", lambda: None)
    assert background.outcome() is None


def test_the_outcome_is_waited_for(background: Background) -> None:
    work = Work(OSError("late"))
    background.start("save", work)
    threading.Timer(0.05, work.go.set).start()
    assert str(background.outcome()) == "late"


def test_work_runs_in_its_phase_and_an_error_of_the_phase_is_one_of_the_work() -> None:
    seen: list[str] = []

    @contextmanager
    def phase() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")
        raise TimeoutError("too long")

    background = Background(phase)
    background.start("save", lambda: seen.append("work"))
    assert isinstance(background.outcome(), TimeoutError)
    assert seen == ["enter", "work", "leave"]


def test_a_thread_that_cannot_be_started_leaves_nothing_to_wait_for(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            background.start("save", lambda: None)
    assert not background.busy and background.outcome() is None
    background.start("save", lambda: None)
    assert background.outcome() is None


def test_whoever_takes_a_good_outcome_has_it_reported_once(background: Background) -> None:
    told: list[str] = []

    def fail() -> None:
        raise OSError("disk")

    background.start("bad", fail, done=lambda: told.append("bad"))
    assert background.outcome() is not None
    background.start("good", lambda: None, done=lambda: told.append("good"))
    assert background.wait(60) and told == []
    assert (background.outcome(), background.outcome(), told) == (None, None, ["good"])
