"""``elastic-runner launch``: torchrun's own command line and agent, with defaults and exit codes of ours.

What stock torchrun 2.13 does and this changes: the store is not shared across restarts, three restarts are allowed,
the exit code is the documented one of the worker that failed first, and the run's summary says that it failed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from elastic_runner import paths
from elastic_runner.environment import AGENT_DIR
from elastic_runner.errors import ElasticRunnerError, ExitCode, PeerLost, PhaseTimeout
from elastic_runner.observability.summary import RunSummary, decode, encode
from elastic_runner.storage import Storage, open_storage

MAX_RESTARTS = 3

_CODES = {code.value for code in ExitCode}


def launch(arguments: Sequence[str]) -> int:
    """Run the workers to their end; ``arguments`` are torchrun's. Returns a documented exit code."""
    parser = torchrun.get_args_parser()
    parser.prog = "elastic-runner launch"
    parser.set_defaults(max_restarts=MAX_RESTARTS)
    options = parser.parse_args(list(arguments))
    # Read by torch's rendezvous: a store of its own per round, so that no dead worker's keys are left in it.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its banner
    with _agent_directory() as directory:
        try:
            torchrun.run(options)
        except ChildFailedError as error:
            rank, failure = root_cause(error.failures)
            code = failure.exitcode if failure.exitcode in _CODES else ExitCode.FAILED
            reason = f"rank {rank} ended first: {_describe(failure.exitcode)}"
            if code != ExitCode.INTERRUPTED:
                _mark_failed(directory, reason)
            print(f"elastic-runner: {ExitCode(code).name.lower()} ({int(code)}): {reason}", flush=True)
            return int(code)
        except SignalException as error:
            return _after_signal(directory, error)
    return ExitCode.FINISHED


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure the others' follow from.

    torch goes by time stamps, but a killed worker leaves none and its peers report the broken connection. So: a
    death by signal (but the agent's own SIGTERM), else an error that is not about a peer, else the earliest.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        failure = item[1]
        if failure.exitcode < 0:
            return (3 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp
        about_a_peer = any(kind.__name__ in str(failure.message) for kind in (PeerLost, PhaseTimeout))
        return (2 if about_a_peer else 1), failure.timestamp

    return min(failures.items(), key=order)


def _describe(exitcode: int) -> str:
    return f"killed by signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"


def _after_signal(directory: Path, error: SignalException) -> int:
    """The agent was told to stop, and its workers have drained, or not, within torchrun's --shutdown-timeout."""
    summary = _read(directory)
    status = summary[1].status if summary else None
    if status == "finished":
        return ExitCode.FINISHED
    if status == "interrupted":
        print("elastic-runner: interrupted and saved; start the same command again", flush=True)
    else:
        print(f"elastic-runner: stopped by {error.sigval.name} before the workers had saved", flush=True)
    return ExitCode.INTERRUPTED


@contextmanager
def _agent_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="elastic-runner-agent-") as directory:
        os.environ[AGENT_DIR] = directory
        try:
            yield Path(directory)
        finally:
            del os.environ[AGENT_DIR]


def _read(directory: Path) -> tuple[Storage, RunSummary] | None:
    """The summary of the run that the workers have named, if they got so far."""
    with suppress(OSError, ElasticRunnerError, ValueError):
        storage = open_storage((directory / "run_dir").read_text())
        return storage, decode(storage.read(paths.SUMMARY))
    return None


def _mark_failed(directory: Path, reason: str) -> None:
    """A worker that was killed could not say so itself, and its peers know only that they lost it."""
    found = _read(directory)
    if found is not None and found[1].status in ("running", "failed"):
        storage, summary = found
        storage.put(paths.SUMMARY, encode(dataclasses.replace(summary, status="failed", message=reason)))
