"""The workers of one attempt as processes: waited for by events, killed with all that they have started."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

_REAP_SECONDS = 5.0
"""For an exit code to come from the fork server once its process has ended."""
_LOOK_SECONDS = 0.1
"""Between looks at a process, on a kernel that cannot say when one ends."""


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Process(Protocol):
    """What is used of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, if there is one."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it is there."""
        ...


class Workers:
    """``processes`` by local rank, from their start to ``close``."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes of those that have ended, as in subprocess.Popen.returncode, in the order of their ends."""
        self._processes = dict(processes)
        self._handles: dict[int, int] = {}
        for rank, process in self._processes.items():
            with suppress(OSError):  # it has ended, or the kernel has no such handles
                self._handles[os.pidfd_open(process.pid)] = rank

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of those that run, by local rank."""
        return {rank: process.pid for rank, process in self._processes.items() if rank not in self.codes}

    def wait(self, others: Sequence[int], seconds: float | None) -> list[int]:
        """Until a worker ends or one of the file handles ``others`` can be read, for so long at most.

        Returns the local ranks that have ended since the last call.
        """
        watched = {handle: rank for handle, rank in self._handles.items() if rank not in self.codes}
        unwatched = self.pids.keys() - watched.values()
        ended = [rank for rank in unwatched if self._processes[rank].poll() is not None]
        if ended:
            return self._note(ended)
        if unwatched:
            seconds = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
        arrivals = select.poll()
        for handle in (*watched, *others):
            arrivals.register(handle, select.POLLIN)
        events = arrivals.poll(None if seconds is None else max(seconds, 0) * 1000)
        return self._note(watched[handle] for handle, _ in events if handle in watched)

    def _note(self, ended: Iterable[int]) -> list[int]:
        ranks = list(ended)
        for rank in ranks:
            self.codes[rank] = self._processes[rank].wait(_REAP_SECONDS)
        return ranks

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to those that run."""
        signal_all(self.pids.values(), number)

    def kill(self, seconds: float) -> list[int]:
        """End them and all that they have started. Returns the local ranks that are still there after so long."""
        family = [pid for worker in self.pids.values() for pid in (worker, *descendants(worker))]
        for process in self._processes.values():  # its session, also when its leader is gone
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        signal_all(family, signal.SIGKILL)
        end = time.monotonic() + seconds
        while self.pids and (left := end - time.monotonic()) > 0:
            self.wait((), left)
        return sorted(self.pids)

    def close(self) -> None:
        """Let go of the handles."""
        for handle in self._handles:
            os.close(handle)
        self._handles = {}


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    family = [pid]
    for parent in family:
        family.extend(children(parent))
    return family[1:]


def children(pid: int) -> list[int]:
    """Children of a process."""
    found: list[int] = []
    for each in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            found.extend(int(child) for child in each.read_text().split())
    return found


def forget_shared_memory(pids: Iterable[int]) -> None:
    """Remove what processes that are gone have left in /dev/shm: torch names a tensor's memory there, for the moment
    until another process has opened it.
    """
    gone = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
    for path in Path("/dev/shm").glob("torch_*"):
        pid = path.name.split("_")[1]
        if pid.isdigit() and int(pid) in gone:
            with suppress(OSError):
                path.unlink()


def reap(spared: Iterable[int]) -> None:
    """Take in children of this process that have ended, but for some, which others here wait for."""
    for pid in set(children(os.getpid())).difference(spared):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_descendants(seconds: float, spared: Iterable[int] = ()) -> None:
    """Kill all that came of this process, but for some children, and reap them; for so long at most: what is stuck in
    the kernel stays."""
    end = time.monotonic() + seconds
    spared = {pid for child in spared for pid in (child, *descendants(child))}
    while (below := [pid for pid in descendants(os.getpid()) if pid not in spared]) and time.monotonic() < end:
        signal_all(below, signal.SIGKILL)
        _wait_for_one(below, end - time.monotonic())
        for pid in below:
            with suppress(ChildProcessError):  # another one's child: it comes to us when that one has ended
                os.waitpid(pid, os.WNOHANG)


def _wait_for_one(pids: Iterable[int], seconds: float) -> None:
    """Until one of them has ended, for so long at most."""
    ends, handles = select.poll(), []
    for pid in pids:
        with suppress(OSError):  # it is gone, or the kernel has no such handles
            handles.append(os.pidfd_open(pid))
            ends.register(handles[-1], select.POLLIN)
    ends.poll(1000 * max(0.0, seconds if handles else min(seconds, _LOOK_SECONDS)))
    for handle in handles:
        os.close(handle)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it. Linux only."""
    dying_with_parent()()


def dying_with_parent() -> Callable[[], None]:
    """The same, to be called after a fork of a process with threads: all that takes a lock is done before."""
    return _controlling_process(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Have what dead descendants leave behind become children of this process, which can end them. Linux only."""
    _controlling_process(_PR_SET_CHILD_SUBREAPER, 1)()


def _controlling_process(option: int, value: int) -> Callable[[], None]:
    try:
        control = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return lambda: None
    return partial(control, option, value)
