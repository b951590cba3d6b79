"""Gathering does no harm, takes its time and no more, and survives whatever cannot be had."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from elastic_runner import stacks
from elastic_runner.launch import evidence, kernel
from elastic_runner.launch.dumps import ANSWER, python_stacks
from elastic_runner.launch.watchdog import Hang
from tests.support.ranks import CONTEXT

HANG = Hang(local_rank=0, rank=4, pid=1, attempt=3, phase="step", step=41, seconds=2.0, reason="rank 4 hangs")


def wait_for_ever(ready: Connection, said: object = "ready") -> None:
    """Says so from within, so that whoever has heard it finds this on the stack."""
    ready.send(said)
    threading.Event().wait()


def wait_in_the_child(begun: int) -> None:
    os.write(begun, b"!")
    threading.Event().wait()


def answering(directory: str, ready: Connection) -> None:
    stacks.answer_requests(directory)
    wait_for_ever(ready)


def with_a_child(directory: str, ready: Connection) -> None:
    stacks.answer_requests(directory)
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        wait_in_the_child(begins)
    os.read(begun, 1)
    wait_for_ever(ready, child)


def deaf(directory: str, ready: Connection) -> None:
    """As one that sits in the kernel."""
    stacks.answer_requests(directory)
    signal.pthread_sigmask(signal.SIG_BLOCK, [stacks.REQUEST])
    wait_for_ever(ready)


def with_its_own_handler(directory: str, ready: Connection) -> None:
    signal.signal(stacks.REQUEST, lambda *_: Path(directory, "called").touch())
    stacks.answer_requests(directory)
    wait_for_ever(ready)


@contextmanager
def process(target: Callable[[str, Connection], None], directory: Path) -> Iterator[tuple[int, object]]:
    """Its process id, and what it said once it was ready."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    one = CONTEXT.Process(target=target, args=(str(directory), sender))
    one.start()
    try:
        assert receiver.poll(60)
        assert one.pid is not None
        yield one.pid, receiver.recv()
    finally:
        one.kill()
        one.join()


