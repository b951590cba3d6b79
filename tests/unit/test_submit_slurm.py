"""Job files for SLURM: what is in them, and that those in deploy/slurm are what the command line makes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.cli.main import main
from elastic_runner.errors import ConfigError, ExitCode
from elastic_runner.launch.slurm import SlurmJob, default_file, quote, render, seconds

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"
JOB = ["submit", "slurm", "--run-dir", "runs/gpt", "--time", "1:00:00"]


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.sbatch")), ids=lambda file: file.stem)
def test_a_file_in_deploy_is_what_its_command_line_makes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = file.read_text()
    (made_by,) = [line for line in text.splitlines() if line.startswith("# elastic-runner ")]
    flags, _, command = made_by.removeprefix("# elastic-runner ").partition(" -- ")
    assert main([*shlex.split(flags), "--dry-run", "--", *shlex.split(command)]) == ExitCode.FINISHED
    assert capsys.readouterr().out == text


def test_there_is_one_for_each_kind_of_job() -> None:
    assert {file.stem for file in DEPLOY.glob("*.sbatch")} == {"plain", "elastic", "array", "preemptible"}


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:02:03", 3723), ("2-12", 216000), ("2-1:30", 178200), ("1-0:0:5", 86405)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": "4:2"}, "--nodes 4:2"),
        ({"nodes": "few"}, "--nodes few"),
        ({"time": "soon"}, "--time soon"),
        ({"time": "5"}, "too short for --notice 300"),
        ({"array": "0-3"}, r"\$SLURM_ARRAY_TASK_ID"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, str], says: str) -> None:
    job = SlurmJob(**{"run_dir": "runs/gpt", "time": "1:00:00", **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        render(job, ["train.py"], made_by="")


def test_without_a_script_there_is_no_job() -> None:
    with pytest.raises(ConfigError, match="no script"):
        render(SlurmJob(run_dir="runs/gpt", time="1:00:00"), [], made_by="")


@given(st.text(alphabet=st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20))
def test_words_reach_the_script_as_they_are(text: str) -> None:
    word = quote(f"{text}-$SLURM_JOB_ID") if "$SLURM_" not in text else quote(text)
    environment = {"SLURM_JOB_ID": "$SLURM_JOB_ID"}
    said = subprocess.run(["bash", "-c", f"printf %s {word}"], env=environment, capture_output=True, check=True).stdout
    assert said.decode().removesuffix("-$SLURM_JOB_ID") == text


@pytest.mark.parametrize(("run_dir", "kept"), [("runs/gpt", True), ("s3://bucket/gpt", False)])
def test_a_run_directory_that_is_one_gets_the_logs(run_dir: str, kept: bool) -> None:
    """Case c68: a file for each attempt and rank, besides the job's output. Torch writes no objects."""
    text = render(SlurmJob(run_dir=run_dir, time="1:00:00"), ["train.py"], made_by="")
    assert ('--log-dir="$run/logs" --tee=3 train.py' in text) == ("--tee" in text) == kept


def test_options_of_sbatch_are_added_or_replace_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    main([*JOB, "--sbatch", "account=mine", "requeue", "output=my jobs/%j", "--dry-run", "--", "train.py"])
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --account=mine" in lines
    assert [line for line in lines if line.startswith("#SBATCH --output")] == ["#SBATCH --output='my jobs/%j'"]


@pytest.mark.parametrize(
    ("run_dir", "file"),
    [
        ("runs/gpt", "runs/gpt/gpt.sbatch"),
        ("s3://bucket/gpt", "gpt.sbatch"),
        ("runs/sweep/$SLURM_ARRAY_TASK_ID", "sweep.sbatch"),
    ],
)
def test_where_the_file_goes(run_dir: str, file: str) -> None:
    assert default_file(SlurmJob(run_dir=run_dir, time="1:00:00")) == Path(file)


