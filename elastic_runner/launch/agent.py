"""The agent of a node: torch's own, with another loop. It waits for events instead of looking every so often.

Workers end, the round is over, a worker hangs, a signal comes: each ends the attempt at once, all workers are killed
(those in a collective would wait for a peer that is not coming), and a pure policy says whether there is another one.

Private names of torch, read in 2.13: ``launcher.api.launch_agent`` builds the agent from the name
``LocalElasticAgent`` in its module; ``SimpleElasticAgent._invoke_run`` is its loop, ``_initialize_workers``,
``_shutdown`` and ``_exit_barrier`` its parts; ``SubprocessContext.subprocess_handlers`` holds the processes.
tests/unit/test_torch_private.py fails when they change.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.launcher.api as api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from elastic_runner import history, verdict
from elastic_runner.environment import flight_recorder
from elastic_runner.errors import ElasticRunnerError, ExitCode
from elastic_runner.launch import kernel
from elastic_runner.launch.attempt import Over, Seen, describe, end_of, last_word, tail, time_to_save, unhealthy
from elastic_runner.launch.early import stay
from elastic_runner.launch.evidence import UPLOAD, gather, upload
from elastic_runner.launch.health import WATCHING, Health
from elastic_runner.launch.memory import NodeMemory
from elastic_runner.launch.notice import Notices
from elastic_runner.launch.processes import Workers, forget_shared_memory
from elastic_runner.launch.rendezvous.handler import ElasticRendezvous
from elastic_runner.launch.restart import Policy, cause_of, first_objection
from elastic_runner.launch.watchdog import Hang, Watchdog
from elastic_runner.storage import open_storage
from elastic_runner.verdict import RunPlace, Verdict

log = logging.getLogger(__name__)

_LAST_WORDS = 1.0
"""Seconds for the worker that failed first to say so, when the one that ended only knows that it lost a peer."""
_KILLING = 30.0
"""Seconds for a killed process to end; one that does not is stuck in the kernel, and so is what it held."""
_POLLING = 1.0
"""Seconds between questions to a rendezvous of torch's, which does not tell by itself that a node waits."""
_HURRY = 20.0
"""Seconds that draining workers are left after a second notice, or without a peer that has failed; Kubernetes and SLURM
give 30 by default."""
_TURN = 30.0
"""Seconds for a turn of the loop, which comes twice a second, before the agent does not count as live any more."""
_ENDING = 600.0
"""The same for the end of an attempt: stacks are gathered, processes die, storages are slow to answer."""


class Noticed(SignalException):
    """Asked to stop, by something else than a signal; the message says by what."""


class EndOfJob(Exception):
    """The workers are not to be started again."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the agent goes about its work."""

    directory: Path
    """Its scratch directory, by which workers find it."""
    policies: tuple[Policy, ...]
    """Whether to start workers again."""
    prepare: Callable[[Iterable[int]], None]
    """Makes the next workers of these local ranks ready, while they train."""
    sweep: Callable[[], None]
    """Ends what workers have started and left behind."""
    reap: Callable[[], None]
    """Takes in what has ended and nobody else waits for."""
    notices: Notices
    """Whether to stop, besides by a signal."""
    health: Health
    """What it says of itself to those that ask."""
    leaving: ExitStack
    """Has it out of the rendezvous at the end: torch's agent stays there after a signal."""


@dataclass
class _Attempt:
    """One start of the workers of this node."""

    workers: Workers
    ranks: dict[int, int]
    """Global ranks by local rank."""
    number: int
    """As all nodes count."""
    memory_kills: int = field(default_factory=kernel.memory_kills)
    """The kernel's count at its beginning."""


@contextmanager
def agents_by(plan: Plan) -> Iterator[None]:
    """Within, torchrun's agents are ours."""
    original = api.LocalElasticAgent
    api.LocalElasticAgent = partial(Agent, plan)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        api.LocalElasticAgent = original  # type: ignore[misc]


