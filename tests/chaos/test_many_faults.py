"""Two hundred faults of all kinds in one run: it finishes, what it has learned is what it would have learned in peace,
no step was lost where a worker died, and nothing is left of all those that died."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.checkpoint.tools.difference import compare
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import tally
from elastic_runner.launch.processes import descendants
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary

SCRIPT = """
import os, signal, sys
import torch
import elastic_runner as er

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum(dim=0, keepdim=True)

def fault(worker, step):
    '''Do to this rank what was asked for, once.'''
    path = os.path.join(worker.config.run_dir, f"fault-{worker.rank}")
    try:
        kind = open(path).read()
        os.remove(path)
    except FileNotFoundError:
        return
    if kind == "raise":
        raise ValueError(f"asked for in step {step.number}")
    if kind == "exit":
        os._exit(11)
    if kind == "segfault":
        import ctypes
        ctypes.string_at(0)
    if kind == "hold the GIL":
        import ctypes
        ctypes.PyDLL(None).sleep(600)

def main():
    config = er.load_config()
    with er.Worker(config) as worker:
        net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
        model = worker.prepare(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = er.ElasticLoader(Dataset(), config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for x, y in step.microbatches():
                fault(worker, step)
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            step.optimize()
            checkpointer.maybe_save(step)

main()
"""
FLAGS = (
    "--data.global-batch", "8", "--data.shards", "4", "--data.loader-workers", "1", "--checkpoint.every", "25",
    "--timeouts.step", "3", "--timeouts.first-step", "20",
)  # fmt: skip
INSIDE = ("raise", "exit", "segfault", "hold the GIL")
"""Done by the worker to itself, in the middle of a step."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}
WEIGHTS = {
    "kill": 10, "abort": 2, "raise": 3, "exit": 2, "segfault": 1, "stop": 2, "hold the GIL": 0.5, "loader": 2,
    "all workers": 3, "agent": 1, "server": 1, "drain": 1,
}  # fmt: skip
"""How often each kind is drawn. A dead agent and a drain end the job, which is started again, as by a scheduler."""


class Faults:
    """Does things to a run, at random moments."""

    def __init__(self, rng: random.Random, run: ObservedRun) -> None:
        self.rng, self.run = rng, run
        self.done: Counter[str] = Counter()

    def strike(self, kind: str) -> None:
        time.sleep(self.rng.uniform(0, 0.03))  # anywhere within a step, a snapshot, a save
        workers, rank = self.run.workers(), self.rng.randrange(2)
        agent = self.run.process.pid
        if kind in INSIDE:
            (self.run.run_dir / f"fault-{rank}").write_text(kind)
        elif kind == "agent":
            os.kill(agent, signal.SIGKILL)
        elif kind == "server":
            os.kill(descendants(agent)[0], signal.SIGKILL)
        elif kind == "drain":
            os.kill(agent, signal.SIGTERM)
        elif kind == "all workers":
            for worker in workers:
                kill(worker["pid"], signal.SIGKILL)
        elif kind == "loader":
            for pid in descendants(workers[rank]["pid"])[:1]:
                kill(pid, signal.SIGKILL)
        else:
            kill(workers[rank]["pid"], SIGNALS[kind])
        self.done[kind] += 1


def kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # the fault before was sooner
        os.kill(pid, number)


def shared_memory() -> set[str]:
    """Without what living processes have there, as those of other tests may: torch puts the pid into the name."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not Path("/proc", name.removeprefix("torch_").partition("_")[0], "stat").exists()}


def undisturbed(directory: Path, steps: int) -> None:
    directory.mkdir()
    script = directory.parent / "script.py"
    command = [*launch_command(2, str(script), *FLAGS), "--training.max-steps", str(steps), "--run-dir", str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def run_through(
    run_dir: Path, script: Path, steps: int, faults: int, rng: random.Random, look: Callable[[int], None]
) -> Counter[str]:
    """Start the job until it is done, with a fault every few steps. Returns how many there were of each kind."""
    done: Counter[str] = Counter()
    spacing = steps // (faults + 1)
    due = spacing
    command = launch_command(2, "--max-restarts=100000", str(script), *FLAGS, "--training.max-steps", str(steps))
    while True:
        with ObservedRun(run_dir, command) as run:
            strikes = Faults(rng, run)
            for record in run.records():
                if record["event"] == "step" and record["step"] >= due and done.total() < faults:
                    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
                    due = record["step"] + spacing
                    look(run.process.pid)
                    strikes.strike(kind)
                    done[kind] += 1
            code = run.process.wait()
        if code == 0:
            return done
        assert code in (75, -signal.SIGKILL), run.log.read_text()[-6000:]  # a drain; the agent's end


def lost_by_start(records: Iterable[Record]) -> dict[int, int]:
    """By attempt: how many committed steps it has to do again, of those attempts that have any."""
    found, last = {}, 0
    for record in records:
        if record["event"] == "start":
            if record["resumed_at"] < last:
                found[record["attempt"]] = last - record["resumed_at"]
            last = record["resumed_at"]
        elif record["event"] == "step":
            last = record["step"]
    return found


@pytest.mark.parametrize(
    ("seed", "faults"), [(0, 12), pytest.param(1, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_faults_of_all_kinds(seed: int, faults: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    steps = 20 * (faults + 1)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    before, family, handles = shared_memory(), set[int](), defaultdict[int, list[int]](list)

    def look(agent: int) -> None:
        family.update(descendants(agent))
        handles[agent].append(len(list(Path(f"/proc/{agent}/fd").iterdir())))

    done = run_through(tmp_path / "run", script, steps, faults, rng, look)
    print(f"seed {seed}: {dict(done)}")
    assert done.total() == faults
    storage = LocalStorage(tmp_path / "run")
    losing = lost_by_start(read_records(storage))
    print(f"steps lost, by attempt: {losing}")
    assert len(losing) <= done["agent"], "the node's memory outlives its workers, and is gone with its agent"
    records, _ = effective(read_records(storage))
    counts = tally(records)
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped) == (steps, 0, 0, 0)
    summary = read_summary(storage)
    assert summary is not None and (summary.status, summary.step) == ("finished", steps)
    undisturbed(tmp_path / "peace", steps)
    peace = LocalStorage(tmp_path / "peace")
    losses = {r["step"]: r["loss"] for r in records if r["event"] == "step"}
    assert losses == {r["step"]: r["loss"] for r in read_records(peace) if r["event"] == "step"}
    found, expected = (str(tmp_path / name / "checkpoints") for name in ("run", "peace"))
    with opened(found, {}) as a, opened(expected, {}) as b:
        assert compare(a.contents, b.contents).same
    assert shared_memory() <= before
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists() and is_ours(pid)], "orphans"
    for counts_of_one in handles.values():
        # From its second attempt on: the store of the one before is kept until the next.
        assert max(counts_of_one[1:], default=0) - min(counts_of_one[1:], default=0) <= 6, f"open files grow: {handles}"


def is_ours(pid: int) -> bool:
    """Not a zombie, nor another process that has got the number since."""
    try:
        return (
            b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
            or b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False
