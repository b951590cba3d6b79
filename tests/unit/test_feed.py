"""A tracker gets each step once, whatever befalls it and the run; nothing that it does stops training."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tenacity

from elastic_runner.observability.summary import Status
from elastic_runner.storage import open_storage
from elastic_runner.tracking import feed, told
from elastic_runner.tracking.feed import History
from elastic_runner.tracking.protocol import Opener, TrackedRun
from elastic_runner.tracking.trackers import Trackers
from tests.support.waiting import eventually
from tests.unit.test_told import evaluation, step


class Tool:
    """Remembers what it was told over all attempts, of each value the first; ``fail`` is asked before each action."""

    def __init__(self, *, rewinds: bool = False) -> None:
        self.opened: list[tuple[str | None, int]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed: list[Status] = []
        self.fail = lambda action: None
        self.abandoned = threading.Event()
        self.opener = Opener(open=self._open, rewinds=rewinds, abandon=self.abandoned.set)
        self.run_id = "named by the tool"
        self.holds = 0

    def _open(self, run: TrackedRun, run_id: str | None, since: int) -> Tool:
        self.fail("open")
        self.opened.append((run_id, since))
        if self.opener.rewinds:
            self.lines = [line for line in self.lines if line[0] <= since]
        self.holds = since
        return self

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self.fail("log")
        if not any(step == number and values.keys() == known.keys() for number, known in self.lines):
            self.lines.append((step, dict(values)))

    def flush(self) -> None:
        self.fail("flush")

    def close(self, status: Status) -> None:
        self.fail("close")
        self.closed.append(status)

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Each step with the attempt that did it."""
        return [(number, values["run/attempt"]) for number, values in self.lines if "run/attempt" in values]


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(id="r", name="run", project=None, attempt=1, settings={}, storage=open_storage(str(tmp_path)))


def attempt(
    tool: Tool,
    run: TrackedRun,
    lines: Iterable[dict[str, Any] | None],
    *,
    course: list[dict[str, Any]] | None = None,
    everything: list[dict[str, Any]] | None = None,
    end: Status | None = "finished",
) -> None:
    """One attempt: ``lines`` go on record, None is a checkpoint; ``end`` None: it is killed after them."""
    lines = list(lines)
    if end is None:
        tool.fail = Killed(after=lines.count(None))
    trackers = Trackers({"tool": tool.opener}, run, limit=60)
    before = course or []
    trackers.begin(History(lambda: before, lambda: everything or before))
    for line in lines:
        if line is None:
            trackers.saved()
        else:
            trackers.tell(line)
    trackers.end(end or "failed")
    tool.fail = lambda action: None


