"""Python stacks of processes that may hang: asked for by a signal, read from the file that they append to."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from elastic_runner import stacks
from elastic_runner.launch import kernel

ANSWER = 2.0
"""Seconds that a process has to begin and end its answer."""
_POLL = 0.02
_QUIET = 0.15
"""Seconds without another byte: the answer is complete. It has no end that could be recognised."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$', re.M)
_LIBRARY = re.compile(r"^<|/lib/python3\.\d+/(?!site-packages|dist-packages)")
"""Python's own; what called it says what is going on."""
_PACKAGES = re.compile(r"/(site|dist)-packages/|/elastic_runner/")
_CALLED = 2
_KINDS = {
    "loader processes": re.compile(r"/torch/utils/data/dataloader\.py$"),
    "work": re.compile(r"/torch/utils/data/_utils/worker\.py$"),
    "peers": re.compile(
        r"/torch/(distributed|nn/parallel)/|/torch/autograd/graph\.py$|/elastic_runner/coordination\.py$"
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Request:
    pid: int
    file: Path
    size: int
    stopped: bool
    found: list[tuple[float, int]] = field(default_factory=list)


def python_stacks(families: Iterable[Sequence[int]], agent_dir: Path, *, end: float) -> Iterator[dict[int, str]]:
    """What processes answer, by process id, as it comes. A family: a worker and the processes that it has started.

    What is forked writes to its parent's file, so those of a family are asked one after the other; families at once.
    ``end``: when to give up, by time.monotonic.
    """
    for turn in zip_longest(*([(pid, family[0]) for pid in family] for family in families)):
        answers, requests = {}, []
        for pid, worker in filter(None, turn):
            file = _file(agent_dir, pid, worker)
            if time.monotonic() >= end:
                answers[pid] = "(not asked: no time was left)"
            elif file is None or not stacks.catches(pid, stacks.REQUEST):
                answers[pid] = "(cannot be asked: not a process of elastic_runner, or not so far yet)"
            else:
                requests.append(_ask(pid, file))
        yield answers | _answers(requests, min(end, time.monotonic() + ANSWER))


def _file(agent_dir: Path, pid: int, worker: int) -> Path | None:
    """Where a process would write: a process that writes to none of ours has no handler of ours."""
    files = (stacks.file_of(agent_dir, pid), stacks.file_of(agent_dir, worker))
    return next((file for file in files if kernel.holds(pid, file)), None)


def _ask(pid: int, file: Path) -> _Request:
    request = _Request(pid=pid, file=file, size=file.stat().st_size, stopped=kernel.state(pid) == kernel.STOPPED)
    with suppress(ProcessLookupError):
        os.kill(pid, stacks.REQUEST)
        if request.stopped:  # the handler is the first thing that it does; what it was doing goes on for a moment
            os.kill(pid, signal.SIGCONT)
    return request


def _answers(requests: Sequence[_Request], end: float) -> dict[int, str]:
    """Looked for rather than waited for: a file gives no event that a deadline could be put on simply."""
    open_requests = list(requests)
    while open_requests and time.monotonic() < end:
        time.sleep(_POLL)
        open_requests = [request for request in open_requests if not _complete(request)]
    for request in requests:
        if request.stopped:
            with suppress(ProcessLookupError):
                os.kill(request.pid, signal.SIGSTOP)
    return {request.pid: _answer(request) for request in requests}


def _complete(request: _Request) -> bool:
    now, size = time.monotonic(), request.file.stat().st_size
    if not request.found or request.found[-1][1] != size:
        request.found.append((now, size))
    since, last = request.found[-1]
    return last > request.size and now - since >= _QUIET


def _answer(request: _Request) -> str:
    with request.file.open("rb") as file:
        file.seek(request.size)
        text = file.read().decode(errors="replace")
    if not text:
        return f"(no answer within {ANSWER:g} s)"
    return ("(was stopped; let run for a moment to answer)\n" if request.stopped else "") + text


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    """Path of the source."""
    line: str
    """Line number."""
    function: str
    """Name of the function."""

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


def main_stack(answer: str) -> list[Frame]:
    """Frames of the main thread, innermost first: the one that took the signal. Where a thread that is not Python's
    did, as in a process that was stopped, it is the last one.
    """
    threads = [block for block in answer.split("\n\n") if "(most recent call first)" in block]
    mine = next((block for block in threads if "Current thread" in block), threads[-1] if threads else "")
    return [Frame(**match.groupdict()) for match in _FRAME.finditer(mine)]


def place(answer: str) -> str:
    """Where the main thread is, innermost first: what it calls, and the program's own line; empty when not known."""
    frames = [frame for frame in main_stack(answer) if not _LIBRARY.search(frame.file)] or main_stack(answer)
    called = [str(frame) for frame in frames[:_CALLED]]
    programs = next((frame for frame in frames[_CALLED:] if not _PACKAGES.search(frame.file)), None)
    return " < ".join(called) + (f" < … < {programs}" if programs else "")


def waits_for(answer: str) -> str:
    """What the main thread waits for: "peers", "loader processes", "work" (a loader's own); empty: none of these."""
    caller = next((frame.file for frame in main_stack(answer) if not _LIBRARY.search(frame.file)), "")
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(caller)), "")
