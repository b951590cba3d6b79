"""Standby workers: the next ones are there already, as good as others, and nothing depends on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.launch import kernel
from elastic_runner.launch.forking import ForkedProcess, ForkServer
from elastic_runner.launch.processes import children, descendants
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.agents import SCRIPT
from tests.support.waiting import eventually

DEVICES = """
import os, pathlib, time
from elastic_runner import device

def open_device(local_rank):
    os.fstat(0)  # else what a driver opens would be taken for the standard input
    pathlib.Path(os.environ["OPENED"], f"{os.getpid()} {local_rank}").touch()
    if os.environ.get("DEVICE") == "broken":
        raise RuntimeError("it fell off the bus")
    if os.environ.get("DEVICE") == "slow":
        time.sleep(600)

device.open_device = open_device
"""
"""A module that puts this in the place of opening a device."""

SAYS = """
import os, signal, sys
print(os.environ["LOCAL_RANK"], os.environ["ROUND"], sys.argv[1:], os.getsid(0) == os.getpid(), sys.stdin.read() == "")
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, __name__)
signal.pause()
"""


def opened(directory: Path) -> dict[int, int]:
    """Local ranks whose devices are open, by the process that has opened it and waits now."""
    seen = dict(map(int, path.name.split()) for path in (directory / "opened").iterdir())
    return {pid: rank for pid, rank in seen.items() if kernel.state(pid) == "S"}


def is_gone(pid: int) -> bool:
    return kernel.state(pid) in kernel.ENDED


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``opened`` looks."""
    (tmp_path / "opened").mkdir()
    (tmp_path / "devices.py").write_text(DEVICES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OPENED", str(tmp_path / "opened"))
    return tmp_path


class Node:
    """A fork server and its workers, without an agent."""

    def __init__(self, directory: Path) -> None:
        self.server = ForkServer(["devices"], standby=True)
        self.directory = directory
        self._script = directory / "says.py"
        self._script.write_text(SAYS)

    def start(self, *, rank: int = 0, round: int = 1, **env: str) -> ForkedProcess:
        told = {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
        told |= {"MASTER_PORT": "1", "LOCAL_RANK": str(rank), "ROUND": str(round), **env}
        output = str(self.directory / f"output-{rank}-{round}")
        command = [sys.executable, "-u", str(self._script), str(round)]
        return self.server.spawn(command, told, local_rank=rank, stdout=output, stderr=output)

    def said(self, rank: int, round: int) -> str:
        path = self.directory / f"output-{rank}-{round}"
        eventually(lambda: path.exists() and path.read_text().count("\n") == 2, "what it says")
        return path.read_text()

    def standbys(self, *ranks: int, **env: str) -> dict[int, int]:
        """Those that are ready for these local ranks, by rank, while the workers of a first round run."""
        workers = [self.start(rank=rank, **env) for rank in ranks]
        self.server.prepare(ranks)
        ready = eventually(lambda: len(opened(self.directory)) == len(ranks) and opened(self.directory), "standbys")
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            assert worker.wait(60) == -signal.SIGKILL
        return {rank: pid for pid, rank in ready.items()}


@pytest.fixture
def node(devices: Path) -> Iterator[Node]:
    node = Node(devices)
    try:
        yield node
    finally:
        node.server.close()


def test_a_standby_becomes_the_next_worker_of_its_local_rank(node: Node) -> None:
    """Another round is like the first one, for which workers were forked when they were needed."""
    standbys = node.standbys(0, 1)
    node.server.sweep()
    workers = {rank: node.start(rank=rank, round=2) for rank in (1, 0)}
    assert {rank: worker.pid for rank, worker in workers.items()} == standbys
    for rank, worker in workers.items():
        assert node.said(rank, 2) == f"{rank} 2 ['2'] True True\nTrue __main__\n"
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("what", ["killed", "stopped", "broken", "slow"])
def test_a_standby_that_is_not_ready_is_replaced(what: str, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    if what == "broken":
        node.start(DEVICE=what)
        node.server.prepare([0])
        pid = node.server._server.standbys[0]
        eventually(lambda: is_gone(pid), "its end")
    else:
        pid = node.standbys(0, DEVICE=what)[0]
        if what in ("killed", "stopped"):
            os.kill(pid, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[what])
    worker = node.start(round=2)
    assert worker.pid != pid and node.said(0, 2).startswith("0 2 ['2'] True")
    assert caplog.messages.count("local rank 0: its standby worker was not ready, another one is forked") == 1
    eventually(lambda: is_gone(pid), "the end of the standby")
    assert worker.poll() is None


def test_standbys_that_no_round_takes_end_with_the_next_one(node: Node) -> None:
    """The node may have fewer workers by then; and with the server, the last ones do."""
    first = node.standbys(0, 1)
    assert node.start(rank=0, round=2).pid == first[0]
    node.server.prepare([0])
    (last,) = eventually(lambda: opened(node.directory).keys() - first.values(), "the next standby")
    node.server.sweep()
    eventually(lambda: is_gone(first[1]), "the end of the one that was not taken")
    assert not is_gone(last)
    node.server.close()
    assert is_gone(last)


def test_a_killed_server_takes_its_standbys_with_it(node: Node) -> None:
    pid = node.standbys(0)[0]
    os.kill(node.server._server.pid, signal.SIGKILL)
    assert node.start(round=2).pid != pid and node.said(0, 2)
    eventually(lambda: is_gone(pid), "the end of the standby")
    node.server.prepare([0])
    assert eventually(lambda: opened(node.directory), "a standby of the new server").keys() != {pid}


def test_where_workers_are_not_forked_there_are_no_standbys(node: Node) -> None:
    process = node.server.spawn(["/bin/sleep", "600"], dict(os.environ), local_rank=0)
    node.server.prepare([0])
    assert children(node.server._server.pid) == [process.pid]


def launched(devices: Path) -> ObservedRun:
    """Steps take 0.1 s each, until there is a file ``hurry`` in the run directory."""
    (devices / "script.py").write_text(SCRIPT)
    script = (str(devices / "script.py"), "--training.max-steps", "600", "--checkpoint.every", "1000")
    batch = ("--data.global-batch", "8", "--data.shards", "4")
    return ObservedRun(devices / "run", launch_command(2, "--standby", "--preload=devices", *script, *batch))


def ready(run: ObservedRun, devices: Path, earlier: Iterable[int] = ()) -> dict[int, int]:
    """As ``opened``, once each of the two workers has a standby, others than the ``earlier`` ones."""

    def both() -> dict[int, int]:
        assert run.process.poll() is None, run.log.read_text()
        found = {pid: rank for pid, rank in opened(devices).items() if pid not in earlier}
        return found if sorted(found.values()) == [0, 1] else {}

    return eventually(both, "standbys", seconds=60)


def test_after_a_kill_the_standbys_train_on(devices: Path) -> None:
    """No step is lost, the next standbys are made, and none is left in the end."""
    with launched(devices) as run:
        first = ready(run, devices)
        assert not first.keys() & {worker["pid"] for worker in run.workers()}
        run.kill(1)
        others = ready(run, devices, earlier=first)
        assert [first[worker["pid"]] for worker in run.workers()] == [0, 1]
        (run.run_dir / "hurry").touch()
        assert run.process.wait(60) == 0, run.log.read_text()
        assert all(map(is_gone, others))
        assert "standby worker was not ready" not in run.log.read_text()
    summary = read_summary(LocalStorage(run.run_dir))
    assert summary is not None
    assert (summary.status, summary.step, summary.restarts, summary.lost_steps) == ("finished", 600, 1, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
def test_no_standby_outlives_its_agent(number: signal.Signals, code: int, devices: Path) -> None:
    with launched(devices) as run:
        standbys = ready(run, devices)
        family = descendants(run.process.pid)
        try:
            assert standbys.keys() < set(family)
            run.process.send_signal(number)
            assert run.process.wait(60) == code, run.log.read_text()
            eventually(lambda: all(map(is_gone, family)), "the end of all")
        finally:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_standbys_and_a_new_interpreter_do_not_go_together(tmp_path: Path) -> None:
    command = launch_command(1, "--standby", "--start-by=exec", "s.py")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "--standby is for workers that are started by fork, not with --start-by exec" in result.stderr
