"""SLURM: the job file for ``sbatch``, rendered by a pure function, and its submission.

The file is for people: everything that a job does between SLURM and the agents stands in it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_runner.errors import ConfigError, SubmitError
from elastic_runner.launch.schedulers import comment, node_range

_SUBMITTING = 120.0
"""Seconds for sbatch; a busy controller takes its time."""
_EARLY = 60
"""Seconds by which SLURM may send the notice earlier than asked, as its manual says."""
_FLUSHING = 60
"""Seconds of the notice, a quarter of it at most, that are left to save what is in memory if a drain takes too long."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the job file says."""

    run_dir: str
    """Run directory or fsspec URL that all nodes see; the script gets it as --run-dir, the rendezvous is in it.
    $SLURM_ARRAY_TASK_ID and SLURM's other variables may stand in it."""
    nodes: str = "1"
    """N, or MIN:MAX: starts on as many as there are and goes on while MIN are left."""
    nproc_per_node: str = "1"
    """Workers on each node, as torchrun takes it: a number, gpu, cpu, auto."""
    time: str
    """Time limit as SLURM takes it, [days-]hours:minutes:seconds or minutes. At its end the job is requeued."""
    notice: int = 300
    """Seconds before the time limit at which all ranks stop and save; more than a step and a save take."""
    name: str | None = None
    """The job's name; by default the run directory's last part."""
    partition: str | None = None
    """Where to run; a preemptible one is like any other."""
    array: str | None = None
    """Indices of an array of jobs, such as 0-7%4; each needs a run directory of its own."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, or others for those of the file: gpus-per-node=8 account=mine."""


_FILE = """\
#!/bin/bash
@options

@made_by
# Yours to change: what is above, what prepares a node, the script's line. The rest is the same for every job.

run=@run
# Here: module load ..., source .venv/bin/activate

# A task of an array goes by the array's number and its own: by one number alone all of the array would be requeued.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
echo "job $job, requeued ${SLURM_RESTART_COUNT:-0} times, on $SLURM_JOB_NODELIST"

# The notice before the time limit, passed on: all ranks stop at one step and save, and the agents leave with code 75.
trap 'noticed=yes; kill -USR1 "$agents"' USR1 TERM

# One agent a node. They meet in the run directory.
srun --ntasks-per-node=1 @no_kill--kill-on-bad-exit=0 --wait=0 --cpu-bind=none \\
  elastic-runner launch --nnodes=@nnodes --nproc-per-node=@nproc --shutdown-timeout=@grace \\
  --rdzv-backend=elastic --rdzv-endpoint="$run/rendezvous" --rdzv-id="$job" \\
  @logs@command --run-dir "$run" &
agents=$!
while wait "$agents"; code=$?; [ "$noticed" ]; do noticed=; done # a notice ends a wait before its time

# The highest code of the agents. 0 finished, 1 failed, 2 wrong command line, 3 do not retry: the job ends with it.
# 75 interrupted: goes on later. 69 unhealthy node, 128 and more an agent was killed: so, too, but after ten requeues
# only where it had run for an hour.
case $code in
  75) ;;
  69 | 1[3-9]?) [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] || [ "$SECONDS" -ge 3600 ] || exit "$code" ;;
  *) exit "$code" ;;
esac
state=$(squeue --noheader --jobs="$job" --format=%T)
if [ -n "$state" ] && [ "$state" != RUNNING ]; then
  echo "not requeued from here: SLURM is ending this job itself ($state)"
elif ! scontrol requeue "$job"; then
  echo "not requeued: start it again by sbatch"
fi
exit "$code"
"""


class _Template(string.Template):
    """What is filled in begins with @, since $ is the shell's."""

    delimiter = "@"


