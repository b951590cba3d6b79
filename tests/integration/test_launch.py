"""The three ways to start a run, each with the same recipe, killed from outside and finished."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import Tally, tally
from elastic_runner.errors import ExitCode
from elastic_runner.observability.summary import RunSummary
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.agents import SCRIPT

STEPS = 60
RECIPE = ("-m", "elastic_runner.recipes.digits", "--training.max-steps", str(STEPS), "--checkpoint.every", "10")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3")
PYTHON = (sys.executable,)


def outcome(run_dir: Path) -> tuple[RunSummary, Tally]:
    storage = LocalStorage(run_dir)
    summary = read_summary(storage)
    assert summary is not None
    return summary, tally(effective(read_records(storage))[0])


def run_and_kill(
    run_dir: Path, command: Sequence[str], *, rank: int, after: int, number: signal.Signals = signal.SIGKILL
) -> tuple[int, str]:
    """Start, send a signal to a worker once ``after`` steps are on record, and wait for the launcher's end."""
    with ObservedRun(run_dir, command) as run:
        sent = False
        for record in run.records():
            if not sent and record["event"] == "step" and record["step"] >= after:
                run.kill(rank, number)
                sent = True
        assert sent, run.log.read_text()
        return run.process.wait(), run.log.read_text()


def assert_complete(run_dir: Path, *, restarts: int) -> None:
    summary, counts = outcome(run_dir)
    assert (summary.status, summary.step, summary.restarts) == ("finished", STEPS, restarts)
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped) == (STEPS, 0, 0, 0)
    assert summary.validation["accuracy"] > 0.9


@pytest.mark.parametrize(
    "start", [lambda: launch_command(2, *RECIPE), lambda: [*TORCHRUN, *RECIPE]], ids=["launch", "torchrun"]
)
def test_a_killed_worker_is_restarted_and_the_run_finishes(start: Callable[[], list[str]], tmp_path: Path) -> None:
    code, log = run_and_kill(tmp_path, start(), rank=1, after=23)
    assert code == 0, log
    assert_complete(tmp_path, restarts=1)
    assert "restored step" in log


