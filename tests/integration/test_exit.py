"""How a run ends, as a user sees it: output, exit code and summary of a script under python or stock torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.chaos.driver import kill_tree
from tests.support.waiting import eventually

SCRIPT = '''
import os, signal, sys, time
import torch
import torch.distributed as dist
import elastic_runner as er

MODE, AT = os.environ.get("MODE", ""), int(os.environ.get("AT", 3))

class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(1)

class Counting(torch.nn.Module):
    """Every parameter equals the number of steps."""
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3))
    def forward(self, x):
        return -self.a.sum() + 0 * x.sum()

class Part:
    """Of the state; the save after a notice never ends."""
    def __init__(self, worker):
        self.worker = worker
    def state_dict(self):
        if MODE == "stuck save" and self.worker.stop_requested:
            print("saving", flush=True)
            time.sleep(600)
        return {}
    def load_state_dict(self, state):
        pass

def misbehave(worker, step):
    last = worker.rank == worker.world_size - 1
    if step.number != AT or not last:
        return
    print("now", flush=True)
    if MODE == "raise":
        raise ValueError("bad sample 17")
    if MODE.startswith("exit "):
        sys.exit(int(MODE.removeprefix("exit ")))
    if MODE == "signal":
        signal.raise_signal(signal.SIGTERM)
    if MODE in ("wait", "stuck save"):
        while not worker.stop_requested:
            time.sleep(0.02)

def main():
    config = er.load_config()
    with er.Worker(config) as worker:
        model = worker.prepare(Counting())
        data = er.ElasticLoader(Ones(), config.data, worker)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        state = er.TrainState(model=model, optimizer=optimizer, data=data, part=Part(worker))
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        worker.print("restored", checkpointer.restore())
        for step in worker.steps(state):
            for batch in step.microbatches():
                misbehave(worker, step)
                loss = model(batch)
                if MODE == "nan":
                    loss = loss * float("nan")
                step.backward(loss)
            step.optimize()
            print(f"rank {worker.rank} step {step.number}", flush=True)
            checkpointer.maybe_save(step)
        assert all((p == state.step).all() for p in model.parameters())

if MODE == "barrier":
    MODE = "raise"
    try:
        main()
    finally:
        dist.barrier()  # "everybody leaves together"
else:
    main()
'''


class Run:
    """A script as a subprocess, and its output so far."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._grew = threading.Condition()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.lines.append(line.rstrip("\n"))
                self._grew.notify_all()
        with self._grew:
            self._grew.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, seconds: float = 60) -> float:
        """Wait until the output holds ``text``; returns when."""
        with self._grew:
            assert self._grew.wait_for(lambda: text in self.output, seconds), f"no {text!r} in:\n{self.output}"
        return time.monotonic()

    def end(self, seconds: float = 60) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    script, run_dir, runs = tmp_path / "script.py", tmp_path / "run", []
    script.write_text(SCRIPT)

    def start(mode: str = "", *flags: str, ranks: int = 0, at: int = 3, **variables: str) -> Run:
        """By plain python, or by torchrun with ``ranks``."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        small = ["--training.max-steps", "6", "--data.global-batch", "8", "--data.shards", "4"]
        command = [sys.executable, *torchrun, str(script), "--run-dir", str(run_dir), *small, *flags]
        runs.append(Run(command, {"MODE": mode, "AT": str(at), **variables}))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            kill_tree(run.process.pid)
            run.process.wait()


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run" / paths.SUMMARY).read_text())


def test_an_exception_is_told_with_place_phase_and_step(start: Start, tmp_path: Path) -> None:
    run = start("raise")
    assert run.end() == 1
    assert re.search(r"elastic_runner: error: rank 0 of 1 on \S+, phase step, after step 2:\nTraceback", run.output)
    assert run.output.rstrip().endswith("ValueError: bad sample 17")
    told = summary(tmp_path)
    assert (told["status"], told["attempt"], told["step"]) == ("failed", 1, 2)
    assert "bad sample 17" in told["message"]


def test_a_failing_rank_leaves_at_once_although_a_peer_is_in_a_collective(start: Start, tmp_path: Path) -> None:
    """c07."""
    run = start("raise", ranks=2)
    at = run.wait_for("now")
    assert run.wait_for("ValueError: bad sample 17", 10) - at < 5
    assert run.end(30) == 1
    assert re.search(r"elastic_runner: error: rank 1 of 2 on \S+, phase step, after step 2:\nTraceback", run.output)
    assert run.output.count("ValueError: bad sample 17\n") <= 2, "by the rank, and in torchrun's own report"
    assert summary(tmp_path)["status"] in ("failed", "running")


def test_the_cause_is_told_before_the_programs_own_clean_up_hangs(start: Start) -> None:
    """c07: a barrier in finally waits for peers that wait for this rank."""
    run = start("barrier", ranks=2)
    at = run.wait_for("now")
    assert run.wait_for("bad sample 17", 10) - at < 5


def test_exit_of_the_program_is_kept(start: Start, tmp_path: Path) -> None:
    """c06."""
    run = start("exit 7")
    assert run.end() == 7
    assert summary(tmp_path)["status"] == "failed"


def test_a_program_that_leaves_as_if_all_were_well_says_so(start: Start, tmp_path: Path) -> None:
    run = start("exit 0")
    assert run.end() == 0
    message = "the program left by sys.exit at step 2 of 6"
    assert run.output.count(f"{message}: {tmp_path / 'run'}") == 1
    assert (summary(tmp_path)["status"], summary(tmp_path)["message"]) == ("interrupted", message)


def test_an_error_of_the_program_is_3(start: Start, tmp_path: Path) -> None:
    run = start("nan")
    assert run.end() == 3
    assert "NonFiniteError: step 1" in run.output and "Traceback" not in run.output
    assert summary(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("flags", "variables", "word"),
    [
        (["--strategy.fsdp.cpu-offload", "--strategy.name", "fsdp"], {}, "strategy.fsdp.cpu_offload"),
        ([], {"RANK": "0"}, "WORLD_SIZE"),
    ],
)
def test_a_configuration_that_cannot_work_is_2(
    start: Start, tmp_path: Path, flags: list[str], variables: dict[str, str], word: str
) -> None:
    run = start("", *flags, **variables)
    assert run.end() == 2
    assert word in run.output and "Traceback" not in run.output
    assert not (tmp_path / "run" / paths.SUMMARY).exists()


def test_whole_traceback_on_request(start: Start) -> None:
    run = start("nan", ELASTIC_RUNNER_TRACEBACK="1")
    assert run.end() == 3
    assert "Traceback" in run.output and "in optimize" in run.output


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_stopped_continued_finished_and_extended(start: Start, tmp_path: Path) -> None:
    """A preemption loses nothing; c09: a finished run is recognised and nothing is rewritten; a new target goes on."""
    run = start("wait", at=4)
    run.wait_for("now")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75
    told = summary(tmp_path)
    assert (told["status"], told["attempt"], told["step"]) == ("interrupted", 1, 4)
    assert "saved at step 4 of 6" in run.output and "Traceback" not in run.output

    run = start()
    assert run.end() == 0
    assert "restored 4" in run.output and "rank 0 step 5" in run.output and "rank 0 step 4" not in run.output
    told = summary(tmp_path)
    assert (told["status"], told["attempt"], told["step"]) == ("finished", 2, 6)

    before = contents(tmp_path / "run")
    run = start()
    assert run.end() == 0
    assert "Nothing to do" in run.output and "restored" not in run.output and "rank 0 step" not in run.output
    assert contents(tmp_path / "run") == before

    run = start("", "--training.max-steps", "7")
    assert run.end() == 0
    assert "restored 6" in run.output and "rank 0 step 7" in run.output and "rank 0 step 6" not in run.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_save_that_is_cut_short_by_a_second_signal_leaves_the_one_before(
    start: Start, number: signal.Signals, code: int
) -> None:
    """Case c26: out of patience, or of grace."""
    often = ("--checkpoint.every", "2", "--checkpoint.mode", "sync")
    run = start("stuck save", *often)
    run.wait_for("now")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("saving")
    # The same signal within a second is the same notice: it is sent until it counts.
    eventually(lambda: run.process.send_signal(number) or run.process.poll() is not None, every=0.1)
    assert run.end() == code
    run = start("", *often)
    assert run.end() == 0
    assert "restored 2" in run.output


def test_a_signal_to_one_rank_stops_all_under_torchrun(start: Start, tmp_path: Path) -> None:
    """c18."""
    run = start("signal", ranks=2)
    assert run.end() == 1, "stock torchrun knows one code for whatever its workers say"
    for rank in range(2):
        assert f"rank {rank} step 3" in run.output and f"rank {rank} step 4" not in run.output
    assert re.search(r"exitcode\s*: 75", run.output)
    assert (summary(tmp_path)["status"], summary(tmp_path)["step"]) == ("interrupted", 3)