class Killed:
    """Lets nothing be made durable but at the first checkpoints."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, action: str) -> None:
        if action == "flush":
            self._left -= 1
            if self._left < 0:
                raise OSError("killed")


def steps(first: int, last: int, attempt: int) -> list[dict[str, Any]]:
    return [step(number, attempt) for number in range(first, last + 1)]


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_crash_at_17_after_a_save_at_10(run: TrackedRun, rewinds: bool) -> None:
    """Case c67: nothing twice, no hole, all in order; with ``rewinds`` from the attempts that led to the result."""
    tool = Tool(rewinds=rewinds)
    first = steps(1, 17, 1)
    attempt(tool, run, [*first[:10], None, *first[10:]], end=None)
    second = steps(11, 20, 2)
    attempt(tool, run, second, course=first[:10], everything=first)
    assert [number for number, _ in tool.steps] == list(range(1, 21))
    owner = 2 if rewinds else 1
    assert [by for number, by in tool.steps if 11 <= number <= 17] == [owner] * 7
    assert tool.closed[-1] == "finished"


@pytest.mark.parametrize("rewinds", [True, False])
def test_the_tools_own_name_of_the_run_is_the_same_at_each_attempt(run: TrackedRun, rewinds: bool) -> None:
    """Case c66."""
    tool = Tool(rewinds=rewinds)
    first = steps(1, 3, 1)
    attempt(tool, run, first, end=None)
    attempt(tool, run, [], course=first)
    assert [name for name, _ in tool.opened] == [None, "named by the tool"]


def test_lines_that_a_killed_attempt_could_not_tell_come_from_the_ledger(run: TrackedRun) -> None:
    tool = Tool()
    first = [*steps(1, 8, 1), evaluation(8), step(9)]
    attempt(tool, run, first[:3], end=None)
    attempt(tool, run, steps(10, 12, 2), course=first, everything=first)
    assert [number for number, _ in tool.lines if number > 3] == [4, 5, 6, 7, 8, 8, 9, 10, 11, 12]


def test_a_course_that_parts_from_the_told_one_is_told_from_there(run: TrackedRun) -> None:
    """An older checkpoint is gone on from, and then the newer one after all."""
    tool = Tool(rewinds=True)
    first, second = steps(1, 20, 1), steps(11, 18, 2)
    attempt(tool, run, first)
    attempt(tool, run, second, course=first[:10])
    attempt(tool, run, steps(21, 22, 3), course=first)
    assert tool.steps == [*((n, 1) for n in range(1, 21)), (21, 3), (22, 3)]


def test_trouble_is_said_once_and_tried_again(
    run: TrackedRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_RETRY", tenacity.wait_fixed(0.001))
    tool, left = Tool(), {"open": 2, "log": 3, "flush": 1}

    def fail(action: str) -> None:
        if left.get(action, 0) > 0:
            left[action] -= 1
            raise OSError(f"no {action}")

    tool.fail = fail
    done = threading.Event()
    tool.close = lambda status: done.set()  # type: ignore[method-assign]
    trackers = Trackers({"tool": tool.opener}, run, limit=60)
    trackers.begin(History(list, list))
    for line in steps(1, 5, 1):
        trackers.tell(line)
    trackers.saved()
    feeding = trackers._feeds[0]
    feeding._put("finished")  # the end without haste: all tries are made
    assert done.wait(60)
    assert [number for number, _ in tool.lines] == [1, 2, 3, 4, 5] and not any(left.values())
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [f"tracker tool is tried again, training goes on: OSError: no {a}" for a in ("open", "log", "flush")]


def raising(error: BaseException) -> Callable[[str], None]:
    """A tool whose every action fails."""

    def fail(action: str) -> None:
        raise error

    return fail


def test_a_tool_that_is_away_is_not_waited_for(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool()
    tool.fail = raising(OSError("away"))
    attempt(tool, run, steps(1, 3, 1))
    assert "is told the rest at the next start: OSError: away" in caplog.text
    tool.fail = lambda action: None
    attempt(tool, run, [], course=steps(1, 3, 1))
    assert [number for number, _ in tool.lines] == [1, 2, 3]


def test_a_tool_that_exits_is_a_tool_that_fails(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool()
    tool.fail = raising(SystemExit("no key"))
    attempt(tool, run, steps(1, 3, 1))
    assert "is told the rest at the next start: SystemExit: no key" in caplog.text


def test_a_tool_that_hangs_costs_the_limit_and_no_more(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    tool, hung, let_go = Tool(), threading.Event(), threading.Event()

    def fail(action: str) -> None:
        if action == "log":
            hung.set()
            assert let_go.wait(60)

    tool.fail = fail
    trackers = Trackers({"tool": tool.opener}, run, limit=0.05)
    trackers.begin(History(list, list))
    trackers.tell(step(1))
    assert hung.wait(60)
    trackers.end("finished")
    assert "tracker tool does not come to an end" in caplog.text and tool.abandoned.is_set()
    let_go.set()


def test_what_waits_for_a_tool_is_bounded(
    run: TrackedRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_MOST", 2)
    tool, opening = Tool(), threading.Event()

    def fail(action: str) -> None:
        assert opening.wait(60)

    tool.fail = fail
    trackers = Trackers({"tool": tool.opener}, run, limit=60)
    trackers.begin(History(list, list))
    for line in steps(1, 5, 1):
        trackers.tell(line)
    assert "is told the rest at the next start: it has been away for too long" in caplog.text
    opening.set()
    trackers.end("finished")
    assert tool.closed == ["interrupted"] and "does not come to an end" not in caplog.text
    attempt(tool, run, [], course=steps(1, 5, 1))
    assert [number for number, _ in tool.steps] == [1, 2, 3, 4, 5]


def test_an_older_attempt_that_wakes_up_leaves_the_tool_alone(
    run: TrackedRun, caplog: pytest.LogCaptureFixture
) -> None:
    tool = Tool()
    old = Trackers({"tool": tool.opener}, run, limit=60)
    old.begin(History(list, list))
    eventually(lambda: told.read(run.storage, "tool").attempt == 1, "the old one has it")
    attempt(tool, dataclasses.replace(run, attempt=2), steps(1, 3, 2))
    old.end("failed")
    assert tool.closed == ["finished"] and "Fenced: attempt 2 has taken over" in caplog.text
