"""How a worker dies: the reason is told, printed and recorded first, and no collective is waited for."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from elastic_runner import verdict
from elastic_runner.checkpoint.background import Background
from elastic_runner.environment import Environment
from elastic_runner.errors import ElasticRunnerError, ExitCode, SaveFailed, is_consequence
from elastic_runner.history import write_end
from elastic_runner.storage import Storage
from elastic_runner.train.record import RunRecord
from elastic_runner.verdict import Verdict, message_of
from elastic_runner.worker.course import Course
from elastic_runner.worker.deadline import leave_soon
from elastic_runner.worker.report import describe, exit_code

log = logging.getLogger(__name__)

_LAST_WRITE = 10.0
"""Seconds for the last write of the summary."""


class Failure:
    """The error that the program failed with, once it has. ``where`` describes this process in messages."""

    def __init__(self, environment: Environment, storage: Storage, course: Course, where: Callable[[], str]) -> None:
        self._environment = environment
        self._storage = storage
        self._course = course
        self._where = where
        self._error: BaseException | None = None
        self._printed = False

    def report(self, error: BaseException, record: RunRecord | None) -> None:
        """Say why, at once, to all who ask for it. ``record``: the run's, once the attempt has begun."""
        env, kind = self._environment, type(error).__name__
        message, consequence = message_of(error, env.rank), is_consequence(error)
        verdict.tell(
            env.agent_dir,
            Verdict(
                code=exit_code(error),
                message=message,
                final=isinstance(error, ElasticRunnerError) and not error.restartable,
                consequence=consequence,
                kind=kind,
                rank=env.rank,
                step=self._course.done,
            ),
        )
        self._error = error
        with suppress(Exception):  # torchelastic's agent looks for it in TORCHELASTIC_ERROR_FILE
            get_error_handler().record_exception(error)
        if env.world_size > 1:
            self.print(error)  # now: what the program does on its way out may wait for peers
        if record is not None:
            in_time(lambda: self._put_on_record(record, kind, message, consequence))

    def left(self, record: RunRecord | None, target: int) -> None:
        """Say that the program leaves as if all were well: its exit code, 0, does not. ``target``: the last step."""
        env, message = self._environment, f"the program left by sys.exit at step {self._course.step} of {target}"
        said = Verdict(
            code=ExitCode.FAILED, message=f"rank {env.rank}: {message}", final=False,
            kind=SystemExit.__name__, rank=env.rank, step=self._course.done,
        )  # fmt: skip
        verdict.tell(env.agent_dir, said)  # it counts where peers fail of it
        if env.rank == 0:
            log.warning("%s: %s", message, self._storage.url)
        if record is not None:
            in_time(lambda: record.end("interrupted", message))

    def print(self, error: BaseException) -> None:
        """To stderr, once."""
        if not self._printed:
            self._printed = True
            text = describe(error, self._where(), with_traceback=self._environment.traceback)
            print(text, file=sys.stderr, flush=True)

    def excepthook(self) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
        """For an error that has left the worker: print, exit by code without waiting in destructors or atexit.

        A process group that lost a peer can block in either for as long as its time-out.
        """
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if error is not self._error:
                previous(kind, error, trace)
                return
            code = exit_code(error)
            leave_soon(code)
            self.print(error)
            sys.stdout.flush()
            os._exit(code)

        return hook

    def _put_on_record(self, record: RunRecord, kind: str, message: str, consequence: bool) -> None:
        try:
            if not consequence:
                write_end(self._storage, self._course.end(kind=kind, rank=self._environment.rank, message=message))
        finally:
            record.fail(message, consequence=consequence)


def in_time(action: Callable[[], None]) -> None:
    """Run ``action`` for a few seconds at most, and drop its errors: the process is about to leave."""

    def run() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LAST_WRITE)


def let_save_end(background: Background, seconds: float) -> BaseException | None:
    """What is being saved need not be lost with us; what it failed with. ``seconds``: ``timeouts.teardown``."""
    if not background.wait(seconds):
        return SaveFailed(f"the save that was going on did not end within {seconds:g} s (timeouts.teardown)")
    failure = background.outcome()
    background.rest(seconds)
    return failure
