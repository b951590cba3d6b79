"""Our agent: what it makes of notices, of a node that is asked to stop, and of failures that no restart cures."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import ObservedRun, kill_tree, launch_command
from elastic_runner.history import read_ends
from elastic_runner.launch.processes import descendants
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.agents import LAUNCH, SCRIPT, STEPS, Job
from tests.support.ports import free_port

FAILS = SCRIPT.replace(
    "        step.optimize()\n",
    "        if step.number == 12 and worker.rank == 1:\n"
    "            raise ValueError('this sample again')\n"
    "        step.optimize()\n",
)
COUNTS = """
import os, pathlib, signal, sys, time
directory = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
directory.mkdir(exist_ok=True)
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
(directory / f"{count}-{rank}").touch()
if count == "0":
    if rank == "1":
        while not (directory / "0-0").exists():
            time.sleep(0.01)
        sys.exit(5)
    time.sleep(600)
if count == "1" and rank == "0":
    while not (directory / "1-1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if count == "1":
    time.sleep(600)
"""


@pytest.mark.parametrize("back", ["at once", "later"])
def test_a_node_that_is_asked_to_stop_leaves_and_the_rest_goes_on(back: str, tmp_path: Path) -> None:
    """Case c11: leaving is not closing. No step is lost, and it may come back, before the rest has gone on or after."""
    with Job(tmp_path, "1:2", LAUNCH) as job:
        job.start(2)
        first = job.wait_for_world(2)
        leaving = job.others()[0]
        os.kill(leaving.pid, signal.SIGTERM)
        assert leaving.wait(60) == 75, job.logs()
        last = job.wait_for_world(1, after=first) if back == "later" else first
        job.start()
        job.wait_for_world(2, after=last)
        (tmp_path / "run" / "hurry").touch()
        assert [agent.wait(120) for agent in job.agents if agent is not leaving] == [0, 0], job.logs()
        steps = [record["step"] for record in job.records()]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert "asked to stop (SIGTERM); saved at step" in job.log(job.agents.index(leaving)).read_text()


@pytest.mark.parametrize("how", ["threading.Event().wait()", "os.abort()"], ids=["hangs", "is killed"])
def test_a_run_that_is_done_and_saved_is_finished_however_a_worker_leaves(how: str, tmp_path: Path) -> None:
    """Case c15: what comes after the goal does not make a failure, nor another attempt, of it."""
    script = tmp_path / "script.py"
    leaves = f"import threading, elastic_runner.worker.worker as module\nmodule.leave = lambda groups: {how}\n"
    script.write_text(SCRIPT.replace("\nconfig = ", f"\n{leaves}config = "))
    flags = ("--training.max-steps", "3", "--data.global-batch", "8", "--timeouts.teardown", "2")
    with ObservedRun(tmp_path / "run", launch_command(2, "--max-restarts=0", str(script), *flags)) as run:
        assert run.process.wait(60) == 0, run.log.read_text()
    summary = read_summary(LocalStorage(tmp_path / "run"))
    assert summary is not None and (summary.status, summary.step, summary.attempt) == ("finished", 3, 1)


def test_what_no_restart_cures_ends_all_nodes_with_the_same_words(tmp_path: Path) -> None:
    """Cases c04 and c08: the same step fails again and again; the nodes stop together, naming step and samples."""
    with Job(tmp_path, "2", LAUNCH, FAILS) as job:
        job.start(2)
        assert [agent.wait(180) for agent in job.agents] == [3, 3], job.logs()
    said = "step 12 (epoch 0, positions 88 to 95) has failed 5 times in the same way: rank 1: ValueError: this sample"
    for index in range(2):
        assert f"elastic-runner: do_not_retry (3): {said}" in job.log(index).read_text()
    ends = read_ends(LocalStorage(tmp_path / "run"))
    assert [(end.kind, end.step, end.rank) for end in ends] == [("ValueError", 12, 1)] * 5


def test_attempts_have_the_same_number_on_all_nodes(tmp_path: Path) -> None:
    """Case c01: whichever node's worker fails."""
    with Job(tmp_path, "2", LAUNCH, COUNTS) as job:
        job.start(2)
        assert [agent.wait(60) for agent in job.agents] == [0, 0], job.logs()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


def test_a_budget_is_the_job_s_whichever_node_s_worker_fails(tmp_path: Path) -> None:
    """Case c01: one failure on each of two nodes is two, and both say the same."""
    killed = "        step.number == 3 and worker.rank == worker.attempt % 2 and os.kill(os.getpid(), 9)\n"
    script = SCRIPT.replace("        step.optimize()\n", killed + "        step.optimize()\n")
    with Job(tmp_path, "2", (*LAUNCH, "--max-restarts=1"), script) as job:
        job.start(2)
        assert [agent.wait(60) for agent in job.agents] == [1, 1], job.logs()
        said = "elastic-runner: failed (1): 1 of 1 restarts after a crash are used, without progress ("
        last = [[line for line in job.log(node).read_text().splitlines() if said in line] for node in range(2)]
    assert len(last[0]) == 1 and last[0] == last[1], job.logs()


FAILS_IN_TURN = """
import os, sys
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if count % 2 == int(os.environ["RANK"]):
    sys.exit(10 + count)
import time
time.sleep(600)  # until it is ended: the other one has failed
"""


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_budget_is_the_job_s_where_no_run_directory_is_known(allowed: int, tmp_path: Path) -> None:
    """Case c01: a script without er.Worker, which fails on the two nodes in turn."""
    with Job(tmp_path, "2", (*LAUNCH, f"--budget=start={allowed}"), FAILS_IN_TURN) as job:
        job.start(2)
        assert [agent.wait(60) for agent in job.agents] == [1, 1], job.logs()
        kinds = ", ".join(f"exit code {10 + count} 1" for count in range(allowed + 1))
        said = (
            f"failed (1): {allowed} of {allowed} restarts after a start are used, without progress ({kinds}); the last"
        )
        assert all(f"elastic-runner: {said}" in job.log(node).read_text() for node in range(2)), job.logs()


def test_torchrun_s_own_rendezvous_is_used_as_well(tmp_path: Path) -> None:
    """c10d, which does not tell by itself that a node waits; what is lost with it is said."""
    script = tmp_path / "script.py"
    script.write_text(COUNTS)
    command = [
        *LAUNCH, "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x",
        str(script), "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    agents = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=120)[1] for agent in agents]
    finally:
        for agent in agents:
            kill_tree(agent.pid)
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert all("rendezvous c10d: whatever hosts its store must not be lost" in each for each in said)


DIGITS = ("-m", "elastic_runner.recipes.digits", "--training.max-steps", "4000", "--checkpoint.every", "1000")


@pytest.mark.parametrize("how", ["notice file", "SIGUSR1"])
def test_a_notice_saves_asks_for_a_new_start_and_leaves_nothing_behind(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice, temporary = tmp_path / "notice", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with ObservedRun(tmp_path / "run", launch_command(2, f"--notice-file={notice}", *DIGITS)) as run:
        for record in run.records():
            if record["event"] == "step" and record["step"] == 5:
                notice.touch() if how == "notice file" else os.kill(run.process.pid, signal.SIGUSR1)
        assert run.process.wait() == 75, run.log.read_text()
    assert "asked to stop (SIGUSR1); saved at step" in run.log.read_text()
    assert {left.name.partition("_")[0] for left in temporary.iterdir()} <= {"torchinductor"}, "torch's cache"


def test_a_killed_or_stopped_worker_costs_no_step(tmp_path: Path) -> None:
    """No checkpoint is near: what was done is in the node's memory. A frozen worker is noticed, and why is kept."""
    command = launch_command(2, *DIGITS[:-3], "120", *DIGITS[-2:])
    with ObservedRun(tmp_path / "run", command) as run:
        faults = {20: (1, signal.SIGKILL), 50: (0, signal.SIGSTOP), 80: (0, signal.SIGKILL)}
        done = []
        for record in run.records():
            if record["event"] == "step":
                done.append(record["step"])
                if fault := faults.pop(record["step"], None):
                    run.kill(*fault)
        assert run.process.wait() == 0, run.log.read_text()
    assert done == list(range(1, 121)), "each step is on the ledger once, in order: none was lost"
    assert run.log.read_text().count("from memory") == 3
    ends = read_ends(LocalStorage(tmp_path / "run"))
    assert [(end.kind, end.rank) for end in ends] == [("SIGKILL", 1), ("Hang", 0), ("SIGKILL", 0)]
    (summary,) = (tmp_path / "run" / "evidence").rglob("summary.txt")
    assert "rank 0 is stopped by a signal" in summary.read_text()


@pytest.mark.parametrize("how", ["--redirects", "--tee"])
def test_each_attempt_and_rank_has_a_log_and_the_guilty_one_is_shown(how: str, tmp_path: Path) -> None:
    """Case c68: nothing of a failed attempt is written over; what goes to the console as well says where it is from."""
    script = tmp_path / "speaks.py"
    script.write_text(
        "import os, sys\n"
        "count, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "print(f'{rank} in {count}', flush=True)\n"
        "if (count, rank) == ('0', '1'):\n"
        "    raise ValueError('the reason')\n"
    )
    flags = ("--log-dir", str(tmp_path / "logs"), how, "3")
    result = subprocess.run(launch_command(2, *flags, str(script)), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "1/stderr.log:\nTraceback" in result.stderr and "ValueError: the reason" in result.stderr
    for attempt in range(2):
        for rank in range(2):
            (log,) = (tmp_path / "logs").rglob(f"attempt_{attempt}/{rank}/stdout.log")
            if (attempt, rank) != (0, 0):  # which was killed, perhaps sooner than it could speak
                assert log.read_text() == f"{rank} in {attempt}\n"
    console = [f"[{socket.gethostname()}:{rank}] {rank} in 1" for rank in range(2)] if how == "--tee" else []
    assert sorted(line for line in result.stdout.splitlines() if line.endswith("in 1")) == console


def test_launchers_that_start_together_leave_each_other_s_directories_alone(tmp_path: Path) -> None:
    """Each sweeps what killed ones have left."""
    (tmp_path / "elastic-runner-agent-left").mkdir()
    script = (
        "import os\n"
        "from elastic_runner.launch.launcher import _agent_directory\n"
        "def start_and_end():\n"
        "    for _ in range(200):\n"
        "        with _agent_directory() as directory:\n"
        "            (directory / 'used').touch()\n"
        "children = []\n"
        "for _ in range(4):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        start_and_end()\n"
        "        os._exit(0)\n"
        "    children.append(pid)\n"
        "assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_workers_have_started_does_not_outlive_their_attempt(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys, time, pathlib\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    pathlib.Path('pid').write_text(str(child.pid))\n"
        "    sys.exit(9)\n"
        "time.sleep(600)\n"
    )
    agent = subprocess.Popen(launch_command(1, str(script)), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert agent.stderr is not None
        line = next(line for line in agent.stderr if "attempt 1 is over" in line)
        assert f"rank 0 on {socket.gethostname()} ended with exit code 9" in line
        pid = int((tmp_path / "pid").read_text())
        end = time.monotonic() + 60
        while pid in descendants(agent.pid):
            assert time.monotonic() < end, "left behind"
            time.sleep(0.01)
    finally:
        kill_tree(agent.pid)
        agent.wait()
