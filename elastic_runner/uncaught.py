"""What an uncaught error of ours does to the process: one readable line, and the documented exit code."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from elastic_runner.environment import read_environment
from elastic_runner.errors import ConfigError, ElasticRunnerError, Interrupted
from elastic_runner.verdict import Verdict, message_of, tell


def exit_by_code() -> None:
    """From now on, an uncaught error of ours ends this process with its documented exit code."""
    if getattr(sys.excepthook, "exits_by_code", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ElasticRunnerError):
            previous(kind, error, trace)
            return
        rank, whole, agent_dir = place()
        final, message = not error.restartable, message_of(error, rank)
        tell(agent_dir, Verdict(code=error.exit_code, message=message, final=final, kind=kind.__name__, rank=rank))
        if whole:
            previous(kind, error, trace)
        elif not isinstance(error, Interrupted):
            print(f"elastic_runner: error: {kind.__name__}: {error}", file=sys.stderr)
        elif rank == 0:  # all ranks stop for the same reason
            print(f"elastic_runner: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)

    hook.exits_by_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def place() -> tuple[int, bool, str | None]:
    """Rank, whether the whole traceback is wanted, the launcher; the environment itself may be what is wrong."""
    try:
        environment = read_environment()
    except ConfigError:
        return 0, False, None
    return environment.rank, environment.traceback, environment.agent_dir