def test_plain_python_killed_and_started_again(tmp_path: Path) -> None:
    command = [*PYTHON, *RECIPE]
    code, log = run_and_kill(tmp_path, command, rank=0, after=23)
    assert code == -signal.SIGKILL, log
    again = subprocess.run([*command, "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert_complete(tmp_path, restarts=1)


def test_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    """Case c09: exit 0, one line, nothing rewritten; a raised target continues."""
    command = [*PYTHON, "-m", "elastic_runner.recipes.digits", "--run-dir", str(tmp_path), "--training.max-steps"]
    subprocess.run([*command, "10"], check=True, capture_output=True, timeout=120)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = subprocess.run([*command, "10"], check=True, capture_output=True, text=True, timeout=120)
    assert "is finished: step 10 of 10" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    subprocess.run([*command, "15"], check=True, capture_output=True, timeout=120)
    summary, counts = outcome(tmp_path)
    assert (summary.step, counts.steps, counts.gaps, counts.repeated) == (15, 15, 0, 0)


def test_restarts_used_up_is_a_failure_that_the_summary_tells(tmp_path: Path) -> None:
    """Cases c06 and c08: exit code and status file carry the failure, also when the worker could not say it itself."""
    command = launch_command(2, "--max-restarts=0", *RECIPE)
    code, log = run_and_kill(tmp_path, command, rank=1, after=5)
    assert code == 1
    summary, _ = outcome(tmp_path)
    assert summary.status == "failed" and summary.message in log
    host = re.escape(socket.gethostname())
    assert re.search(rf"rank 1 on {host} was killed by SIGKILL in phase \w+ after step \d+", summary.message)


def test_the_summary_tells_the_cause_though_a_survivor_has_told_what_followed(tmp_path: Path) -> None:
    """Case c08: in the first attempt rank 0 has time to record that its peer is lost; in the second nobody begins."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib\n"
        "again = pathlib.Path(__file__).with_name('again')\n"
        "if os.environ['RANK'] == '1' and again.exists(): os._exit(8)\n"
        + SCRIPT.replace("step.optimize()", "again.touch(), worker.rank and os._exit(7); step.optimize()")
    )
    run_dir = tmp_path / "run"
    command = [*launch_command(2, "--max-restarts=1", str(script)), "--run-dir", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == ExitCode.DO_NOT_RETRY, result.stderr
    assert "PeerLost" in result.stderr
    summary, _ = outcome(run_dir)
    assert summary.status == "failed" and f": {summary.message}\n" in result.stdout
    assert f"rank 1 on {socket.gethostname()} ended with exit code 8" in summary.message


def test_terminating_the_launcher_saves_and_asks_for_a_new_start(tmp_path: Path) -> None:
    command = launch_command(2, *RECIPE)
    with ObservedRun(tmp_path, command) as run:
        for record in run.records():
            if record["event"] == "step" and record["step"] == 13:
                run.process.send_signal(signal.SIGTERM)
        assert run.process.wait() == 75, run.log.read_text()
    summary, _ = outcome(tmp_path)
    assert summary.status == "interrupted" and 13 <= summary.step < STEPS
    finish = subprocess.run([*command, "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert finish.returncode == 0, finish.stderr
    assert_complete(tmp_path, restarts=1)
    assert outcome(tmp_path)[0].lost_steps == 0


def test_wrong_flag_is_one_readable_message_and_exit_code_2(tmp_path: Path) -> None:
    result = subprocess.run(
        launch_command(2, "--max-restarts=0", *RECIPE, "--training.max-stps", "3"),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("Unrecognized options: --training.max-stps") == 1
    assert "--training.max-steps" in result.stderr


@pytest.mark.parametrize("whom", ["launcher", "worker"])
def test_a_warning_by_usr1_ends_the_job_saved_and_without_a_restart(whom: str, tmp_path: Path) -> None:
    """Schedulers send it to one or the other; torch's agent would die of it, or count a failure."""
    with ObservedRun(tmp_path, launch_command(2, *RECIPE)) as run:
        for record in run.records():
            if record["event"] == "step" and record["step"] == 13:
                if whom == "worker":
                    run.kill(1, signal.SIGUSR1)
                else:
                    run.process.send_signal(signal.SIGUSR1)
        assert run.process.wait() == 75, run.log.read_text()
    summary, _ = outcome(tmp_path)
    assert (summary.status, summary.attempt) == ("interrupted", 1)
    assert (tmp_path / "checkpoints" / f"step-{summary.step:010d}").exists()


def test_what_no_restart_can_cure_is_tried_once(tmp_path: Path) -> None:
    """Case c02, c59: with restarts left, a wrong flag and a model that does not fit end the job at once."""
    for flags, code, word in (
        (("--training.max-stps", "3"), 2, "Unrecognized options"),
        (("--strategy.name", "fsdp", "--strategy.fsdp.wrap-classes", "Nope"), 3, "no module of class Nope"),
    ):
        command = [*launch_command(2, *RECIPE, *flags), "--run-dir", str(tmp_path / str(code))]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == code, result.stderr
        assert 1 <= result.stderr.count(word) <= 3  # once a rank at the most, and by the agent


def test_a_script_that_cannot_start_is_tried_twice(tmp_path: Path) -> None:
    """Case c02: whatever the restarts that are left. Ranks and attempts that fail alike print one traceback."""
    script = tmp_path / "script.py"
    script.write_text("import no_such_module\n")
    result = subprocess.run(launch_command(2, str(script)), capture_output=True, text=True, timeout=120)
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert result.returncode == ExitCode.DO_NOT_RETRY
    where = f'Traceback (most recent call last):\n  File "{script}", line 1, in <module>\n'
    assert result.stderr.startswith(where) and result.stderr.count("Traceback") == 1
    assert result.stderr.count(f"{error} (its traceback is above)") >= 1, "of the second attempt"
    said = rf"the same failure 2 times before a first step was done: rank [01]: {error}\n"
    assert re.search(said, result.stdout)


def test_a_full_disk_is_the_environment_s_fault(tmp_path: Path) -> None:
    """Case c25: the code that asks a scheduler for another try, and no restart of ours. What is full is a limit of the
    kernel's on the size of files; snapshots, which are files in memory, would meet it, too."""
    script = tmp_path / "script.py"
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
    script.write_text(full + SCRIPT)
    flags = ("--checkpoint.every", "1", "--snapshot.no-enabled", "--data.global-batch", "8", "--data.shards", "4")
    with ObservedRun(tmp_path / "run", launch_command(1, str(script), *flags)) as run:
        assert run.process.wait(60) == ExitCode.FAILED, run.log.read_text()
    assert "elastic-runner: failed (1): rank 0: StorageFull: 4 saves in a row have failed" in run.log.read_text()
    assert outcome(tmp_path / "run")[0].attempt == 1


def test_a_busy_port_starts_no_worker(tmp_path: Path) -> None:
    """Case c12: it is a wrong command line, and no failed attempt."""
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')\n")
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        flags = ("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}")
        result = subprocess.run(launch_command(1, *flags, str(script)), capture_output=True, text=True, timeout=60)
    assert result.returncode == ExitCode.USAGE, result.stderr
    assert f"--master-port {port} of 127.0.0.1: Address already in use" in result.stdout + result.stderr
    assert "attempt" not in result.stderr and not (tmp_path / "started").exists()


def test_a_value_that_torchrun_cannot_use_is_a_usage_error() -> None:
    result = subprocess.run(
        [*launch_command(2, "--nnodes=x", *RECIPE)], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.slow
def test_restarts_without_progress_are_counted_across_starts(tmp_path: Path) -> None:
    """As a requeued job starts again: what it has used up is not given back."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("step.optimize()", "step.optimize(); step.number < 2 or os.kill(os.getpid(), 9)"))
    flags = ["--run-dir", str(tmp_path / "run"), "--data.global-batch", "8", "--data.shards", "4"]
    for allowed, failures in ((1, 2), (3, 4)):
        command = [*launch_command(1, f"--max-restarts={allowed}", str(script)), *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == ExitCode.FAILED, result.stdout + result.stderr
        assert len(list((tmp_path / "run" / "attempts").glob("*-end.json"))) == failures
