"""A launcher that gives up has what is only in memory saved; the next start goes on from there with nothing lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from elastic_runner import verdict
from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.checkpoint.tools.difference import compare
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.data.audit import audit
from elastic_runner.data.ledger import read_records
from elastic_runner.launch.early import leave_when_asked
from elastic_runner.launch.flush import flush
from elastic_runner.storage import LocalStorage
from elastic_runner.verdict import RunPlace
from tests.support.handlers import kept_handlers
from tests.unit.test_flush import Node, prepare

STEPS = 16
SETTINGS = (
    "--training.max-steps", str(STEPS), "--checkpoint.every", "1000", "--snapshot.every", "1",
    "--determinism", "elastic",
)  # fmt: skip
DIGITS = ("-m", "elastic_runner.recipes.digits", *SETTINGS)
STUCK = """
import threading
from elastic_runner.recipes import digits
from elastic_runner.storage.local import LocalStorage

LocalStorage.write_bulk = lambda *given: threading.Event().wait()
digits.main()
"""
"""The storage takes no checkpoint from the workers, and does not say so."""


def checkpoints(run_dir: Path) -> list[int]:
    return [m.step for m in list_checkpoints(LocalStorage(run_dir / "checkpoints")).manifests]


def committed(run_dir: Path) -> int:
    return max(r["step"] for r in read_records(LocalStorage(run_dir)) if r["event"] == "step")


def by_one_process(run_dir: Path) -> str:
    """Run to the end; the world and the strategy do not matter to what comes out."""
    command = [sys.executable, *DIGITS, "--run-dir", str(run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    by_one_process(run_dir)
    return run_dir


def assert_goes_on(run_dir: Path, undisturbed: Path) -> None:
    """A new start finds the step that was flushed, loses none, and comes to what the undisturbed run came to."""
    (step,) = checkpoints(run_dir)
    assert step == committed(run_dir) < STEPS
    assert f"restored step {step} (sharded, by 2 ranks)" in by_one_process(run_dir)
    found = audit(lambda: read_records(LocalStorage(run_dir)))
    assert (found.verdict, found.steps, found.lost) == ("proven", STEPS, 0), found
    with opened(f"{run_dir}/checkpoints", {}) as a, opened(f"{undisturbed}/checkpoints", {}) as b:
        assert compare(a.contents, b.contents).same


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_restarts_are_used_up(strategy: str, tmp_path: Path, undisturbed: Path) -> None:
    command = launch_command(2, "--max-restarts=0", *DIGITS, "--strategy.name", strategy)
    with ObservedRun(tmp_path, command) as run:
        for record in run.records():
            if record["event"] == "step" and record["step"] == 3:
                run.kill(1)
        assert run.process.wait() == 1
        log = run.log.read_text()
    assert log.count("which was in memory only, is saved") == 1, log
    assert_goes_on(tmp_path, undisturbed)


def test_a_grace_that_is_too_short_for_a_save(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "stuck.py", tmp_path / "run"
    script.write_text(STUCK)
    command = launch_command(2, "--shutdown-timeout=2", str(script), *SETTINGS)
    with ObservedRun(run_dir, command) as run:
        for record in run.records():
            if record["event"] == "step" and record["step"] == 3:
                run.process.send_signal(signal.SIGTERM)
        assert run.process.wait() == 75
        log = run.log.read_text()
    assert "SIGTERM: stopped before the workers had saved" in log, log
    assert log.count("which was in memory only, is saved") == 1, log
    assert checkpoints(run_dir) == [committed(run_dir)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def second_signal() -> Iterator[None]:
    """Once the flush has begun."""
    communicate = subprocess.Popen.communicate

    def signalled(process: subprocess.Popen[str], **more: float) -> tuple[str, str]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return communicate(process, **more)

    with patch.object(subprocess.Popen, "communicate", signalled):
        leave_when_asked()
        yield


@pytest.mark.parametrize(
    ("meanwhile", "seconds", "said"),
    [
        (nothing, 60.0, "is not saved: "),
        (nothing, 0.1, "is not saved: that took longer than 0.1 s"),
        (second_signal, 60.0, "is not saved: asked to stop at once"),
    ],
    ids=["storage", "time", "signal"],
)
def test_a_flush_that_fails_is_one_line_and_no_error(
    meanwhile: Callable[[], object], seconds: float, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The storage has a file where the checkpoint belongs."""
    prepare(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-0000000005").write_text("in the way")
    node, agent = Node(tmp_path / "run"), tmp_path / "agent"
    agent.mkdir()
    verdict.place(str(agent), RunPlace(url=str(tmp_path / "run"), options={}, attempt=1))
    with caplog.at_level(logging.WARNING, "elastic_runner"), kept_handlers(), meanwhile():  # type: ignore[attr-defined]
        flush(str(agent), node.files, seconds)
    (line,) = [record.getMessage() for record in caplog.records]
    assert said in line and checkpoints(tmp_path / "run") == [3]
    for handle in node.handles:
        os.close(handle)
