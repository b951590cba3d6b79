"""Jobs on a real SLURM of three nodes, submitted by ``elastic-runner submit slurm``, and what befalls jobs there."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import tally
from elastic_runner.launch.slurm import SlurmJob, render
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.slurm import Slurm, running_slurm
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
from elastic_runner.recipes import gpt

class Slow(gpt.Gpt):
    def forward(self, tokens):
        if not os.path.exists("hurry"):
            time.sleep(0.25)
        return super().forward(tokens)

gpt.Gpt = Slow
gpt.main()
"""
"""The gpt recipe, slowed down until a test has no more to do to it."""

STEPS = 200
FLAGS = [
    *("--training.max-steps", str(STEPS), "--checkpoint.every", "50", "--data.global-batch", "4", "--data.shards", "4"),
    *("--model.layers", "1", "--model.heads", "1", "--model.width", "16", "--model.context", "16"),
    *("--evaluation.every", "1000", "--evaluation.windows", "4", "--evaluation.sample-bytes", "4"),
    *("--text.url", str(Path(__file__).parents[2] / "elastic_runner")),
]
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), 3) as running:
        yield running


class Job:
    """A job of a user who works in a directory."""

    def __init__(self, slurm: Slurm, directory: Path, run_dir: str = "run", script: str = SCRIPT, **flags: str) -> None:
        self._slurm = slurm
        self._directory = directory
        self.run_dir = directory / run_dir
        (directory / "script.py").write_text(script)
        job = SlurmJob(run_dir=run_dir, time="10", notice=60, **flags)  # type: ignore[arg-type]
        command = ["script.py", *(FLAGS if script == SCRIPT else [])]
        (directory / "job.sbatch").write_text(render(job, command, made_by="tests"))
        self.id = slurm.run("sbatch", "--parsable", "job.sbatch", cwd=directory).strip()

    def task(self, number: int) -> Job:
        """One of an array."""
        task = copy(self)
        task.id = f"{self.id}_{number}"
        task.run_dir = self._directory / self.run_dir.name.replace("$SLURM_ARRAY_TASK_ID", str(number))
        return task

    def hurry(self) -> None:
        """No more is done to it."""
        (self._directory / "hurry").touch()

    @property
    def steps(self) -> int:
        """How many are on the ledger."""
        return sum(record["event"] == "step" for record in read_records(LocalStorage(self.run_dir)))

    def attempts(self) -> list[dict[str, Any]]:
        """The records of its starts."""
        return [json.loads(file.read_text()) for file in sorted((self.run_dir / "attempts").glob("??????.json"))]

    def wait_for_attempt(self, number: int) -> dict[str, Any]:
        """Until this start has made steps; its record."""

        def works() -> bool:
            records = read_records(LocalStorage(self.run_dir))
            return sum(record["event"] == "step" and record["attempt"] == number for record in records) > 2

        self.wait(works, f"attempt {number}")
        return self.attempts()[number - 1]

    def wait(self, condition: Any, what: str, seconds: float = 90.0) -> Any:
        """As long as it takes; what the job has said, if it takes too long."""
        try:
            return eventually(condition, what, seconds=seconds, every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}\n{self._slurm.job(self.id)}") from None

    def said(self) -> str:
        """What is in its output."""
        return "\n".join(file.read_text() for file in self._directory.glob("*.out"))

    def ended(self, job: str | None = None) -> tuple[str, str]:
        """State and exit code, when it has ended; and nothing of it is left on any node."""
        facts = self.wait(
            lambda: (found := self._slurm.job(job or self.id)).get("JobState") in ENDED and found, "end of the job"
        )
        eventually(lambda: all(map(self._slurm.quiet, self._slurm.nodes)), "quiet on all nodes", seconds=30, every=0.1)
        return facts["JobState"], facts["ExitCode"]

    def assert_complete(self) -> None:
        """All steps are done, each once."""
        counts = tally(effective(read_records(LocalStorage(self.run_dir)))[0])
        assert (counts.steps, counts.gaps, counts.repeated, counts.skipped) == (STEPS, 0, 0, 0), self.said()
        summary = read_summary(LocalStorage(self.run_dir))
        assert summary is not None and (summary.status, summary.lost_steps) == ("finished", 0), summary


