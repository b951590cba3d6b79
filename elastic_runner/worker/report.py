"""How a worker dies: the reason is printed and recorded first, and no collective is waited for."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from elastic_runner.errors import ElasticRunnerError, ExitCode, Interrupted, PeerLost, PhaseTimeout
from elastic_runner.worker.deadline import leave_soon

_CONSEQUENCE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Connection refused")
_LAST_WRITE = 10.0
"""Seconds for the last write of the summary."""


def exit_code(error: BaseException) -> int:
    """The documented code for an uncaught error."""
    if isinstance(error, ElasticRunnerError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that a peer is gone or does not come."""
    return isinstance(error, (PeerLost, PhaseTimeout)) or (
        isinstance(error, RuntimeError) and _CONSEQUENCE.search(str(error)) is not None
    )


def describe(error: BaseException, where: str, *, with_traceback: bool) -> str:
    """What a person reads: one line for our own errors, the traceback for all others or on request."""
    if isinstance(error, Interrupted):
        return f"elastic_runner: {error}"
    if isinstance(error, ElasticRunnerError) and not with_traceback:
        return f"elastic_runner: error: {where}: {type(error).__name__}: {error}"
    if is_consequence(error):
        where += " (a peer went away: look for the first error of another rank)"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"elastic_runner: error: {where}:\n{trace.rstrip()}"


def where_am_i(rank: int, world_size: int, phase: str, done: int | None) -> str:
    """Rank, host, phase and the last finished step in a few words."""
    at = "" if done is None else f", after step {done}"
    return f"rank {rank} of {world_size} on {socket.gethostname()}, phase {phase}{at}"


def tell(error: BaseException, where: str, *, with_traceback: bool) -> None:
    """Print ``describe`` to stderr."""
    print(describe(error, where, with_traceback=with_traceback), file=sys.stderr, flush=True)


def in_time(action: Callable[[], None]) -> None:
    """Run ``action`` for a few seconds at most, and drop its errors: the process is about to leave."""

    def run() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LAST_WRITE)


def leave_at_once_on(
    failed: Callable[[BaseException], bool], tell: Callable[[BaseException], None]
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """An excepthook for errors that left a worker: print, then exit by code without waiting in destructors or atexit.

    A process group that lost a peer can block in either for as long as its time-out.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not failed(error):
            previous(kind, error, trace)
            return
        code = exit_code(error)
        leave_soon(code)
        tell(error)
        sys.stdout.flush()
        os._exit(code)

    return hook


def record_for_agent(error: BaseException) -> None:
    """Describe the error where torchelastic's agent looks for it (TORCHELASTIC_ERROR_FILE)."""
    get_error_handler().record_exception(error)
