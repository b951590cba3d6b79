"""Notices to stop, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from elastic_runner.worker.signals import NOTICES, StopNotice

# Sends itself the signals of each line that it reads ("+0.1": a pause), and answers with what it knows.
CHILD = """
import os, signal, sys, time
from elastic_runner.worker.signals import StopNotice
notice = StopNotice()
notice.install()
print("ready", flush=True)
for line in sys.stdin:
    for word in line.split():
        time.sleep(float(word[1:])) if word[0] == "+" else os.kill(os.getpid(), int(word))
    print(notice.received, flush=True)
"""


class Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate()


@pytest.mark.parametrize("number", NOTICES)
def test_first_notice_only_sets_the_flag(child: Child, number: signal.Signals) -> None:
    assert child.signal(int(number)) == number.name


def test_two_signals_at_once_are_one_notice(child: Child) -> None:
    """A terminal and an agent both pass on Ctrl-C."""
    assert child.signal(int(signal.SIGINT), "+0.05", int(signal.SIGTERM)) == "SIGINT"
    assert child.process.poll() is None


def test_second_notice_leaves_at_once_with_75(child: Child) -> None:
    """c26."""
    assert child.signal(int(signal.SIGTERM), "+1.2", int(signal.SIGTERM)) == ""
    _, errors = child.process.communicate(timeout=10)
    assert child.process.returncode == 75
    assert "second notice" in errors


def test_restore_puts_back_what_was_there() -> None:
    def handlers() -> list[Callable[..., object] | int | None]:
        return [signal.getsignal(number) for number in NOTICES]

    before, notice = handlers(), StopNotice()
    notice.install()
    assert handlers() != before
    notice.restore()
    assert handlers() == before


def test_another_thread_installs_nothing() -> None:
    """signal.signal would raise there; a notebook or a server may train in a thread."""
    before, errors = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        try:
            notice = StopNotice()
            notice.install()
            notice.restore()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_notice_is_no_impatience(child: Child) -> None:
    """Schedulers warn by SIGUSR1 and follow with SIGTERM while the save goes on."""
    assert child.signal(int(signal.SIGUSR1), "+0.4", int(signal.SIGTERM)) == "SIGUSR1"
    assert child.process.poll() is None
