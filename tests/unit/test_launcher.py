"""A signal to the launcher: before there are workers it ends it as interrupted, and changes nothing afterwards.

The run itself is played: see tests/integration for real ones.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.utils.data._utils import signal_handling

from elastic_runner import paths, verdict
from elastic_runner.errors import ConfigError, ExitCode
from elastic_runner.launch import launcher
from elastic_runner.launch.agent import Agent, EndOfJob
from elastic_runner.launch.attempt import Over
from elastic_runner.launch.early import Stopped, hear_no_more, leave_when_asked, stay
from elastic_runner.launch.health import Health
from elastic_runner.launch.rendezvous.handler import JobEnded
from elastic_runner.observability.summary import RunSummary, Status, decode, encode
from elastic_runner.storage import LocalStorage
from elastic_runner.verdict import RunPlace, Verdict
from tests.support.handlers import kept_handlers

INTERRUPTED = "elastic-runner: interrupted (75): SIGTERM: stopped before there were workers\n"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with kept_handlers():
        yield


def signalled(number: signal.Signals = signal.SIGTERM) -> Callable[..., Any]:
    """Something that a signal comes in the middle of."""
    return lambda *given, **more: signal.raise_signal(number)


def handled_by_torch() -> None:
    """As once workers are there."""
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, _terminate_process_handler)


class Played:
    """A run that comes to ``end`` when it is to begin; what a test puts in the place of others stays its."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path, end: BaseException | None = None) -> None:
        patch.setattr(launcher.tempfile, "tempdir", str(directory))
        patch.setattr(launcher, "ForkServer", lambda *given, **more: self)
        patch.setattr(launcher, "agents_by", lambda plan: nullcontext())
        patch.setattr(launcher, "workers_by", lambda server: nullcontext())
        patch.setattr(launcher.torchrun, "run", self.run)
        self.prepare = self.sweep = self.reap = lambda *given: None
        self._end = end

    def run(self, options: object) -> None:
        handled_by_torch()
        if self._end is not None:
            raise self._end


BEFORE = ("parse", "check_port", "ForkServer", "Notices", "agents_by", "workers_by", "torchrun.run")


@pytest.mark.parametrize("where", BEFORE)
def test_a_signal_at_any_time_before_there_are_workers_is_75_and_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases c18, c25."""
    Played(monkeypatch, tmp_path)
    monkeypatch.setattr(f"{launcher.__name__}.{where}", signalled())
    assert launcher.launch([__file__]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().out == INTERRUPTED
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_while_it_leaves_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as Ctrl-C again, and what a scheduler sends after it."""
    Played(monkeypatch, tmp_path)
    monkeypatch.setattr(launcher, "ForkServer", signalled())
    monkeypatch.setattr(launcher.shutil, "rmtree", signalled(signal.SIGHUP))
    monkeypatch.setattr(launcher, "print", signalled(signal.SIGINT), raising=False)
    assert launcher.launch([__file__]) == ExitCode.INTERRUPTED


AFTER = ("Notices.close", "flush", "_sum_up", "shutil.rmtree")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
@pytest.mark.parametrize("where", AFTER)
@pytest.mark.parametrize("code", [ExitCode.DO_NOT_RETRY, ExitCode.FAILED, ExitCode.FINISHED])
def test_no_signal_changes_how_it_ended(
    code: ExitCode, where: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job that must not be started again would be, with 75."""
    end = EndOfJob(Verdict(code=code, message="why", final=True)) if code else None
    Played(monkeypatch, tmp_path, end)
    monkeypatch.setattr(f"{launcher.__name__}.{where}", signalled(number))
    assert launcher.launch([__file__]) == code
    signal.raise_signal(number)  # and Python is not to take the handler away before the process is gone
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_wrong_command_line_is_no_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Played(monkeypatch, tmp_path, ValueError("no such value"))
    with pytest.raises(ConfigError, match="torchrun: no such value"):
        launcher.launch([__file__])
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def agent() -> Iterator[Agent]:
    """One that has workers, but for all that a test does not need."""
    handled_by_torch()
    agent = object.__new__(Agent)
    agent._plan = SimpleNamespace(health=Health())  # type: ignore[assignment]
    agent._told = os.eventfd(0, os.EFD_NONBLOCK)
    agent._shutdown_timeout = 600
    yield agent
    os.close(agent._told)


def test_an_agent_that_has_decided_is_not_interrupted(agent: Agent) -> None:
    """While it waits for what it keeps of a hang."""
    agent._uploads, agent._handler = [SimpleNamespace(join=signalled())], None  # type: ignore[list-item]
    given = Verdict(code=ExitCode.DO_NOT_RETRY, message="why", final=True)
    assert agent._no_more(given).verdict is given


@pytest.mark.parametrize(
    "end", [JobEnded("why"), RendezvousClosedError(), EndOfJob(Verdict(code=3, message="", final=True))]
)
def test_an_agent_that_leaves_with_an_error_is_not_interrupted(agent: Agent, end: Exception) -> None:
    with patch.object(agent, "_start", side_effect=end), pytest.raises(type(end)):
        agent._invoke_run()
    signal.raise_signal(signal.SIGTERM)


def test_an_agent_whose_workers_have_finished_is_not_interrupted(agent: Agent) -> None:
    agent._worker_group = SimpleNamespace(workers=[])  # type: ignore[assignment]
    with (
        patch.object(agent, "_start", return_value=SimpleNamespace(workers=MagicMock())),
        patch.object(agent, "_wait", return_value=Over(cause="finished")),
        patch.object(agent, "_exit_barrier"),
    ):
        assert agent._invoke_run().state == WorkerState.SUCCEEDED
    signal.raise_signal(signal.SIGTERM)


class Draining:
    """Workers that end at the third notice. ``signal``: a notice to the launcher comes at the same moment."""

    def __init__(self) -> None:
        self.pids, self.codes = {0: 1}, dict[int, int]()
        self.heard: list[signal.Signals] = []
        self.killed = False

    def signal(self, number: signal.Signals) -> None:
        self.heard.append(number)
        if len(self.heard) == 1:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)

    def wait(self, others: Sequence[int], seconds: float) -> None:
        if len(self.heard) == 3:
            self.pids = {}
        else:
            assert select.select(others, [], [], 60)[0], "a notice wakes whoever waits"

    def kill(self, seconds: float) -> None:
        self.killed = True


def test_notices_that_follow_at_once_interrupt_no_drain(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler sends them to all processes, and another one passes its own on."""
    workers, agent._watchdog = Draining(), MagicMock(steps=lambda: {0: 41})
    agent._drain(SimpleNamespace(workers=workers), SignalException("", signal.SIGTERM))  # type: ignore[arg-type]
    assert workers.heard == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM] and workers.killed
    assert caplog.messages == [
        "SIGTERM: the workers are asked to stop and save",
        "SIGUSR1: 20 s are left to save",
        "SIGTERM: 20 s are left to save",
    ]


