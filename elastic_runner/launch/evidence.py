"""Evidence of a hang: one bundle per node, gathered before the workers are killed.

Each part has a deadline and none can fail the whole; what could not be had says so. Command lines and environments,
which may hold secrets, are left out.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from elastic_runner import paths
from elastic_runner.launch import kernel
from elastic_runner.launch.dumps import place, python_stacks, waits_for
from elastic_runner.launch.processes import descendants
from elastic_runner.launch.watchdog import Hang
from elastic_runner.storage import open_storage
from elastic_runner.verdict import RunPlace

GATHER = 25.0
"""Seconds for a whole bundle."""
UPLOAD = 30.0
"""Seconds for each file of a bundle to get to the run directory."""
_PART = 2.0
_STACKS = 10.0
_PY_SPY = 5.0
_PROCESSES = 64
"""Processes of a node that are looked at, workers first."""
_SPIED = 16
"""Processes that py-spy is started for, all at once."""
_FLIGHT_AGE = 3600.0
_FLIGHT_FILES = 16

_MEMORY = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Dirty", "Shmem")
_WAITS = {
    "peers": "in a collective, or in backward, which waits for peers, too",
    "loader processes": "waits for its loader processes",
    "work": "idle, waits for work",
}

T = TypeVar("T")


class _Time:
    """What is left for a bundle."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def each(
        self, action: Callable[[int], T], pids: Sequence[int], otherwise: T, seconds: float = _PART
    ) -> dict[int, T]:
        """The results of ``action`` for all ``pids`` at once; ``otherwise`` where it takes too long or fails.

        Reading about a process can block for as long as the process does.
        """
        results: dict[int, T] = {}

        def run(pid: int) -> None:
            with suppress(Exception):
                results[pid] = action(pid)

        threads = [threading.Thread(target=run, args=(pid,), daemon=True) for pid in pids]
        end = min(self._end, time.monotonic() + seconds)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {pid: results.get(pid, otherwise) for pid in pids}

    def part(self, action: Callable[[], T], otherwise: T, seconds: float = _PART) -> T:
        """The same for what is not about one process."""
        return self.each(lambda _: action(), [0], otherwise, seconds)[0]


@dataclass(frozen=True, kw_only=True)
class _Process:
    """One process, with what could be learned of it."""

    pid: int
    local_rank: int
    child: bool
    name: str
    state: str
    view: str
    stacks: str
    spied: str

    @property
    def file(self) -> str:
        return f"local-rank-{self.local_rank}-{'child' if self.child else 'worker'}-{self.pid}.txt"

    def text(self) -> str:
        """All of it."""
        parts = {"Python stacks, by faulthandler": self.stacks, "py-spy": self.spied, "Kernel": self.view}
        head = f"{self.name}, pid {self.pid}, {'child of ' if self.child else ''}local rank {self.local_rank}"
        return "\n\n".join([head, *(f"== {title}\n{part}" for title, part in parts.items())]) + "\n"

    def stands(self) -> str:
        """Where the main thread is, in one line."""
        where = place(self.stacks) or self.stacks.strip().partition("\n")[0]
        waits = waits_for(self.stacks)
        return f"{self.state or 'gone'}; {where}" + (f"; {_WAITS[waits]}" if waits else "")


def gather(
    directory: Path,
    pids: Mapping[int, int],
    hang: Hang,
    *,
    heartbeats: Sequence[str] = (),
    flight_recorder: str | None = None,
) -> Path:
    """Make a bundle below ``directory``, the agent's own, where workers append their stacks; returns where it is.

    ``pids``: workers by local rank. ``heartbeats``: what ``Watchdog.describe`` says. ``flight_recorder``: where torch
    dumps it, as in TORCH_NCCL_DEBUG_INFO_TEMP_FILE. Processes that are stopped run for a moment. Raises OSError when
    nothing can be written.
    """
    left = _Time(GATHER)
    bundle = directory / paths.evidence(hang.attempt, f"{socket.gethostname()}-{os.getpid()}")
    bundle.mkdir(parents=True, exist_ok=True)
    processes = _look_at(directory, pids, left)
    for process in processes:
        (bundle / process.file).write_text(process.text())
    recorded = left.part(partial(_copy_flight_records, bundle, flight_recorder), "not copied in time", _PY_SPY)
    node = left.part(_node, "(not readable in time)")
    summary = _summary(hang, heartbeats, processes, [node, f"flight recorder: {recorded}"])
    (bundle / "summary.txt").write_text(summary)
    return bundle


def upload(bundle: Path, run: RunPlace) -> str:
    """Put a bundle below the run directory, its summary first; returns where. Raises StorageError and ConfigError."""
    storage = open_storage(run.url, run.options, UPLOAD)
    below = paths.evidence(int(bundle.parent.name), bundle.name)
    for file in sorted(bundle.iterdir(), key=lambda file: (file.name != "summary.txt", file.name)):
        storage.put(f"{below}/{file.name}", file.read_bytes())
    return paths.join(storage.url, below)


