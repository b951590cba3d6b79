"""The verbs of ``elastic-runner submit``: a job file for a scheduler, written, shown or handed to it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from elastic_runner.errors import ConfigError, ExitCode
from elastic_runner.launch import kubernetes, slurm


@dataclass(frozen=True, kw_only=True)
class SlurmArguments(slurm.SlurmJob):
    """Write an sbatch file and submit it: one agent a node, drain and requeue on notice.

    After '--' come the script, or -m and a module, and its arguments. The run directory is handed to it as --run-dir.
    """

    output: Path | None = None
    """Where to write the file; by default NAME.sbatch in the run directory, or here where that is no plain path."""
    dry_run: bool = False
    """Print the file and do nothing."""


@dataclass(frozen=True, kw_only=True)
class KubernetesArguments(kubernetes.KubernetesJob):
    """Render manifests and apply them by kubectl: one pod a node, one agent a pod.

    After '--' come the script, or -m and a module, and its arguments. The run directory is handed to it as --run-dir.
    """

    dry_run: bool = False
    """Print the manifests and do nothing."""


def submit(arguments: Sequence[str]) -> int:
    """Run one of them and return the exit code."""
    schedulers = {"slurm": _slurm, "kubernetes": _kubernetes}
    scheduler, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if scheduler not in schedulers:
        print(f"elastic-runner submit: {' or '.join(schedulers)}, and then flags", file=sys.stderr)
        return ExitCode.USAGE
    return schedulers[scheduler](rest)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes before the first ``--``, and after it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _made_by(scheduler: str, flags: Sequence[str], command: Sequence[str]) -> str:
    """The command line that makes the file, for its readers."""
    given = (flag for flag in flags if flag != "--dry-run")
    return shlex.join(["elastic-runner", "submit", scheduler, *given, "--", *command])


def _slurm(arguments: Sequence[str]) -> int:
    flags, command = split(arguments)
    wanted = tyro.cli(SlurmArguments, prog="elastic-runner submit slurm", args=flags)
    text = slurm.render(wanted, command, made_by=_made_by("slurm", flags, command))
    if wanted.dry_run:
        print(text, end="")
        return ExitCode.FINISHED
    file = wanted.output or slurm.default_file(wanted)
    if file.exists() and file.read_text() != text:
        raise ConfigError(f"{file} is there and says something else: sbatch it, name another --output, or delete it")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(f"written: {shlex.quote(str(file))}")
    print(f"submitted: job {slurm.sbatch(file)}")
    return ExitCode.FINISHED


def _kubernetes(arguments: Sequence[str]) -> int:
    flags, command = split(arguments)
    wanted = tyro.cli(KubernetesArguments, prog="elastic-runner submit kubernetes", args=flags)
    text = kubernetes.render(wanted, command, made_by=_made_by("kubernetes", flags, command))
    print(text if wanted.dry_run else kubernetes.apply(text), end="")
    return ExitCode.FINISHED
