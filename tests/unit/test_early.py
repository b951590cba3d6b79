"""A notice to a launcher that waits for other nodes in a way that has no ear for it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from elastic_runner.errors import ExitCode
from elastic_runner.launch import kernel
from tests.support.waiting import eventually

IN_C = """
    mutex = ctypes.create_string_buffer(256)
    pthread.pthread_mutex_lock(mutex)
    print("waits", flush=True)
    pthread.pthread_mutex_lock(mutex)
"""
IN_PYTHON = """
    with suppress(BaseException):
        print("waits", flush=True)
        time.sleep(600)
    time.sleep(600)
"""
WAITS = """
import ctypes, time
from contextlib import suppress
from elastic_runner.launch import early
early._ACTING = 0.1
pthread = ctypes.CDLL(None)
early.leave_when_asked()
with early.leaving_anyway():
"""


@pytest.mark.parametrize("where", [IN_C, IN_PYTHON], ids=["where no handler is run", "where what it raises is lost"])
def test_a_notice_without_an_effect_ends_the_launcher(where: str) -> None:
    """Case c18: torch's static rendezvous, and its old one by etcd."""
    with subprocess.Popen([sys.executable, "-c", WAITS + where], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            eventually(lambda: kernel.state(process.pid) == "S", "it asleep")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == ExitCode.INTERRUPTED
            said = process.stdout.read()
        finally:
            process.kill()
    assert said == "elastic-runner: interrupted (75): SIGTERM: stopped before there were workers\n"


def test_a_notice_that_is_heard_is_left_to_whoever_hears_it() -> None:
    """Workers have come meanwhile, or the launcher is about to end with another verdict."""
    script = """
    early.stay(print)
    looked, look = threading.Semaphore(0), signal.getsignal
    signal.getsignal = lambda number: (looked.release(), look(number))[1]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(number)
        looked.acquire()  # the second time it has stayed after the first
"""
    command = [sys.executable, "-c", "import signal, threading" + WAITS + script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "15\n10\n"), result.stderr
