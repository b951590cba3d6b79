"""A launcher that gives up has what its workers left in memory saved, by a process of its own: it knows of no training.

Workers that end well give their memory back: there is something in it after failures, and where a save did not fit
into the grace of a drain.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elastic_runner.launch.early import stay
from elastic_runner.launch.processes import dying_with_parent

log = logging.getLogger(__name__)

FLUSH_SECONDS = 300.0
"""For a flush. After a failure nobody is in a hurry; a scheduler whose grace is over ends it sooner by itself."""


def flush(directory: str, files: Sequence[str], seconds: float = FLUSH_SECONDS) -> None:
    """Save what is in ``files``, the node's memory, and log what has come of it; a signal to stop ends it.

    ``directory``: the agent's. Nothing that goes wrong is raised.
    """
    if not any(_size(file) for file in files):
        return
    try:
        said = _run(directory, files, seconds)
    except subprocess.TimeoutExpired:
        said = f"what is in memory is not saved: that took longer than {seconds:g} s"
    except (OSError, subprocess.SubprocessError) as error:
        said = f"what is in memory is not saved: {error}"
    if said:
        log.warning("%s", said)


def _run(directory: str, files: Sequence[str], seconds: float) -> str:
    """What the process says; it does not outlive this call."""
    command = [sys.executable, "-m", "elastic_runner.worker.flush", directory, *files]
    # In a session of its own: a second Ctrl-C is for us to hear.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=dying_with_parent(),
    ) as process:  # fmt: skip
        asked: list[int] = []

        def hurry(number: int) -> None:
            asked.append(number)
            process.kill()

        stay(hurry)
        try:
            said, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
            stay()
    if asked and not said:
        return "what is in memory is not saved: asked to stop at once"
    if process.returncode and not said:
        return f"what is in memory is not saved: the process that was to do so ended with {process.returncode}"
    return said.strip()


def _size(file: str) -> int:
    with suppress(OSError):
        return Path(file).stat().st_size
    return 0