class Agent(LocalElasticAgent):
    """Raises EndOfJob where it does not start workers again, instead of returning failures."""

    def __init__(self, plan: Plan, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._plan = plan
        spec = self._worker_group.spec
        self._handler = spec.rdzv_handler
        self._ends: list[history.End] = []
        """Of this node's attempts, where a rendezvous of torch's cannot tell the others'."""
        self._uploads: list[threading.Thread] = []
        self._attempts = 0
        self._interrupted: Verdict | None = None
        self._memory = NodeMemory(spec.local_world_size)
        os.environ.update(self._memory.variables())
        self._watchdog = Watchdog(self._memory.heartbeats)
        self._told = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if isinstance(self._handler, ElasticRendezvous):
            self._handler.tell(lambda: os.eventfd_write(self._told, 1))
            plan.leaving.callback(self._handler.leave, done=False)
        else:
            log.warning(
                "rendezvous %s: whatever hosts its store must not be lost, and a node that goes silent is noticed "
                "by its peers alone; --rdzv-backend=elastic has neither weakness",
                self._handler.get_backend(),
            )

    def _invoke_run(self, role: str = "default") -> RunResult:
        attempt: _Attempt | None = None
        try:
            while True:
                attempt = None
                attempt = self._start()
                over = self._wait(attempt)
                if over.cause == "finished":
                    self._plan.health.doing("waiting for the other nodes to finish", within=None)
                    self._exit_barrier()
                    stay()
                    done = {worker.global_rank: None for worker in self._worker_group.workers}
                    return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
                self._end(attempt, over)
        except SignalException as notice:
            if attempt is not None:
                self._drain(attempt, notice)
            raise
        except Exception:
            stay()  # why it ends is known, and no signal changes that
            raise
        finally:
            if attempt is not None:
                attempt.workers.close()

    def _start(self) -> _Attempt:
        """Rendezvous, then workers."""
        verdict.clear(str(self._plan.directory))
        self._plan.health.doing("waiting for a place in a world", within=None)
        group = self._worker_group
        try:
            self._initialize_workers(group)
        except RendezvousTimeoutError as error:
            if self._interrupted is None and self._attempts == 0:
                raise
            # Those who were asked to stop, or were lost, have not come back.
            raise self._no_more(self._interrupted or _too_few(error)) from None
        assert self._pcontext is not None
        workers = Workers({rank: each.proc for rank, each in self._pcontext.subprocess_handlers.items()})  # type: ignore[attr-defined]
        self._watchdog.begin(workers.pids)
        self._plan.health.begin(self._attempts, group.workers[0].world_size, self._watchdog.beats)
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        return _Attempt(workers=workers, ranks=ranks, number=self._attempts)

    def _rendezvous(self, worker_group: Any) -> None:
        """torch's, and then a number of the attempt that all nodes have in common, which workers are told."""
        super()._rendezvous(worker_group)
        ours = self._handler if isinstance(self._handler, ElasticRendezvous) else None
        self._attempts = self._attempts + 1 if ours is None else ours.attempt
        self._remaining_restarts = worker_group.spec.max_restarts - (self._attempts - 1)

    def _wait(self, attempt: _Attempt) -> Over:
        """Until the attempt is over, one way or another."""
        workers, asked, prepared = attempt.workers, time.monotonic(), False
        while True:
            self._plan.health.doing(WATCHING, within=_TURN)
            workers.wait([self._told], min(self._watchdog.wait_s(time.monotonic()), _POLLING))
            with suppress(BlockingIOError):
                os.eventfd_read(self._told)
            self._plan.reap()
            if any(code != ExitCode.FINISHED for code in workers.codes.values()):
                return self._failed(attempt)
            if not workers.pids:
                return Over(cause="finished")
            now = time.monotonic()
            if (hang := self._watchdog.look(now)) is not None:
                said = verdict.read(str(self._plan.directory))  # it may hang in leaving, all being done
                return Over(cause="hang", reason=hang.reason, hang=hang, verdict=said)
            if not prepared and self._plan.health.ready().yes:
                # Not sooner: it would take from a start what it is to spare the next one.
                self._plan.prepare(attempt.ranks)
                prepared = True
            if isinstance(self._handler, ElasticRendezvous):
                reason = self._handler.over
            elif now - asked >= _POLLING:
                asked = now
                reason = "more nodes are waiting" if self._handler.num_nodes_waiting() > 0 else None
            else:
                reason = None
            if reason is not None:
                return Over(cause="membership", reason=reason)
            if (notice := self._plan.notices.given()) is not None:
                raise Noticed(notice, signal.SIGUSR1)

    def _failed(self, attempt: _Attempt) -> Over:
        """A worker has ended badly. Whoever only lost a peer may have been sooner than the peer that failed."""
        workers, directory = attempt.workers, str(self._plan.directory)
        self._plan.health.doing("waiting for the workers to end", within=self._shutdown_timeout + _TURN)
        given = verdict.read(directory)
        interrupted = given is not None and given.code == ExitCode.INTERRUPTED
        # All have saved then, and are on their way out.
        end = time.monotonic() + (self._shutdown_timeout if interrupted else _LAST_WORDS)
        while workers.pids and (left := end - time.monotonic()) > 0:
            given = verdict.read(directory)
            known = given is not None and not given.consequence
            if not interrupted and (known or any(code < 0 for code in workers.codes.values())):
                break
            if not workers.wait(() if interrupted else [self._told], left):
                break  # the round is over: another node knows more
        return Over(cause="workers", verdict=verdict.read(directory))

    def _end(self, attempt: _Attempt, over: Over) -> None:
        """Kill what is left, say and record what has happened. Raises EndOfJob."""
        self._plan.health.doing("ending the attempt", within=_ENDING)
        place = verdict.read_place(str(self._plan.directory))
        bundle = None if over.hang is None else self._gather(attempt, over.hang)
        seen = Seen(
            number=attempt.number,
            codes=dict(attempt.workers.codes),
            ranks=attempt.ranks,
            steps=self._watchdog.steps(),
            stands=self._watchdog.stands(),
            host=socket.gethostname(),
            place=place,
            out_of_memory=kernel.memory_kills() > attempt.memory_kills,
        )
        stuck = attempt.workers.kill(_KILLING)
        self._plan.sweep()
        forget_shared_memory(verdict.processes(self._plan.directory))
        self._shutdown(signal.SIGKILL)
        attempt.workers.close()
        end = end_of(over, seen)
        log.warning("%s", describe(over, end, seen))
        self._show_last_words(attempt, end)
        if bundle is not None:
            self._keep(bundle, place)
        if stuck:
            raise self._no_more(unhealthy(stuck))
        final = last_word(over, seen)
        if final is not None and not self._goes_on(final):
            raise self._no_more(final)
        self._interrupted = over.verdict if end is None else None
        if end is not None:
            objection = first_objection(self._known_ends(place, end), self._plan.policies)
            if objection is not None:
                raise self._no_more(objection)
        failed = cause_of(end) if end is not None else None
        self._plan.health.end(failed or ("membership" if over.cause == "membership" else "preemption"))

    def _show_last_words(self, attempt: _Attempt, end: history.End | None) -> None:
        """The end of what the rank that failed first has said, where that went to a file."""
        for local, rank in attempt.ranks.items():
            file = self._pcontext.stderrs[local] if self._pcontext is not None else ""
            if file and end is not None and rank == end.rank:
                log.warning("the end of %s:\n%s", file, tail(Path(file)))

    def _gather(self, attempt: _Attempt, hang: Hang) -> Path | None:
        """What can be known of a hang before the workers are killed."""
        try:
            return gather(
                self._plan.directory,
                attempt.workers.pids,
                hang,
                heartbeats=self._watchdog.describe(),
                flight_recorder=flight_recorder(),
            )
        except OSError as error:
            log.error("no evidence of the hang could be gathered: %s", error)
            return None

    def _keep(self, bundle: Path, place: RunPlace | None) -> None:
        """Put a bundle into the run directory, while workers start again."""
        if place is None:
            log.warning("what is known of the hang is in %s until the job ends", bundle)
            return

        def keep() -> None:
            try:
                log.warning("what is known of the hang is in %s", upload(bundle, place))
            except ElasticRunnerError as error:
                log.error("what is known of the hang could not be kept: %s", error)

        self._uploads.append(threading.Thread(target=keep, name="evidence", daemon=True))
        self._uploads[-1].start()

    def _goes_on(self, given: Verdict) -> bool:
        """Whether only another node was asked to stop: it leaves, and the rest is a smaller world."""
        interrupted = given.code == ExitCode.INTERRUPTED and not given.asked
        return interrupted and isinstance(self._handler, ElasticRendezvous)

    def _known_ends(self, place: RunPlace | None, end: history.End) -> list[history.End]:
        """How attempts ended, by the run's record, which all nodes share; where there is none, by what they say."""
        ours = self._told_ends(end)
        if place is not None:
            try:
                storage = open_storage(place.url, place.options)
                history.write_end(storage, end)
                return history.read_ends_since_saved(storage)
            except ElasticRunnerError as error:
                log.warning("restarts are counted by what this job's nodes say alone: %s", error)
        return ours

    def _told_ends(self, end: history.End) -> list[history.End]:
        if isinstance(self._handler, ElasticRendezvous):
            return [history.decode(line) for line in self._handler.failures(history.encode(end))]
        self._ends.append(end)
        return self._ends

    def _no_more(self, given: Verdict) -> EndOfJob:
        """Tell the other nodes; one that is asked to stop only leaves. No signal changes this verdict any more."""
        stay()
        for thread in self._uploads:
            thread.join(UPLOAD)
        if isinstance(self._handler, ElasticRendezvous):
            if given.code in (ExitCode.INTERRUPTED, ExitCode.UNHEALTHY_NODE):
                self._handler.leave(done=False, unhealthy=given.code == ExitCode.UNHEALTHY_NODE)
            else:
                given = verdict.decode(self._handler.end_job(verdict.encode(given))) or given
        return EndOfJob(given)

    def _drain(self, attempt: _Attempt, notice: SignalException) -> None:
        """Have the workers stop and save, within the grace; a second notice shortens it, the same again ends it."""
        again: list[signal.Signals] = []

        def hear(number: int) -> None:
            again.append(signal.Signals(number))
            os.eventfd_write(self._told, 1)

        stay(hear)
        end = time.monotonic() + self._shutdown_timeout
        self._plan.health.doing("asked to stop: the workers save", within=self._shutdown_timeout + _ENDING)
        by = str(notice) if isinstance(notice, Noticed) else notice.sigval.name
        log.warning("%s: the workers are asked to stop and save", by)
        attempt.workers.signal(notice.sigval)
        while attempt.workers.pids:
            now, steps = time.monotonic(), self._watchdog.steps()
            running = [steps.get(local) for local in attempt.workers.pids]
            end = min(end, now + time_to_save(attempt.workers.codes.values(), running, _HURRY))
            if now >= end:
                break
            attempt.workers.wait([self._told], end - now)
            with suppress(BlockingIOError):
                os.eventfd_read(self._told)
            while again:
                number = again.pop(0)
                end = min(end, time.monotonic() + _HURRY)
                log.warning("%s: %.0f s are left to save", number.name, end - time.monotonic())
                attempt.workers.signal(number)
        attempt.workers.kill(_KILLING)


def _too_few(error: RendezvousTimeoutError) -> Verdict:
    return Verdict(code=ExitCode.INTERRUPTED, message=f"too few nodes are left: {error}", final=True)
