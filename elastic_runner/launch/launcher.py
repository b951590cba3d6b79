"""``elastic-runner launch``: torchrun's own command line, with an agent, defaults and exit codes of ours.

What stock torchrun 2.13 does and this changes: workers start by fork, in a store of their own per attempt; an attempt
ends by events, not by looks; a hang is noticed; restarts are counted by cause and given back by progress, and there is
none where none can help; SIGUSR1 is a notice like SIGTERM; draining workers have ten minutes instead of 30 s; the exit
code is the documented one of the worker that failed first, and the summary says why.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from elastic_runner import paths, verdict
from elastic_runner.environment import AGENT_DIR, snapshot_files
from elastic_runner.errors import ConfigError, ElasticRunnerError, ExitCode
from elastic_runner.launch.agent import EndOfJob, Plan, agents_by
from elastic_runner.launch.early import Stopped, hear_no_more, leave_when_asked, leaving_anyway, stay
from elastic_runner.launch.flush import FLUSH_SECONDS, flush
from elastic_runner.launch.forking import ForkServer, workers_by
from elastic_runner.launch.health import Health
from elastic_runner.launch.health_server import HealthServer
from elastic_runner.launch.notice import Notices
from elastic_runner.launch.options import budgets, by_itself, check, check_port, logs_within, parse
from elastic_runner.launch.processes import forget_shared_memory
from elastic_runner.launch.rendezvous.handler import BACKEND, JobEnded
from elastic_runner.launch.restart import default_policies
from elastic_runner.observability.summary import Status, decode, encode
from elastic_runner.storage import open_storage
from elastic_runner.verdict import RunPlace, Verdict

log = logging.getLogger(__name__)

HEALTH = "health"
"""File in the agent's directory with the URL of its health."""
_SUMMING_UP = 10.0
"""Seconds for the storage to take the last word: whoever asked this launcher to stop does not wait for long."""
_PREFIX, _NEW = "elastic-runner-agent-", "elastic-runner-new-"


def launch(arguments: Sequence[str]) -> int:
    """Run the workers to their end; ``arguments`` are torchrun's. Returns a documented exit code.

    Raises ConfigError for values that torchrun cannot use.
    """
    try:
        try:
            leave_when_asked()
            given = _launch(arguments)
        finally:
            hear_no_more()
    except Stopped as error:
        given = Verdict(code=ExitCode.INTERRUPTED, message=str(error), final=True)
    if given.code != ExitCode.FINISHED:
        print(f"elastic-runner: {ExitCode(given.code).name.lower()} ({given.code}): {given.message}", flush=True)
    return given.code


def _launch(arguments: Sequence[str]) -> Verdict:
    """How it ended. Raises ConfigError; and Stopped, until there are workers."""
    options = parse(arguments)
    check(options)
    policies = default_policies(budgets(options))
    # Read by torch's rendezvous: a store of its own per round, so that no dead worker's keys are left in it.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its banner
    # What --tee puts before a line: as ours has it.
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", f"[{socket.gethostname()}:${{rank}}] ")
    health = Health()
    with _agent_directory() as directory, _answering(health, options.health, directory), ExitStack() as leaving:
        by_itself(options, directory)
        logs_within(options, directory)
        check_port(options)
        server = ForkServer(options.preload, fork=options.start_by == "fork", standby=options.standby)
        notices = Notices(file=options.notice_file, url=options.notice_url)
        plan = Plan(
            directory=directory,
            policies=policies,
            prepare=server.prepare,
            sweep=server.sweep,
            reap=server.reap,
            notices=notices,
            health=health,
            leaving=leaving,
        )
        with agents_by(plan), workers_by(server):
            if options.rdzv_backend != BACKEND:
                # Torch closes its own rendezvous, for all nodes and for good, when anything else ends the agent.
                leave_when_asked(lambda number: SignalException("asked to stop", signal.Signals(number)))
                leaving.enter_context(leaving_anyway())
            given = _run(options, str(directory))
        notices.close()
        health.doing("saving what is in memory", within=FLUSH_SECONDS)
        flush(str(directory), snapshot_files())
        summing_up = threading.Thread(target=_sum_up, args=(str(directory), given), daemon=True)
        summing_up.start()
        summing_up.join(_SUMMING_UP)
    return given


def _run(options: object, directory: str) -> Verdict:
    """How it ended, in the words of whoever knows best; from then on, no signal changes it."""
    try:
        try:
            torchrun.run(options)
        finally:
            stay()
    except EndOfJob as end:
        return end.verdict
    except SignalException as error:
        said = verdict.read(directory)
        if said is not None and said.final:
            return said
        why = "" if said is None or said.consequence else f" ({said.message})"
        message = f"{error.sigval.name}: stopped before the workers had saved{why}; the newest checkpoint stands"
        return Verdict(code=ExitCode.INTERRUPTED, message=message, final=True)
    except JobEnded as error:
        elsewhere = Verdict(code=ExitCode.FAILED, message=f"rendezvous: {error}", final=True)
        return verdict.decode(error.reason) or elsewhere
    except RendezvousError as error:
        return Verdict(code=ExitCode.FAILED, message=f"rendezvous: {error}", final=True)
    except ValueError as error:
        raise ConfigError(f"torchrun: {error}") from error
    return Verdict(code=ExitCode.FINISHED, message="", final=True)


@contextmanager
def _answering(health: Health, address: tuple[str, int] | None, directory: Path) -> Iterator[None]:
    """Serve ``health`` there; where that is stands in the agent's directory, too."""
    if address is None:
        yield
        return
    server = HealthServer(health, *address)
    (directory / HEALTH).write_text(server.url)
    print(f"elastic-runner: health at {server.url}/live, /ready and /metrics", flush=True)
    try:
        yield
    finally:
        server.close()


@contextmanager
def _agent_directory() -> Iterator[Path]:
    """Scratch, held by a lock for as long as this process lives; what killed agents have left is swept."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                forget_shared_memory(verdict.processes(left))
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
    new = Path(tempfile.mkdtemp(prefix=_NEW))
    handle = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    directory = new.with_name(_PREFIX + new.name.removeprefix(_NEW))
    new.rename(directory)  # only now: another launcher would sweep what is not locked
    os.environ[AGENT_DIR] = str(directory)
    try:
        yield directory
    finally:
        del os.environ[AGENT_DIR]
        forget_shared_memory(verdict.processes(directory))
        shutil.rmtree(directory, ignore_errors=True)
        os.close(handle)


def _sum_up(directory: str, given: Verdict) -> None:
    """Say in the run's summary what a killed worker could not say itself, or one that only lost a peer did not know.

    Where other nodes go on, they do so by a newer attempt, whose word stands.
    """
    run: RunPlace | None = verdict.last_place(directory)
    if run is None or given.code == ExitCode.FINISHED:
        return
    status: Status = "interrupted" if given.code == ExitCode.INTERRUPTED else "failed"
    with suppress(ElasticRunnerError, ValueError):
        storage = open_storage(run.url, run.options, _SUMMING_UP)
        summary = decode(storage.read(paths.SUMMARY))
        if summary.status in ("running", "failed") and summary.attempt <= run.attempt:
            ended = dataclasses.replace(summary, status=status, message=given.message, updated=time.time())
            storage.put(paths.SUMMARY, encode(ended))
