"""The command line: its verbs. Each imports what it needs, so that a launcher hears signals from its first moment."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module

from elastic_runner.environment import TRACEBACK
from elastic_runner.errors import ElasticRunnerError, ExitCode

HELP = """elastic-runner keeps PyTorch training going.

verbs:
  launch [torchrun's flags] SCRIPT|-m MODULE [args]   start workers and restart them when they fail
  submit slurm|kubernetes [flags] -- SCRIPT [args]    write a job file and submit it; --dry-run only shows it
  demo                                                train on real text, kill a worker, resume, report
  status RUN_DIR                                      what a run has come to
  audit RUN_DIR                                       prove from its ledger that each sample was used once (code 1: not)
  metrics RUN_DIR                                     its numbers as JSON lines, each step once
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

VERBS = ("launch", "submit", "demo", "status", "audit", "metrics", "checkpoint")
"""Each the name of a module here and of its function, but for launch and demo, which are packages of their own."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(HELP)
        return ExitCode.FINISHED if arguments else ExitCode.USAGE
    if verb not in VERBS:
        print(f"elastic-runner: no verb {verb!r}; there are {', '.join(VERBS)}", file=sys.stderr)
        return ExitCode.USAGE
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    try:
        return _run(verb, rest)
    except BrokenPipeError:  # whoever read the output, such as head, has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except ElasticRunnerError as error:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            traceback.print_exc()
        print(f"elastic-runner: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(verb: str, arguments: list[str]) -> int:
    if verb == "launch":
        return _launch(arguments)
    if verb == "demo":
        return _demo(arguments)
    run: Callable[[list[str]], int] = getattr(import_module(f"elastic_runner.cli.{verb}"), verb)
    return run(arguments)


def _launch(arguments: list[str]) -> int:
    from elastic_runner.launch.early import leave_at_once

    leave_at_once()
    from elastic_runner.launch.launcher import launch  # and torch: seconds

    return launch(arguments)


def _demo(arguments: list[str]) -> int:
    import tyro

    from elastic_runner.chaos.demo import DemoConfig, run_demo

    return run_demo(tyro.cli(DemoConfig, prog="elastic-runner demo", args=arguments))