def _look_at(directory: Path, workers: Mapping[int, int], left: _Time) -> list[_Process]:
    """Workers and what they have started. Stacks come last: they let stopped processes run."""
    nobody: list[int] = []
    children = left.each(descendants, list(workers.values()), nobody)
    seen = [(rank, pid) for rank, pid in workers.items()]
    seen += [(rank, child) for rank, pid in workers.items() for child in children[pid]]
    seen = seen[:_PROCESSES]
    pids = [pid for _, pid in seen]
    states, names = left.each(kernel.state, pids, "?"), left.each(kernel.name, pids, "?")
    views = left.each(kernel.describe, pids, "(not readable in time)")
    silence: dict[int, str] = {}
    spied = left.part(partial(_spy, pids[:_SPIED]), silence, _PY_SPY + _PART)
    families = [[pid for pid in (worker, *children[worker]) if pid in views] for worker in workers.values()]
    answers: dict[int, str] = {}

    def ask() -> None:
        for some in python_stacks(families, directory, end=time.monotonic() + _STACKS):
            answers.update(some)

    left.part(ask, None, _STACKS + _PART)
    return [
        _Process(
            pid=pid, local_rank=rank, child=pid != workers[rank], name=names[pid], state=states[pid], view=views[pid],
            stacks=answers.get(pid, "(not there in time)"), spied=spied.get(pid, "(not there)"),
        )
        for rank, pid in seen
    ]  # fmt: skip


def _spy(pids: Sequence[int]) -> dict[int, str]:
    """What py-spy says, where it is installed: it reads the memory of a process, and needs nothing of it."""
    beside = Path(sys.executable).with_name("py-spy")
    command = str(beside) if beside.exists() else shutil.which("py-spy")
    if command is None:
        return dict.fromkeys(pids, "(not installed)")
    spies = {
        pid: subprocess.Popen(
            [command, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for pid in pids
    }  # fmt: skip
    end = time.monotonic() + _PY_SPY
    return {pid: _said(spy, end) for pid, spy in spies.items()}


def _said(spy: subprocess.Popen[bytes], end: float) -> str:
    try:
        said, _ = spy.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        spy.kill()
        spy.communicate()
        return f"(took longer than {_PY_SPY:g} s)"
    # Before the version of Python stands the command line.
    head, version, stacks = said.decode(errors="replace").partition("\nPython v")
    return version.lstrip() + stacks if version else head if not head.startswith("Process ") else "(nothing)"


def _copy_flight_records(bundle: Path, prefix: str | None) -> str:
    if not prefix:
        return "not set up"
    files = [file for file in Path(prefix).parent.glob(f"{Path(prefix).name}*") if file.is_file()]
    recent = [file for file in files if time.time() - file.stat().st_mtime < _FLIGHT_AGE][:_FLIGHT_FILES]
    for file in recent:
        shutil.copyfile(file, bundle / f"flight-{file.name}")
    return f"{len(recent)} dumps copied" if recent else f"no dump at {prefix}*"


def _node() -> str:
    memory = dict(line.partition(":")[::2] for line in Path("/proc/meminfo").read_text().splitlines())
    said = ", ".join(f"{name} {memory[name].strip()}" for name in _MEMORY if name in memory)
    return f"load: {Path('/proc/loadavg').read_text().strip()} on {os.cpu_count()} processors\nmemory: {said}"


def _summary(hang: Hang, heartbeats: Sequence[str], processes: Sequence[_Process], node: Sequence[str]) -> str:
    """For a person at night: the verdict first, then who stands where, then where to read on."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    attempt = f", attempt {hang.attempt}" if hang.attempt else ""
    lines = [f"HANG on {socket.gethostname()}, {now}{attempt}", "", hang.reason, *_hints(processes)]
    lines += ["", "Where each process stands (state; main thread, innermost call first)"]
    for process in sorted(processes, key=lambda process: (process.local_rank, process.child)):
        what = f"  child {process.pid} ({process.name})" if process.child else f"pid {process.pid}"
        lines.append(f"  local rank {process.local_rank} {what}: {process.stands()}")
    lines += ["", "Heartbeats", *(f"  {line}" for line in heartbeats)]
    lines += ["", "Node", *(f"  {line}" for part in node for line in part.splitlines())]
    lines += ["", "Files beside this one", *(f"  {process.file}" for process in processes)]
    return "\n".join(lines) + "\n"


def _hints(processes: Sequence[_Process]) -> list[str]:
    """What the stacks add to the verdict: the one that waits for nobody holds up the others."""
    workers = [process for process in processes if not process.child]
    hints = [
        f"local rank {process.local_rank} waits for nobody: {process.stands()}"
        for process in workers
        if place(process.stacks) and not waits_for(process.stacks)
    ]
    if workers and all(waits_for(process.stacks) == "peers" for process in workers):
        hints.append("every worker of this node waits for its peers: the one that hangs is on another node")
    loading = {process.local_rank for process in workers if waits_for(process.stacks) == "loader processes"}
    hints += [
        f"local rank {process.local_rank} waits for its loader process {process.pid}: {process.stands()}"
        for process in processes
        if process.child and process.local_rank in loading and place(process.stacks)
        and not waits_for(process.stacks)
    ]  # fmt: skip
    return ["", "By the stacks:", *(f"  {hint}" for hint in hints)] if hints else []
