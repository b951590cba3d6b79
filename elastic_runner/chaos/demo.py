"""``elastic-runner demo``: train on real text, kill a worker in the middle, and show what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic_runner import paths
from elastic_runner.chaos.driver import Killed, ObservedRun, launch_command
from elastic_runner.config import STRICT, Positive
from elastic_runner.data.audit import Audit, audit
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.errors import ExitCode
from elastic_runner.observability.summary import RunSummary
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DemoConfig:
    """Train the gpt recipe on Python's own sources, kill one worker in the middle, resume, finish, report."""

    run_dir: str | None = None
    """Directory of the run. None: a new one below runs/."""
    workers: Positive = 2
    """Worker processes."""
    steps: Positive = 300
    """Optimizer steps."""
    kill_at: Positive | None = None
    """Step after which the last worker is killed. None: some steps after the middle, between two checkpoints."""


def run_demo(config: DemoConfig) -> int:
    """Run and report; exit code 0 only when the run finished after a restart and its audit proves it."""
    console = Console()
    run_dir = Path(config.run_dir or time.strftime("runs/quickstart-%Y%m%d-%H%M%S")).absolute()
    kill_at = config.kill_at or config.steps // 2 + 12
    script = ("-m", "elastic_runner.recipes.gpt", "--training.max-steps", str(config.steps))
    console.print(
        f"Training a byte-level GPT on Python's standard library, {config.workers} workers, {config.steps} steps.\n"
        f"Worker {config.workers - 1} will be killed (SIGKILL) after step {kill_at}. Log: {run_dir / 'launch.log'}",
        soft_wrap=True,
    )
    with ObservedRun(run_dir, launch_command(config.workers, *script)) as run:
        killed, resumed = _watch(run, config, kill_at, console)
        code = run.process.wait()
    storage = LocalStorage(run_dir)
    summary = read_summary(storage)
    if summary is None or code != ExitCode.FINISHED:
        console.print(f"[red]The run ended with exit code {code}.[/red] Last lines of {run.log}:")
        console.print("\n".join(run.log.read_text(errors="replace").splitlines()[-15:]), markup=False)
        return ExitCode.FAILED
    records = list(read_records(storage))
    found = audit(lambda: records)
    _report(console, summary, found, records, killed, resumed, storage)
    proven = summary.step == config.steps and summary.restarts >= 1 and found.verdict == "proven"
    return ExitCode.FINISHED if proven else ExitCode.FAILED


def _watch(run: ObservedRun, config: DemoConfig, kill_at: int, console: Console) -> tuple[Killed | None, float | None]:
    killed: Killed | None = None
    resumed: float | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=config.steps)
        for record in run.records():
            if record["event"] == "start" and record["resumed_at"]:
                console.print(f"Attempt {record['attempt']} resumed after step {record['resumed_at']}.")
            elif record["event"] == "evaluation":
                bits = record["metrics"]["bits_per_byte"]
                console.print(f"Step {record['step']:>4}: {bits:.3f} bits per byte on validation files.")
            elif record["event"] == "step":
                progress.update(task, completed=record["step"], description=f"loss {record['loss']:.3f}")
                if killed is not None and resumed is None and record["time"] > killed.at:
                    resumed = record["time"] if record["attempt"] > 1 else None
                if killed is None and record["step"] >= kill_at:
                    killed = run.kill(config.workers - 1)
                    console.print(
                        f"[yellow]Killed worker {killed.rank} (pid {killed.pid}) after step {record['step']}."
                    )
    return killed, resumed


def _report(
    console: Console,
    summary: RunSummary,
    found: Audit,
    records: Iterable[Record],
    killed: Killed | None,
    resumed: float | None,
    storage: LocalStorage,
) -> None:
    bits = [record["metrics"]["bits_per_byte"] for record in records if record["event"] == "evaluation"]
    table = Table(title="What happened", title_justify="left", show_header=False)
    rows: dict[str, Any] = {
        "status": summary.status,
        "steps": f"{summary.step} of {summary.target_step}",
        "restarts": summary.restarts,
        "lost steps (done again)": summary.lost_steps,
    }
    for each in found.findings:
        rows[each.claim] = f"{each.verdict}: {each.seen}"
    if killed is not None and resumed is not None:
        rows["kill to next step"] = f"{resumed - killed.at:.1f} s"
    if bits:
        rows["bits per byte"] = f"{bits[0]:.3f} before, {bits[-1]:.3f} after"
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    console.print(f"Run directory: {storage.url}", soft_wrap=True)
    console.print("Generated text:")
    console.print(storage.read(paths.SAMPLE).decode(errors="replace"), markup=False, highlight=False)
