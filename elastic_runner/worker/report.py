"""What is said of an error: by the exit code, and to a person."""

from __future__ import annotations

import socket
import traceback

from elastic_runner.errors import ElasticRunnerError, ExitCode, Interrupted, is_consequence, text_of


def exit_code(error: BaseException) -> int:
    """The documented code for an uncaught error."""
    return error.exit_code if isinstance(error, ElasticRunnerError) else ExitCode.FAILED


def describe(error: BaseException, where: str, *, with_traceback: bool) -> str:
    """What a person reads: one line for our own errors, the traceback for all others or on request."""
    if isinstance(error, Interrupted):
        return f"elastic_runner: {text_of(error)}"
    if isinstance(error, ElasticRunnerError) and not with_traceback:
        return f"elastic_runner: error: {where}: {type(error).__name__}: {text_of(error)}"
    if is_consequence(error):
        where += " (a peer went away: look for the first error of another rank)"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"elastic_runner: error: {where}:\n{trace.rstrip()}"


def where_am_i(rank: int, world_size: int, phase: str, done: int | None) -> str:
    """Rank, host, phase and the last finished step in a few words."""
    at = "" if done is None else f", after step {done}"
    return f"rank {rank} of {world_size} on {socket.gethostname()}, phase {phase}{at}"
