"""How a process is asked for its Python stacks: a signal that faulthandler answers without the GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

REQUEST = signal.Signals.SIGRTMIN + 12
"""Not SIGUSR2, which torch prints its own stacks on and programs use; a real-time signal that nobody does."""


def answer_requests(agent_dir: str | None) -> None:
    """From now on, this process and those that it forks write their stacks to a file when they are asked.

    Nothing is done where no agent would ask, or where the program handles the signal itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if agent_dir is None or not main or catches(os.getpid(), REQUEST):
        return
    with suppress(OSError):
        # Appended to: forked processes share the handle. Kept open until the process has ended.
        handle = os.open(file_of(agent_dir, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(REQUEST, handle, all_threads=True, chain=False)


def file_of(agent_dir: str | Path, pid: int) -> Path:
    """Where a worker and its forked children write."""
    return Path(agent_dir, f"stacks-{pid}.txt")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise. Linux only; False elsewhere."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
