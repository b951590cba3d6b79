"""What a script's own uncaught error leaves behind, where er.Worker has not dealt with it: at its imports, mostly.

Ranks that fail alike, and attempts, print one traceback where they write to the same place, and a line for each other.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import xxhash

from elastic_runner.errors import ExitCode, is_consequence
from elastic_runner.uncaught import place
from elastic_runner.verdict import Verdict, message_of, tell

_PRINTED = "tracebacks"
"""File in the launcher's directory: what was printed, and where to."""
_RUNPY = runpy.run_path.__code__.co_filename


def report_errors(starters: Collection[str]) -> None:
    """From now on, an uncaught error is told to the launcher. ``starters``: files that have started the script, whose
    frames are left out of tracebacks."""
    previous, worker = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank, whole, directory = place()
        forked = os.getpid() != worker  # whose end is not the worker's
        if isinstance(error, KeyboardInterrupt) and directory is not None and not whole:
            return  # everybody knows of Ctrl-C; Python goes on to end this process by the signal
        if whole or forked or directory is None or not isinstance(error, Exception):
            previous(kind, error, trace)
            return
        while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename in {_RUNPY, *starters}:
            trace = trace.tb_next
        said = message_of(error, rank)
        text = "".join(traceback.format_exception(kind, error, trace))
        _print_once(text, f"{said} (its traceback is above)\n", Path(directory))
        tell(
            directory,
            Verdict(
                code=ExitCode.FAILED,
                message=said,
                final=False,
                consequence=is_consequence(error),
                kind=kind.__name__,
                rank=rank,
            ),
        )

    sys.excepthook = hook


def _print_once(text: str, again: str, directory: Path) -> None:
    """To stderr: ``text``, or ``again`` where it has been printed to the same file, pipe or terminal."""
    where = os.fstat(sys.stderr.fileno())
    this = f"{xxhash.xxh3_64_hexdigest(text.encode())} {where.st_dev} {where.st_ino}\n"
    with (directory / _PRINTED).open("a+") as printed:
        fcntl.flock(printed, fcntl.LOCK_EX)  # nobody says "above" before it is
        printed.seek(0)
        if this in printed:
            text = again
        else:
            printed.write(this)
        print(text, file=sys.stderr, end="", flush=True)
