"""The launcher as the first process of a container: nobody else reaps orphans, and no signal has a default action.

Needs root, for a process namespace. Case c25.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import kill_tree
from elastic_runner.launch.processes import children
from tests.support.waiting import eventually

TOOLS = ("unshare", "nsenter")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs root and {', '.join(TOOLS)}"
)

SCRIPT = """
import os, pathlib, signal, subprocess, sys, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
subprocess.run(["sh", "-c", "setsid sleep 0.1 & setsid sleep 1000 &"])  # orphans: one ends, one has to be ended
pathlib.Path(sys.argv[1]).touch()
asked.wait()
sys.exit(75)
"""
SLOW_TORCH = """
import pathlib, signal
pathlib.Path(__file__).with_name("importing").touch()
while True:
    try:
        signal.pause()
    except BaseException:  # as C code does, that imports numpy
        pass
"""


@contextmanager
def container(directory: Path, *arguments: str, path: str = "") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``elastic-runner launch`` as process 1 of a namespace: the process around it, and its pid seen from here."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-m", "elastic_runner"]
    with (directory / "log").open("wb") as log:
        around = subprocess.Popen(
            [*command, "launch", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: children(around.pid), "its process", seconds=60)
        (launcher,) = children(around.pid)
        yield around, launcher
    finally:
        kill_tree(around.pid)
        around.wait()


def inside(launcher: int, *command: str) -> str:
    return subprocess.run(
        ["nsenter", "--target", str(launcher), "--pid", "--mount", *command],
        check=True, capture_output=True, text=True, timeout=30,
    ).stdout  # fmt: skip


def sleepers(launcher: int) -> list[str]:
    """State of each ``sleep`` in the namespace; Z: it has ended, and nobody has taken it in."""
    lines = inside(launcher, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null; true").splitlines()
    return [line.split()[2] for line in lines if line.split()[1] == "(sleep)"]


def test_it_reaps_orphans_and_hands_a_signal_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    started = tmp_path / "started"
    with container(tmp_path, str(tmp_path / "script.py"), str(started)) as (around, launcher):
        eventually(started.exists, "a worker", seconds=60)
        inside(launcher, "sh", "-c", "sleep 0.1 & exit 0")  # as what comes by kubectl exec
        eventually(lambda: sleepers(launcher) == ["S"], "the end of those that have ended", seconds=60, every=0.02)
        os.kill(launcher, signal.SIGTERM)
        assert around.wait(60) == 75, (tmp_path / "log").read_text()


def test_it_leaves_when_it_is_asked_before_there_are_workers(tmp_path: Path) -> None:
    flags = ("--nnodes=2", "--rdzv-backend=elastic", f"--rdzv-endpoint={tmp_path / 'rendezvous'}", "--rdzv-id=alone")
    with container(tmp_path, *flags, __file__) as (around, launcher):
        eventually((tmp_path / "rendezvous" / "alone" / "000001.json").exists, "an epoch", seconds=60)
        os.kill(launcher, signal.SIGTERM)
        assert around.wait(30) == 75, (tmp_path / "log").read_text()
    assert "interrupted (75): SIGTERM: stopped before there were workers" in (tmp_path / "log").read_text()


def test_it_leaves_when_it_is_asked_while_torch_is_imported(tmp_path: Path) -> None:
    torch = tmp_path / "modules" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(SLOW_TORCH)
    with container(tmp_path, "script.py", path=str(torch.parent)) as (around, launcher):
        eventually((torch / "importing").exists, "the import", seconds=60)
        os.kill(launcher, signal.SIGTERM)
        assert around.wait(30) == 75, (tmp_path / "log").read_text()
    assert "interrupted (75): SIGTERM: stopped before there were workers" in (tmp_path / "log").read_text()