def test_a_worker_killed_a_suspension_the_time_limit_a_preemption_and_a_second_start(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Case c24: one requeue for each interruption, and the next start goes on from what was saved."""
    job = Job(slurm, tmp_path, nodes="2", partition="preemptible")
    worker = job.wait_for_attempt(1)["workers"][1]
    os.kill(slurm.outside(slurm.number(worker["host"]), worker["pid"]), signal.SIGKILL)
    job.wait_for_attempt(2)

    slurm.run("scontrol", "suspend", job.id)
    job.wait(lambda: slurm.job(job.id)["JobState"] == "SUSPENDED", "suspended job")
    time.sleep(6)  # longer than the leases of nodes and of the store
    before = job.steps
    slurm.run("scontrol", "resume", job.id)
    job.wait(lambda: job.steps > before + 2, "steps after the suspension")
    assert len(job.attempts()) == 2

    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    job.wait(lambda: slurm.job(job.id).get("Restarts") == "1", "requeue by the time limit's notice")
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")
    job.wait_for_attempt(3)

    slurm.run("sbatch", "--nodes=3", "--exclusive", "--wrap=true", "--output=/dev/null")
    job.wait_for_attempt(4)
    job.hurry()
    assert job.ended() == ("COMPLETED", "0:0"), job.said()
    assert slurm.job(job.id)["Restarts"] == "2"
    job.assert_complete()

    command = [sys.executable, "-m", "elastic_runner", "submit", "slurm", "--nodes", "2", "--time", "10"]
    said = slurm.run(*command, "--run-dir", "run", "--", "script.py", *FLAGS, cwd=tmp_path)
    assert job.ended(re.findall(r"submitted: job (\d+)", said)[0]) == ("COMPLETED", "0:0"), job.said()
    assert (tmp_path / "run" / "run.sbatch").exists()
    job.assert_complete()


def test_a_requeue_and_of_a_range_of_nodes_one_is_lost_and_the_others_go_on(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, nodes="2:3")
    assert job.wait_for_attempt(1)["world_size"] == 3
    slurm.run("scontrol", "requeue", job.id)
    assert job.wait_for_attempt(2)["world_size"] == 3
    lost = max(slurm.nodes)  # the first one runs the batch script
    slurm.lose_node(lost)
    assert job.wait_for_attempt(3)["world_size"] == 2
    job.hurry()
    assert job.ended() == ("COMPLETED", "0:0"), job.said()
    assert slurm.job(job.id)["Restarts"] == "1"
    job.assert_complete()
    slurm.start_node(lost)
    eventually(lambda: slurm.state(lost) == "idle", "the node that was lost", seconds=60, every=0.1)


def test_of_an_array_one_task_is_noticed_and_one_cancelled_and_a_job_beside_it_is_incurable(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Case c24: of an array, only the task that was interrupted is requeued."""
    (tmp_path / "other").mkdir()
    incurable = Job(slurm, tmp_path / "other", script="import sys; sys.exit(3)")
    array = Job(slurm, tmp_path, run_dir="run-$SLURM_ARRAY_TASK_ID", array="0-1")
    tasks = [array.task(number) for number in (0, 1)]
    for task in tasks:
        task.wait_for_attempt(1)
    slurm.run("scancel", "--batch", "--signal=USR1", tasks[0].id)
    tasks[0].wait_for_attempt(2)
    assert slurm.job(tasks[1].id)["Restarts"] == "0"
    slurm.run("scancel", tasks[1].id)
    array.hurry()
    assert incurable.ended() == ("FAILED", "3:0"), incurable.said()
    assert slurm.job(incurable.id)["Restarts"] == "0"
    assert tasks[0].ended() == ("COMPLETED", "0:0"), array.said()
    assert slurm.job(tasks[0].id)["Restarts"] == "1"
    tasks[0].assert_complete()
    assert tasks[1].ended()[0] == "CANCELLED", array.said()
    summary = read_summary(LocalStorage(tasks[1].run_dir))
    assert summary is not None and (summary.status, summary.step) == ("interrupted", tasks[1].steps)
    assert (len(tasks[1].attempts()), slurm.job(tasks[1].id)["Restarts"]) == (1, "0")
