"""The command line: verbs and what they print; what they do is elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass

import tyro
from rich.console import Console
from rich.table import Table

from elastic_runner.cli.audit import audit
from elastic_runner.cli.checkpoint import Reading, checkpoint
from elastic_runner.cli.submit import submit
from elastic_runner.environment import TRACEBACK
from elastic_runner.errors import ElasticRunnerError, ExitCode, NotFound

HELP = """elastic-runner keeps PyTorch training going.

verbs:
  launch [torchrun's flags] SCRIPT|-m MODULE [args]   start workers and restart them when they fail
  submit slurm|kubernetes [flags] -- SCRIPT [args]    write a job file and submit it; --dry-run only shows it
  demo                                                train on real text, kill a worker, resume, report
  status RUN_DIR                                      what a run has come to
  audit RUN_DIR                                       prove from its ledger that each sample was used once (code 1: not)
  checkpoint ls|verify URL                            list checkpoints, or check every byte of them
  checkpoint inspect URL[@STEP]                       what one holds: tensors, optimizer, positions
  checkpoint diff A[@STEP] B[@STEP]                   what two differ in, to the last bit (code 1: they do)
  checkpoint export URL[@STEP] DEST --to KIND         write one as safetensors, torch or dcp
  checkpoint import FILE URL [--step N]               commit such a file, or foreign weights, as a checkpoint
  checkpoint pin|unpin|trust URL STEP                 keep one whatever retention says, or not; end a suspicion
  checkpoint prune URL --keep N [--dry-run]           delete those that nothing keeps, or only say which and why

exit codes: 0 finished · 1 failed, restarts used up · 2 wrong command line or configuration ·
            3 do not retry: program, model or checkpoints must change ·
            69 this node is unhealthy, start again on another · 75 interrupted, start again

'elastic-runner VERB --help' says more. ELASTIC_RUNNER_TRACEBACK=1 shows whole tracebacks."""


@dataclass(frozen=True, kw_only=True)
class StatusArguments(Reading):
    """What a run has come to: its summary, with counts made anew from the ledger."""

    run_dir: tyro.conf.Positional[str]
    """The run directory, a path or fsspec URL."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    verbs = {
        "launch": _launch,
        "submit": submit,
        "demo": _demo,
        "status": _status,
        "audit": audit,
        "checkpoint": checkpoint,
    }
    if verb in ("-h", "--help", "help"):
        print(HELP)
        return ExitCode.FINISHED if arguments else ExitCode.USAGE
    if verb not in verbs:
        print(f"elastic-runner: no verb {verb!r}; there are {', '.join(verbs)}", file=sys.stderr)
        return ExitCode.USAGE
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    try:
        return verbs[verb](rest)
    except BrokenPipeError:  # whoever read the output, such as head, has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except ElasticRunnerError as error:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            traceback.print_exc()
        print(f"elastic-runner: error: {error}", file=sys.stderr)
        return error.exit_code


def _launch(arguments: list[str]) -> int:
    from elastic_runner.launch.early import leave_when_asked

    leave_when_asked()
    from elastic_runner.launch.launcher import launch

    return launch(arguments)


def _demo(arguments: list[str]) -> int:
    from elastic_runner.chaos.demo import DemoConfig, run_demo

    return run_demo(tyro.cli(DemoConfig, prog="elastic-runner demo", args=arguments))


def _status(arguments: list[str]) -> int:
    from elastic_runner.data.ledger import count, read_records
    from elastic_runner.storage import open_storage
    from elastic_runner.train.record import read_summary

    wanted = tyro.cli(StatusArguments, prog="elastic-runner status", args=arguments)
    storage = open_storage(wanted.run_dir, wanted.options)
    summary = read_summary(storage)
    if summary is None:
        raise NotFound(f"{storage.url} holds no run: there is no summary.json")
    led_here, lost = count(lambda: read_records(storage))
    counts = {**{k: v for k, v in asdict(led_here).items() if not k.startswith("_")}, "lost": lost}
    if wanted.json:
        print(json.dumps({"summary": asdict(summary), "ledger": counts}))
        return ExitCode.FINISHED
    table = Table(title=storage.url, title_justify="left", show_header=False, box=None)
    for name, value in asdict(summary).items():
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if name == "updated" else value
        table.add_row(name.replace("_", " "), str(text))
    table.add_row("by the ledger", ", ".join(f"{name} {value}" for name, value in counts.items()))
    Console().print(table)
    return ExitCode.FINISHED
