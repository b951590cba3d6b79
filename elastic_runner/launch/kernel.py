"""What the kernel says of a process. Nothing here raises: a process may end while it is looked at."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

STOPPED = "T"
"""State of a process that a signal has stopped; one that a debugger has stopped is "t"."""

ENDED = ("", "Z", "X")
"""States of a process that is gone, or all but its exit code."""


def state(pid: int) -> str:
    """One letter, as in ps; empty when it is gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def memory_kills() -> int:
    """How often the kernel has killed for want of memory: in this container where it counts that, else on the machine.

    0 where neither is known.
    """
    for file, word in ((Path("/sys/fs/cgroup/memory.events"), "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if word in counts:
                return int(counts[word])
    return 0


def name(pid: int) -> str:
    """The name of its main thread. Not its command line, which may hold secrets."""
    return _line(pid, "comm")


def holds(pid: int, file: Path) -> bool:
    """Whether the process has this file open. By name: a look at some other file that it has open could block."""
    wanted = str(file.resolve())
    with suppress(OSError):
        for handle in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if str(Path(handle.path).readlink()) == wanted:
                    return True
    return False


def describe(pid: int) -> str:
    """State, where in the kernel it waits, threads, memory."""
    status = dict(line.partition(":")[::2] for line in _read(pid, "status").splitlines())
    wanted = ("State", "Threads", "VmRSS", "SigBlk", "SigCgt")
    lines = [f"{key}: {status[key].strip()}" for key in wanted if key in status]
    lines += [f"wchan: {_line(pid, 'wchan') or '?'}", "kernel stack:", _read(pid, "stack") or "  (not readable)"]
    return "\n".join(lines)


def _read(pid: int, what: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_text()
    return ""


def _line(pid: int, what: str) -> str:
    return _read(pid, what).strip()
