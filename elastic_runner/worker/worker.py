"""Worker: the context in which a user's script trains."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from elastic_runner import stacks, verdict
from elastic_runner.checkpoint.background import Background
from elastic_runner.checkpoint.capture import Parts
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import RunConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.data.random import seed_all
from elastic_runner.device import choose_device
from elastic_runner.environment import Environment, read_environment
from elastic_runner.errors import ExitCode, Interrupted, is_consequence
from elastic_runner.observability.logs import ensure_logging
from elastic_runner.observability.summary import Status
from elastic_runner.storage import open_storage
from elastic_runner.tracking.opening import check_trackers
from elastic_runner.train import evaluate as evaluation
from elastic_runner.train.loop import run_steps
from elastic_runner.train.past import Past
from elastic_runner.train.record import RunRecord, read_summary
from elastic_runner.train.state import TrainState
from elastic_runner.train.step import Step
from elastic_runner.train.strategy import check_strategy, prepare
from elastic_runner.train.synchronize import make_buffers_equal
from elastic_runner.uncaught import exit_by_code
from elastic_runner.verdict import Verdict
from elastic_runner.worker import attempt as attempts
from elastic_runner.worker.course import Course
from elastic_runner.worker.failure import Failure, let_save_end
from elastic_runner.worker.groups import join, leave
from elastic_runner.worker.node import this_agent, this_node
from elastic_runner.worker.opening import open_record, open_snapshots, tell_finished
from elastic_runner.worker.report import where_am_i
from elastic_runner.worker.signals import StopNotice
from elastic_runner.worker.watches import watches

log = logging.getLogger(__name__)

T = TypeVar("T")


class AlreadyFinished(SystemExit):
    """The run has reached its target: nothing is done and the process exits with 0."""


class Worker:
    """Process groups, device, deadlines, signals and the run's record, for as long as the ``with`` block lasts.

    Entering raises AlreadyFinished (a SystemExit with code 0) when the run has reached ``training.max_steps``,
    ConfigError when the configuration cannot work here, SetupError when the peers do not come. Leaving after all
    ranks agreed to stop raises Interrupted, whose exit code asks for a new start.
    """

    coordinator: Coordinator
    checkpoint_coordinator: Coordinator
    background_coordinator: Coordinator
    device: torch.device
    attempt: int
    run_id: str
    """Random, made once for the run directory and the same at every attempt: what a tool of your own may go by."""
    record: RunRecord
    snapshots: Snapshots
    past: Past

    def __init__(self, config: RunConfig) -> None:
        exit_by_code()
        self.config = config
        self.seed = config.seed
        self.run_url = config.run_dir
        self.storage_options = config.storage_options
        self.storage_timeout = config.timeouts.storage
        self.storage = open_storage(config.run_dir, config.storage_options, config.timeouts.storage)
        self.draining = False
        self._environment: Environment = read_environment()
        self._notice = StopNotice()
        self._course = Course()
        self._failure = Failure(self._environment, self.storage, self._course, self._where)
        self._coordinators: tuple[Coordinator, ...] = ()
        self._watch, self._save_watch = watches(
            config.timeouts, self._environment,
            training=self._where, saving=lambda: self._where("save, beside training"), course=self._course,
        )  # fmt: skip
        self.background = Background(lambda: self._save_watch.phase("save"))

    @property
    def rank(self) -> int:
        """Global rank; a place of work, never a part of what is learned."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """Ranks in the job now."""
        return self._environment.world_size

    @property
    def is_main(self) -> bool:
        """Global rank 0: for what happens once in the job (printing, trackers)."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Local rank 0: for what happens once on a node (downloads, caches)."""
        return self._environment.local_rank == 0

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop; the ranks agree on it at the end of a step."""
        return self._notice.given

    @property
    def save_ended(self) -> bool:
        """Whether a save beside training has ended here; the ranks agree on it at the end of a step."""
        return self.background.ended

    @property
    def node(self) -> str:
        """What ranks that see each other's memory have in common: host and process namespace."""
        return this_node()

    def __enter__(self) -> Worker:
        env, config = self._environment, self.config
        ensure_logging(f"[{socket.gethostname()}:{env.rank}]")
        stacks.answer_requests(env.agent_dir)
        self._excepthook = sys.excepthook
        hook = sys.excepthook = self._failure.excepthook()
        try:
            self._notice.install()
            with self._watch.phase("setup"):
                self.device = choose_device(env.local_rank)
                check_strategy(config, world_size=env.world_size, device=self.device)
                check_trackers(config.tracking.trackers)
                try:
                    self._coordinators = join(env, self.device, config.timeouts, self._watch.moved)
                finally:
                    # init_process_group wraps it, holding back what it prints until it returns, which it does not.
                    sys.excepthook = hook
                self.coordinator, self.checkpoint_coordinator, self.background_coordinator = self._coordinators
                self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            return
        try:
            with self._watch.phase("teardown"):
                interrupted = self._finish()
                self.background.rest()
                leave(self._coordinators)
        except BaseException as failure:
            self._fail(failure)
            raise
        self._close()
        if interrupted is not None:
            raise interrupted

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the device and wrap it by ``strategy``. Collective.

        Build the optimizer from what this returns.
        """
        with self.phase("first_step"):
            return prepare(model, self.config, device=self.device, local_world_size=self._environment.local_world_size)

    def steps(self, state: TrainState) -> Iterator[Step]:
        """Optimizer steps from where ``state`` stands to ``training.max_steps``, or until the ranks agree to stop."""
        self._course.state = state
        yield from self._course.follow(run_steps(state, self))

    def evaluate(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        metric: evaluation.Metric,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, float]:
        """Means over ``dataset`` as in ``train.evaluate``, put on record. Collective."""
        step = self._course.step
        metrics = evaluation.evaluate(
            model, dataset, metric, self, batch_size=batch_size, collate_fn=collate_fn,
            # The last one is not cut short: the run will not be started again for it.
            stoppable=step < self.config.training.max_steps,
        )  # fmt: skip
        if metrics:
            with self.phase("evaluate"):
                self.record.evaluation(step, metrics)
        return metrics

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on global rank 0 alone; its result, or its error, is every rank's. Collective."""
        with self.phase("on_main"):
            return self.coordinator.once("on_main", action)

    def local_main_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on local rank 0 of each node, then on the others, which find its work done. Collective."""
        results = []

        def run(turn: bool) -> None:
            if self.is_local_main == turn:
                results.append(action())

        with self.phase("on_main"):
            self.coordinator.agree("local main first", lambda: run(True))
            self.coordinator.agree("local main first, then the others", lambda: run(False))
        return results[0]

    def stop(self, reason: str) -> None:
        """Have enough: all ranks stop and save after the step under way, or the next one, and the run is finished.

        For early stopping, on one rank or on several. A later start goes on; to ask for one, send SIGUSR1 instead.
        """
        self._notice.enough = reason

    def print(self, *values: object) -> None:
        """Print once in the job."""
        if self.is_main:
            print(*values, flush=True)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Enter a named phase, whose deadline is ``timeouts.<name>``."""
        return self._watch.phase(name)

    def progress(self) -> None:
        """Say that this rank has come on within its step: the launcher tells by it who is behind. Microseconds."""
        self._watch.progress()

    def check_fence(self) -> None:
        """Raise Fenced when a newer attempt has taken over the run."""
        attempts.check_fence(self.storage, self.attempt)

    def prepare_save(self, parts: Parts) -> None:
        """Make what is replicated equal before it is copied."""
        make_buffers_equal(parts.model)

    def before_commit(self) -> None:
        """Make the ledger durable: lines beyond a checkpoint are rewound, lines missing below it never return."""
        self.record.saving()

    def blamed(self) -> dict[str, str]:
        """Checkpoints that led to the same failure ``checkpoint.demote_after`` times: path of the manifest and why."""
        return self.past.blamed()

    def restored(self, path: str | None, *, attempt: int, step: int, in_memory: bool = False) -> None:
        """Remember what this attempt starts from: that goes on record. On every rank."""
        self._course.restored, self._course.in_memory = path, in_memory
        self.record.restored(attempt, step)
        self._tell_place()

    def recovered(self, lines: bytes) -> None:
        """Put ledger lines that came with a snapshot on record, where they are not."""
        self.record.recover(lines)

    def distrusted(self) -> int:
        """The attempt up to which memory is distrusted: see ``memory_distrusted``."""
        return self.past.distrusted()

    @property
    def target(self) -> int:
        """The run's last step."""
        return self.config.training.max_steps

    @property
    def in_memory_only(self) -> bool:
        """Whether the state that the attempt began with is nowhere else yet."""
        return self._course.in_memory_only

    def committed(self, step: int) -> None:
        """Put a durable checkpoint on record; beside training."""
        self.record.committed(step)

    def saved(self, step: int) -> None:
        """Know of a durable checkpoint."""
        self._course.saved(step)
        self.record.lines.saved(step)
        self._tell_place()

    def not_saved(self, step: int, reason: str, *, skipped: bool) -> None:
        """Report a save that was skipped or has failed; training goes on."""
        if self.is_main:
            log.log(
                logging.WARNING if skipped else logging.ERROR, "step %d: no save, training goes on: %s", step, reason
            )
        self.record.not_saved(skipped=skipped)
        self._course.not_saved(skipped=skipped)

    def _begin(self) -> None:
        summary = self.coordinator.once("summary", lambda: read_summary(self.storage))
        if summary is not None and summary.status == "finished" and summary.step >= self.target:
            if self.is_main:
                tell_finished(self.storage, self.config, summary)
            done = f"step {summary.step} of {self.target}"
            self.print(f"elastic_runner: {self.storage.url} is finished: {done}. Nothing to do.")
            leave(self._coordinators)
            self._close()
            raise AlreadyFinished(0)
        begun = attempts.begin_together(self.storage, self.coordinator)
        self.attempt, self.run_id = begun.number, begun.run_id
        if begun.last is not None and begun.last.learned_limit:
            self._watch.believe_no_more()  # it may have been no hang, and would come again
        self._course.attempt = self.attempt
        self._tell_place()
        self.record = open_record(self.storage, self.config, begun, is_main=self.is_main)
        if self.is_main:
            placed = f"{self.world_size} ranks, {self.config.strategy.name}, {self.device.type}"
            log.info("attempt %d of %s: %s", self.attempt, self.storage.url, placed)
        self.past = Past(self.storage, self.record, self.config)
        self.snapshots = open_snapshots(
            self._environment, self.config, self.record, self.checkpoint_coordinator,
            node=self.node, attempt=self.attempt,
        )  # fmt: skip
        seed_all(self.seed, "init")

    def _tell_place(self) -> None:
        """Let the launcher of this node know of the run, in case that no worker will be able to."""
        if self.is_local_main:
            place = self._course.place(self.run_url, self.storage_options)
            verdict.place(self._environment.agent_dir, place)

    def _finish(self) -> Interrupted | None:
        step, target, agent = self._course.step, self.target, this_agent(self._environment.agent_dir)
        with self.phase("save"):
            unsaved = self.background.outcome()  # the program left the loop while a save was going on
        if unsaved is not None:
            raise unsaved
        asked = self.coordinator.gather("finish", (agent, self.stop_requested, self._notice.enough))
        enough = next((reason for _, _, reason in asked if reason is not None), None)
        status: Status = "finished" if step >= target or enough is not None else "interrupted"
        message = self._course.early(enough or self._notice.why(draining=self.draining), target)
        self.record.end(status, message)
        if self.is_main and (status == "finished" or not self.draining):
            log.info("%s: %s", message or f"{status} at step {step} of {target}", self.storage.url)
        self.snapshots.clear()  # nobody will ask for them
        # The others leave after the summary is written: their end makes the launcher end everybody.
        self.coordinator.gather("finished", None)
        code = ExitCode.INTERRUPTED if self.draining and status == "interrupted" else ExitCode.FINISHED
        here = any(stop for there, stop, _ in asked if there == agent)
        verdict.tell(self._environment.agent_dir, Verdict(code=code, message=message, final=True, asked=here))
        if code == ExitCode.FINISHED:
            return None
        return Interrupted(f"{message}. Start the same command again to continue.")

    def _fail(self, error: BaseException) -> None:
        """Say and record the reason; no collective of our own, since peers may be gone."""
        if isinstance(error, (AlreadyFinished, GeneratorExit)):
            return
        if isinstance(error, SystemExit) and not error.code:
            self._leave_by_exit()
            return
        self._failure.report(error, getattr(self, "record", None))
        # Where a peer is gone already, no save can end well.
        if not is_consequence(error) and (unsaved := self._let_save_end()) is not None:
            log.error("%s", unsaved)
        if self.world_size == 1:
            # A program that called us may catch the error and go on.
            leave(self._coordinators)
            self._watch.close()
            self._notice.restore()

    def _leave_by_exit(self) -> None:
        self._failure.left(getattr(self, "record", None), self.target)
        unsaved = self._let_save_end()
        leave(self._coordinators)
        self._close()
        if unsaved is not None:
            raise unsaved

    def _let_save_end(self) -> BaseException | None:
        return let_save_end(self.background, self.config.timeouts.teardown)

    def _close(self) -> None:
        self._watch.close()
        self._save_watch.close()
        self._notice.restore()
        sys.excepthook = self._excepthook

    def _where(self, phase: str | None = None) -> str:
        """This process in a few words. ``phase``: the one that the program is in, unless another is meant."""
        return where_am_i(self.rank, self.world_size, phase or self._watch.current, self._course.done)
