"""``elastic-runner launch``: torchrun's own command line and agent, with defaults and exit codes of ours.

What stock torchrun 2.13 does and this changes: the store is not shared across restarts; three restarts are allowed,
and none where a worker says that none can help; SIGUSR1 is a notice like SIGTERM; draining workers have ten minutes
instead of 30 s; the exit code is the documented one of the worker that failed first, and the summary says why.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from elastic_runner import paths, verdict
from elastic_runner.environment import AGENT_DIR
from elastic_runner.errors import ConfigError, ElasticRunnerError, ExitCode, PeerLost, PhaseTimeout
from elastic_runner.launch.agent import EndOfJob, heeding_verdicts
from elastic_runner.launch.forking import forked_workers
from elastic_runner.observability.summary import decode, encode
from elastic_runner.storage import open_storage
from elastic_runner.verdict import Verdict

MAX_RESTARTS = 3

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Forwarded to the workers, which drain."""

DRAIN_SECONDS = 600
"""Given to workers to finish a step and a save after a signal, before they are killed; torchrun's is 30."""


def launch(arguments: Sequence[str]) -> int:
    """Run the workers to their end; ``arguments`` are torchrun's. Returns a documented exit code.

    Raises ConfigError for values that torchrun cannot use.
    """
    parser = torchrun.get_args_parser()
    parser.prog = "elastic-runner launch"
    ours = parser.add_argument_group("elastic-runner")
    ours.add_argument(
        "--start-by", choices=["fork", "exec"], default="fork",
        help="fork: workers come from a process that has imported torch already. exec: a new interpreter each.",
    )  # fmt: skip
    ours.add_argument(
        "--preload", action="append", default=[], metavar="MODULE",
        help="Import this, too, before workers are forked. It must start no thread and not touch CUDA.",
    )  # fmt: skip
    known = vars(parser.parse_args(["script"]))
    defaults = {"max_restarts": MAX_RESTARTS, "signals_to_handle": SIGNALS, "shutdown_timeout": DRAIN_SECONDS}
    parser.set_defaults(**{name: value for name, value in defaults.items() if name in known})
    options = parser.parse_args(list(arguments))
    # Read by torch's rendezvous: a store of its own per round, so that no dead worker's keys are left in it.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its banner
    starting = forked_workers(options.preload) if options.start_by == "fork" else nullcontext()
    with _agent_directory() as directory, heeding_verdicts(directory), starting:
        try:
            torchrun.run(options)
        except EndOfJob as end:
            return _ended(end.verdict)
        except ChildFailedError as error:
            return _ended(verdict.read(directory) or _killed(directory, error))
        except SignalException as error:
            unsaved = Verdict(
                code=ExitCode.INTERRUPTED,
                message=f"{error.sigval.name}: stopped before the workers had saved; the last checkpoint stands",
                final=True,
            )
            return _ended(verdict.read(directory) or unsaved)
        except RendezvousError as error:  # also when another node has ended the job
            gone = Verdict(code=ExitCode.FAILED, message=f"rendezvous: {error}", final=True)
            return _ended(verdict.read(directory) or gone)
        except ValueError as error:
            raise ConfigError(f"torchrun: {error}") from error
    return ExitCode.FINISHED


def _ended(given: Verdict) -> int:
    if given.code != ExitCode.FINISHED:
        print(f"elastic-runner: {ExitCode(given.code).name.lower()} ({given.code}): {given.message}", flush=True)
    return given.code


def _killed(directory: str, error: ChildFailedError) -> Verdict:
    """No worker could say why: the one that was killed could not, and its peers know only that they lost it."""
    rank, failure = root_cause(error.failures)
    how = f"killed by signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    message = f"rank {rank} ended first: {how}"
    _mark_failed(directory, message)
    code = failure.exitcode if failure.exitcode in set(ExitCode) else ExitCode.FAILED
    return Verdict(code=int(code), message=message, final=False)


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


@contextmanager
def _agent_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="elastic-runner-agent-") as directory:
        os.environ[AGENT_DIR] = directory
        try:
            yield directory
        finally:
            del os.environ[AGENT_DIR]


def _mark_failed(directory: str, reason: str) -> None:
    """Say in the run's summary what a worker could not say itself."""
    run = verdict.read_place(directory)
    if run is None:
        return
    with suppress(ElasticRunnerError, ValueError):
        storage = open_storage(run.url, run.options)
        summary = decode(storage.read(paths.SUMMARY))
        if summary.status in ("running", "failed"):
            storage.put(paths.SUMMARY, encode(dataclasses.replace(summary, status="failed", message=reason)))