def render(job: SlurmJob, command: Sequence[str], *, made_by: str) -> str:
    """The job file. ``command``: the script, or -m and a module, and its arguments; ``made_by``: the command line that
    makes it again. Raises ConfigError for what cannot work.
    """
    least, most = node_range(job.nodes)
    if not command:
        raise ConfigError("no script: it comes after '--', with its arguments")
    limit = seconds(job.time)
    if limit is not None and limit < job.notice + _EARLY:
        raise ConfigError(
            f"--time {job.time} is too short for --notice {job.notice}, which SLURM may send {_EARLY} s early: "
            "choose a longer --time or a shorter --notice"
        )
    if job.array is not None and "SLURM_ARRAY_TASK_ID" not in job.run_dir:
        raise ConfigError(
            f"--run-dir {job.run_dir}: each task of an array needs its own; put $SLURM_ARRAY_TASK_ID in it"
        )
    return _Template(_FILE).substitute(
        options="\n".join(_directive(key, value) for key, value in _options(job).items()),
        made_by=comment(made_by),
        run=quote(job.run_dir),
        no_kill="" if least == most else "--no-kill ",
        nnodes=least if least == most else f"{least}:$SLURM_NNODES",
        nproc=shlex.quote(job.nproc_per_node),
        grace=job.notice - min(_FLUSHING, job.notice // 4),
        # torch's own files; on an object store the job's output is all there is
        logs="" if "://" in job.run_dir else '--log-dir="$run/logs" --tee=3 ',
        command=" ".join(map(quote, command)),
    )


def _options(job: SlurmJob) -> dict[str, str]:
    """For sbatch, in the order of the file; an empty value is a flag's."""
    least, most = node_range(job.nodes)
    options = {
        "job-name": job_name(job),
        "nodes": str(least) if least == most else f"{least}-{most}",
        "exclusive": "",
        "time": job.time,
        "signal": f"B:USR1@{job.notice}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out" if job.array is None else "%x-%A_%a.out",
    }
    if least != most:
        options["no-kill"] = ""
    if job.partition is not None:
        options["partition"] = job.partition
    if job.array is not None:
        options["array"] = job.array
    for given in job.sbatch:
        key, _, value = given.partition("=")
        options[key.lstrip("-")] = value
    return options


def _directive(key: str, value: str) -> str:
    return f"#SBATCH --{key}={shlex.quote(value)}" if value else f"#SBATCH --{key}"


_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def seconds(limit: str) -> int | None:
    """A time limit as SLURM writes it; None for one without end. Raises ConfigError."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    found = _LIMIT.fullmatch(limit)
    if found is None:
        raise ConfigError(f"--time {limit}: it is [days-]hours:minutes:seconds, or minutes")
    days, a, b, c = (int(part or 0) for part in found.group("days", "a", "b", "c"))
    if found.group("days") or found.group("c"):
        return days * 86400 + a * 3600 + b * 60 + c
    return a * 60 + b


def quote(text: str) -> str:
    """One word for the shell, in which SLURM's variables are left for the job to fill in."""
    if re.search(r"\$\{?SLURM_", text) is None:
        return shlex.quote(text)
    return '"' + re.sub(r'["\\`]|\$(?!\{?SLURM_)', r"\\\g<0>", text) + '"'


def job_name(job: SlurmJob) -> str:
    """As given, or the last part of the run directory that has no variable in it."""
    parts = [part for part in job.run_dir.split("/") if part and "$" not in part]
    return job.name or (parts[-1] if parts else "elastic-runner")


def default_file(job: SlurmJob) -> Path:
    """Where the job file goes: into the run directory, or here where that is no directory of this machine's."""
    here = "$" in job.run_dir or "://" in job.run_dir
    return Path(*(() if here else (job.run_dir,)), f"{job_name(job)}.sbatch")


def sbatch(file: Path) -> str:
    """Hand a job file to SLURM; the job's number. Raises SubmitError with what sbatch says; the file stays."""
    if shutil.which("sbatch") is None:
        raise SubmitError(f"there is no sbatch here; where there is: sbatch {shlex.quote(str(file))}")
    # The job finds the programs that this one would.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", file],
            env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=_SUBMITTING,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SubmitError(
            f"sbatch has not answered for {_SUBMITTING:g} s; the job may be in the queue all the same"
        ) from None
    if done.returncode != 0:
        raise SubmitError(f"{done.stderr.strip() or f'sbatch: exit code {done.returncode}'}; the file is kept: {file}")
    return done.stdout.strip().partition(";")[0]