@pytest.mark.parametrize(
    ("sbatch", "says"), [(None, "no sbatch here"), ("echo 'Invalid account' >&2; exit 1", "Invalid account")]
)
def test_a_job_that_is_not_taken_is_said_and_its_file_kept(
    sbatch: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if sbatch is not None:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "new" / "job.sbatch"
    assert main([*JOB, "--output", str(file), "--", "train.py"]) == ExitCode.FAILED
    assert says in capsys.readouterr().err
    assert "train.py" in file.read_text()


class Batch:
    """Case c24: the job's file run by bash, with programs in SLURM's place that say in ``log`` what they were asked."""

    def __init__(self, directory: Path, srun: str, *, state: str = "RUNNING", scontrol: str = "exit 0") -> None:
        self.log = directory / "log"
        self._file = directory / "job.sbatch"
        self._file.write_text(render(SlurmJob(run_dir="runs/gpt", time="1:00:00"), ["train.py"], made_by=""))
        programs = directory / "bin"
        programs.mkdir()
        scontrol = f'echo scontrol "$@" >>{self.log}\n{scontrol}'
        for name, text in (("srun", srun), ("squeue", f"echo {state}"), ("scontrol", scontrol)):
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        self._path = f"{programs}:{os.environ['PATH']}"

    def start(self, **variables: str) -> subprocess.Popen[bytes]:
        environment = {"PATH": self._path, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", **variables}
        return subprocess.Popen(
            ["bash", self._file],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def end(self, **variables: str) -> tuple[int, str]:
        """Its code, and what was asked."""
        code = self.start(**variables).wait(30)
        return code, self.log.read_text() if self.log.exists() else ""


REQUEUED = "scontrol requeue 12\n"


@pytest.mark.parametrize(
    ("code", "restarts", "asked"),
    [
        *((code, "0", "") for code in (0, 1, 2, 3, 126, 127)),
        (75, "0", REQUEUED),
        (75, "99", REQUEUED),
        *((code, "9", REQUEUED) for code in (69, 137)),
        *((code, "10", "") for code in (69, 137)),
    ],
)
def test_a_job_is_requeued_by_its_exit_code_and_ends_with_it(
    code: int, restarts: str, asked: str, tmp_path: Path
) -> None:
    assert Batch(tmp_path, f"exit {code}").end(SLURM_RESTART_COUNT=restarts) == (code, asked)


def test_the_readme_says_the_same_of_every_code() -> None:
    table = (DEPLOY.parents[1] / "README.md").read_text()
    said = dict(re.findall(r"^\| \*\*(\d+)\*\* \|.*\| ([^|]+) \|$", table, flags=re.MULTILINE))
    assert {int(code): "requeued" in text for code, text in said.items()} == {
        code.value: code in (ExitCode.INTERRUPTED, ExitCode.UNHEALTHY_NODE) for code in ExitCode
    }


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path) -> None:
    _, asked = Batch(tmp_path, "exit 75").end(SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    assert asked == "scontrol requeue 12_3\n"


def test_a_controller_that_does_not_say_how_the_job_stands_is_asked_all_the_same(tmp_path: Path) -> None:
    assert Batch(tmp_path, "exit 75", state="").end() == (75, REQUEUED)


def test_a_job_that_slurm_is_ending_is_not_requeued(tmp_path: Path) -> None:
    assert Batch(tmp_path, "exit 75", state="COMPLETING").end() == (75, "")


@pytest.mark.parametrize("there", [True, False], ids=["refused", "no scontrol"])
def test_a_requeue_that_fails_is_said(there: bool, tmp_path: Path) -> None:
    """The agents have saved and left before."""
    batch = Batch(tmp_path, "exit 75", scontrol="exit 1")
    variables = {}
    if not there:
        (tmp_path / "bin" / "scontrol").unlink()
        (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
        variables["PATH"] = str(tmp_path / "bin")
    job = batch.start(**variables)
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, output.decode().splitlines()[-1]) == (75, "not requeued: start it again by sbatch")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_notice_is_passed_on_and_the_requeue_comes_after_the_agents_end(number: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    save = f"trap 'sleep 0.2; echo saved by USR1 >>{tmp_path}/log; exit 75' USR1"
    job = Batch(tmp_path, f"{save}\necho >{tmp_path}/ready\nwhile :; do sleep 0.05; done")
    running = job.start()
    try:
        (tmp_path / "ready").read_text()
        running.send_signal(number)
        assert running.wait(30) == 75
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert job.log.read_text() == f"saved by USR1\n{REQUEUED}"