class Leaving:
    """Workers of which one dies of the notice, and the other waits for it."""

    def __init__(self) -> None:
        self.pids, self.codes = {0: 1, 1: 2}, dict[int, int]()
        self.signal = self.kill = MagicMock()
        self.waited: list[float] = []

    def wait(self, others: Sequence[int], seconds: float) -> None:
        self.waited.append(seconds)
        if len(self.waited) == 1:
            self.codes[1] = -self.pids.pop(1)
        else:
            self.pids = {}  # at the end of what it is left


@pytest.mark.parametrize(("step", "most"), [(-1, []), (41, [20])])
def test_a_drain_does_not_wait_for_who_is_gone(step: int, most: list[float], agent: Agent) -> None:
    workers, agent._watchdog = Leaving(), MagicMock(steps=lambda: {0: step, 1: step})
    agent._drain(SimpleNamespace(workers=workers), SignalException("", signal.SIGTERM))  # type: ignore[arg-type]
    assert all(left <= limit for left, limit in zip(workers.waited[1:], most, strict=True))
    workers.kill.assert_called()


RAISED = Verdict(code=ExitCode.FAILED, message="rank 0: OSError: away", final=False, kind="OSError", rank=0)
STOPPED = "SIGTERM: stopped before the workers had saved"


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        (None, 75, f"{STOPPED}; the newest checkpoint stands"),
        (RAISED, 75, f"{STOPPED} (rank 0: OSError: away); the newest checkpoint stands"),
        (replace(RAISED, consequence=True), 75, f"{STOPPED}; the newest checkpoint stands"),
        (replace(RAISED, code=3, final=True), 3, RAISED.message),
        (Verdict(code=75, message="saved at step 7", final=True), 75, "saved at step 7"),
        (Verdict(code=0, message="", final=True), 0, ""),
    ],
)
def test_how_a_job_ends_that_was_asked_to_stop(
    said: Verdict | None, code: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What no new start would cure has ended it; anything else has only kept the workers from saving."""
    monkeypatch.setattr(launcher.torchrun, "run", MagicMock(side_effect=SignalException("", signal.SIGTERM)))
    if said is not None:
        verdict.tell(str(tmp_path), said)
    given = launcher._run(None, str(tmp_path))
    assert (given.code, given.message, given.final) == (code, message, True)


@pytest.mark.parametrize(
    ("before", "attempt", "code", "after"),
    [
        ("running", 3, 75, "interrupted"),
        ("failed", 3, 75, "interrupted"),
        ("running", 3, 1, "failed"),
        ("failed", 3, 3, "failed"),
        ("running", 3, 0, "running"),
        ("running", 4, 75, "running"),
        ("interrupted", 3, 75, "interrupted"),
        ("finished", 3, 1, "finished"),
    ],
)
def test_the_summary_says_how_it_ended_unless_a_worker_or_a_newer_attempt_has(
    before: Status, attempt: int, code: int, after: Status, tmp_path: Path
) -> None:
    """Where only this node was asked to stop, the others go on, by an attempt of their own."""
    storage = LocalStorage(tmp_path)
    storage.put(paths.SUMMARY, encode(RunSummary(status=before, attempt=attempt, message="a worker's word")))
    verdict.place(str(tmp_path), RunPlace(url=str(tmp_path), options={}, attempt=3))
    launcher._sum_up(str(tmp_path), Verdict(code=code, message="why", final=True))
    summary = decode(storage.read(paths.SUMMARY))
    changed = attempt == 3 and code != 0 and before in ("running", "failed")
    assert (summary.status, summary.message) == (after, "why" if changed else "a worker's word")


def test_whoever_handles_signals_is_followed_by_who_comes_next() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    leave_when_asked()
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    handled_by_torch()
    with pytest.raises(SignalException):
        signal.raise_signal(signal.SIGQUIT)
    heard: list[int] = []
    stay(heard.append)
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert heard == [signal.SIGQUIT, signal.SIGTERM]
    hear_no_more()
    assert {signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)} == {signal.SIG_IGN}


def test_the_handler_that_torch_s_loaders_need_is_left_alone() -> None:
    """Were SIGCHLD ignored, the exit codes of children would be lost, and read as 0."""
    signal_handling._set_SIGCHLD_handler()
    theirs = signal.getsignal(signal.SIGCHLD)
    stay()
    hear_no_more()
    assert signal.getsignal(signal.SIGCHLD) == theirs and callable(theirs)