@contextmanager
def bystander(*arguments: str) -> Iterator[int]:
    """A process that knows nothing of us."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        one.stdout.readline()
        try:
            yield one.pid
        finally:
            one.kill()


def asked(directory: Path, *families: list[int]) -> dict[int, str]:
    answers: dict[int, str] = {}
    for some in python_stacks(families, directory, end=time.monotonic() + 30):
        answers |= some
    return answers


def test_a_worker_and_its_forked_child_answer_each_for_itself(tmp_path: Path) -> None:
    with process(with_a_child, tmp_path) as (pid, child):
        assert isinstance(child, int)
        try:
            answers = asked(tmp_path, [pid, child])
            assert "in with_a_child" in answers[pid] and "in wait_for_ever" in answers[pid]
            assert "in wait_in_the_child" in answers[child] and "in wait_for_ever" not in answers[child]
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_one_answers_and_is_stopped_again(tmp_path: Path) -> None:
    with process(answering, tmp_path) as (pid, _):
        os.kill(pid, signal.SIGSTOP)
        while kernel.state(pid) != kernel.STOPPED:
            time.sleep(0.01)
        assert "in wait_for_ever" in asked(tmp_path, [pid])[pid]
        end = time.monotonic() + 10
        while kernel.state(pid) != kernel.STOPPED:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_who_does_not_answer_costs_its_deadline_once(tmp_path: Path) -> None:
    with process(deaf, tmp_path) as (one, _), process(deaf, tmp_path) as (two, _):
        begun = time.monotonic()
        answers = asked(tmp_path, [one], [two])
        assert time.monotonic() - begun < 2 * ANSWER
        assert set(answers.values()) == {f"(no answer within {ANSWER:g} s)"}


def test_no_process_is_asked_that_would_die_of_it(tmp_path: Path) -> None:
    with bystander() as pid:
        assert "cannot be asked" in asked(tmp_path, [pid])[pid]
        assert kernel.state(pid) in "SR"


def test_a_programs_own_handler_is_neither_replaced_nor_called(tmp_path: Path) -> None:
    with process(with_its_own_handler, tmp_path) as (pid, _):
        assert stacks.catches(pid, stacks.REQUEST)
        assert "cannot be asked" in asked(tmp_path, [pid])[pid]
        os.kill(pid, stacks.REQUEST)
        end = time.monotonic() + 10
        while not (tmp_path / "called").exists():
            assert time.monotonic() < end, "its handler is gone"
            time.sleep(0.01)


def test_nothing_is_registered_without_an_agent() -> None:
    stacks.answer_requests(None)
    assert not stacks.catches(os.getpid(), stacks.REQUEST)


def test_a_bundle_has_a_summary_and_a_file_for_each_process(tmp_path: Path) -> None:
    record = tmp_path / "trace_rank_4"
    record.write_bytes(b"flight")
    with process(answering, tmp_path) as (one, _), bystander("--password=secret") as two:
        prefix = str(tmp_path / "trace_rank_")
        bundle = evidence.gather(tmp_path, {0: one, 1: two}, HANG, heartbeats=["beat"], flight_recorder=prefix)
    assert bundle.parent == tmp_path / "evidence" / "000003"
    files = {file.name: file.read_text() for file in bundle.iterdir()}
    names = [f"local-rank-0-worker-{one}.txt", f"local-rank-1-worker-{two}.txt"]
    assert set(files) == {"summary.txt", "flight-trace_rank_4", *names}
    summary = files["summary.txt"].splitlines()
    assert summary[0].startswith("HANG on ") and summary[0].endswith("attempt 3") and summary[2] == HANG.reason
    assert re.search(r"local rank 0 waits for nobody: [SR]; .*wait_for_ever \(test_evidence.py:", files["summary.txt"])
    assert "in wait_for_ever" in files[names[0]] and "State: " in files[names[1]]
    assert not any("secret" in text for text in files.values()), "command lines may hold secrets"


def peers(*files: str) -> str:
    frames = "".join(f'  File "{file}", line 1 in f\n' for file in files)
    return f"Current thread 0x1 (most recent call first):\n{frames}"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_where_all_wait_the_one_that_hangs_is_elsewhere(
    tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = peers("/site-packages/torch/distributed/distributed_c10d.py", "/train.py")
    with bystander() as one, bystander() as two:
        answers = {one: waits, two: waits if elsewhere else peers("/train.py")}
        monkeypatch.setattr(evidence, "python_stacks", lambda *_, **__: iter([answers]))
        summary = (evidence.gather(tmp_path, {0: one, 1: two}, HANG) / "summary.txt").read_text()
    assert ("on another node" in summary) == elsewhere
    assert ("local rank 1 waits for nobody" in summary) == (not elsewhere)


def test_workers_that_are_gone_leave_a_bundle_nevertheless(tmp_path: Path) -> None:
    with bystander() as pid:
        pass
    summary = (evidence.gather(tmp_path, {0: pid}, HANG) / "summary.txt").read_text()
    assert f"local rank 0 pid {pid}: gone; (cannot be asked" in summary


def test_a_part_that_hangs_or_fails_does_not_fail_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(kernel, "describe", lambda pid: never.wait())
    monkeypatch.setattr(evidence, "_node", lambda: 1 / 0)
    monkeypatch.setattr(evidence, "python_stacks", lambda *_, **__: 1 / 0)
    try:
        with bystander() as pid:
            bundle = evidence.gather(tmp_path, {0: pid}, HANG)
    finally:
        never.set()
    assert HANG.reason in (bundle / "summary.txt").read_text()
    assert "not readable in time" in (bundle / f"local-rank-0-worker-{pid}.txt").read_text()


def test_py_spy_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "py-spy"
    fake.parent.mkdir()
    said = ["Process $4: python -c 'first", "--password=secret'", "Python v3.11.7", "spied on $4 by $1 $2"]
    fake.write_text("\n".join(["#!/bin/sh", *(f'echo "{line}"' for line in said)]))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with bystander() as pid:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # none is beside it
        bundle = evidence.gather(tmp_path, {0: pid}, HANG)
    text = (bundle / f"local-rank-0-worker-{pid}.txt").read_text()
    assert f"spied on {pid} by dump --nonblocking" in text and "secret" not in text
