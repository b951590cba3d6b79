"""Processes of an attempt, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest

from elastic_runner import verdict
from elastic_runner.launch import processes
from elastic_runner.launch.processes import Workers, children, descendants, end_descendants, forget_shared_memory


def test_only_what_the_named_and_dead_have_left_is_removed() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    word = uuid.uuid4().hex[:8]
    left = [Path("/dev/shm", f"torch_{pid}_{word}_1") for pid in (dead.pid, os.getpid())]
    foreign = Path("/dev/shm", f"torch_x_{word}_1")
    try:
        for path in (*left, foreign):
            path.touch()
        forget_shared_memory([])
        assert all(path.exists() for path in left)
        forget_shared_memory([dead.pid, os.getpid()])
        assert [path.exists() for path in (*left, foreign)] == [False, True, True]
    finally:
        for path in (*left, foreign):
            path.unlink(missing_ok=True)


def test_processes_are_known_until_the_next_attempt(tmp_path: Path) -> None:
    verdict.be_known(None)
    verdict.be_known(str(tmp_path))
    assert verdict.processes(tmp_path) == {os.getpid()}
    verdict.clear(str(tmp_path))
    assert verdict.processes(tmp_path) == set()


def test_workers_are_waited_for_in_the_order_of_their_ends_and_killed_with_their_own() -> None:
    reading, writing = os.pipe()
    shell = "sleep 600 & echo started; wait"
    started = [
        subprocess.Popen(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE)
        for command in (shell, "exit 3")
    ]
    workers = Workers(dict(enumerate(started)))
    try:
        assert workers.wait((), 30) == [1] and workers.codes == {1: 3}
        assert started[0].stdout is not None and started[0].stdout.readline() == b"started\n"
        family = descendants(started[0].pid)
        assert family == children(started[0].pid) and len(family) == 1
        os.write(writing, b"x")
        assert workers.wait([reading], 30) == [], "woken by another event"
        assert workers.kill(30) == []
        assert workers.codes == {1: 3, 0: -signal.SIGKILL} and workers.pids == {}
        assert workers.wait((), 0) == []
    finally:
        workers.close()
        for each in started:
            each.kill()
            each.wait()
            each.stdout.close() if each.stdout else None
        os.close(reading)
        os.close(writing)


def test_what_does_not_die_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank stuck in the kernel kept the launcher from exiting with 69. The others are reaped all the same."""
    kill, others = processes.signal_all, children(os.getpid())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stuck, subprocess.Popen(["sleep", "600"]) as mortal:

        def spare_the_stuck(pids: Iterable[int], number: signal.Signals) -> None:
            kill([pid for pid in pids if pid != stuck.pid], number)

        monkeypatch.setattr(processes, "signal_all", spare_the_stuck)
        end_descendants(0.2, spared=others)
        assert set(children(os.getpid())) == {*others, stuck.pid}
        assert mortal.wait() is not None
