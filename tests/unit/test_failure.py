"""Who hears of the error that a worker dies of."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_runner import history, verdict
from elastic_runner.checkpoint.background import Background
from elastic_runner.environment import Environment
from elastic_runner.errors import Interrupted, ModelError, PeerLost, SaveFailed
from elastic_runner.observability.summary import RunSummary
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import MainRecord, read_summary
from elastic_runner.worker.course import Course
from elastic_runner.worker.failure import Failure, in_time, let_save_end


class Job:
    """Rank 0 of ``world`` fails after step 6."""

    def __init__(self, root: Path, world: int = 2) -> None:
        self.scratch, state = root / "scratch", SimpleNamespace(step=6, begun_at=0, agreed_at=None)
        self.scratch.mkdir()
        self.storage = LocalStorage(root / "run")
        self.record = MainRecord(self.storage, attempt=1, target_step=9, restarts=0)
        any_state: Any = state
        environment = Environment(world_size=world, agent_dir=str(self.scratch))
        self.failure = Failure(environment, self.storage, Course(attempt=1, state=any_state), lambda: "rank 0 of 2")

    def summary(self) -> RunSummary:
        found = read_summary(self.storage)
        assert found is not None
        return found


def test_the_launcher_the_terminal_and_the_record_hear_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    job.failure.report(ModelError("set this option"), job.record)
    told = verdict.read(str(job.scratch))
    assert told is not None
    assert (told.code, told.final, told.consequence, told.kind, told.step) == (3, True, False, "ModelError", 6)
    assert told.message == "rank 0: ModelError: set this option"
    assert capsys.readouterr().err == "elastic_runner: error: rank 0 of 2: ModelError: set this option\n"
    (end,) = history.read_ends(job.storage)
    assert (end.kind, end.step, end.message) == ("ModelError", 7, told.message)
    assert (job.summary().status, job.summary().message) == ("failed", told.message)


def test_a_consequence_is_no_end_of_the_attempt(tmp_path: Path) -> None:
    """The rank that failed first writes that."""
    job = Job(tmp_path)
    job.failure.report(PeerLost("rank 1 is gone"), job.record)
    told = verdict.read(str(job.scratch))
    assert told is not None and told.consequence and not told.final
    assert history.read_ends(job.storage) == []
    assert job.summary().status == "failed"


@pytest.mark.parametrize(
    ("error", "code", "final"), [(KeyboardInterrupt(), 1, False), (Interrupted("by the program"), 75, True)]
)
def test_no_interruption_is_started_again(error: BaseException, code: int, final: bool, tmp_path: Path) -> None:
    """A program that raises KeyboardInterrupt, unasked, has failed like by any other error."""
    job = Job(tmp_path)
    job.failure.report(error, job.record)
    told = verdict.read(str(job.scratch))
    assert told is not None and (told.code, told.final) == (code, final)


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("not even that")


def test_an_error_that_cannot_say_what_it_is_is_told_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    job.failure.report(Mute(), job.record)
    assert job.summary().message == "rank 0: Mute" and "Mute: <exception str() failed>" in capsys.readouterr().err


def test_a_program_that_leaves_as_if_all_were_well_says_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    with caplog.at_level(logging.WARNING, "elastic_runner"):
        job.failure.left(job.record, 9)
    message = "the program left by sys.exit at step 6 of 9"
    assert [record.getMessage() for record in caplog.records] == [f"{message}: {job.storage.url}"]
    assert (job.summary().status, job.summary().message) == ("interrupted", message)
    told = verdict.read(str(job.scratch))
    assert told is not None and (told.code, told.kind, told.step) == (1, "SystemExit", 6)
    assert told.message == f"rank 0: {message}" and not told.final and not told.consequence


def test_before_the_attempt_began_nothing_is_on_record(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failure.report(ModelError("bad"), None)
    assert verdict.read(str(job.scratch)) is not None
    assert (history.read_ends(job.storage), job.summary().status) == ([], "running")


def test_it_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, error = Job(tmp_path), ModelError("bad")
    job.failure.report(error, None)
    job.failure.print(error)
    assert capsys.readouterr().err.count("bad") == 1


def test_a_program_of_one_process_may_catch_it_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(tmp_path, world=1).failure.report(ModelError("bad"), None)
    assert capsys.readouterr().err == ""


def test_an_error_that_is_not_the_worker_s_is_left_to_the_hook_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    job, other = Job(tmp_path), ValueError("elsewhere")
    hook = job.failure.excepthook()
    job.failure.report(ModelError("bad"), None)
    hook(ValueError, other, None)
    assert seen == [other]


def test_the_last_write_may_fail() -> None:
    seen = []

    def write() -> None:
        seen.append(1)
        raise OSError("disk full")

    in_time(write)
    assert seen == [1]


def test_a_save_that_goes_on_may_end_first() -> None:
    background, gate = Background(nullcontext), threading.Event()
    assert let_save_end(background, 30) is None
    background.start("save", gate.wait)
    late = let_save_end(background, 0.05)
    assert isinstance(late, SaveFailed) and "0.05 s (timeouts.teardown)" in str(late)
    gate.set()
    assert let_save_end(background, 30) is None


def test_a_save_that_failed_says_why() -> None:
    background, error = Background(nullcontext), OSError("disk full")

    def save() -> None:
        raise error

    background.start("save", save)
    assert let_save_end(background, 30) is error
