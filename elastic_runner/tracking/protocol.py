"""What a tracker is, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_runner.observability.summary import Status
from elastic_runner.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run, as trackers need to know it; the same at every attempt, but for ``attempt``."""

    id: str
    """Random, made once per run directory."""
    name: str
    """For people."""
    project: str | None
    """What the tool groups runs by; None: by its own default."""
    attempt: int
    """Number of this start of the run, from 1."""
    settings: Mapping[str, Any]
    """The configuration, without options of storages, which may be secret."""
    storage: Storage
    """The run directory."""


class Tracker(Protocol):
    """One run in one tool. Called from one thread, with steps that never go back. Whatever it raises is logged once and
    tried again; what it was told in vain comes again."""

    run_id: str
    """The tool's own name of the run: an attempt hands it on to the next."""
    holds: int
    """The last optimizer step of which it needs to be told no more."""

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Take values of an optimizer step. ``at``: when they were computed, seconds since the epoch."""
        ...

    def flush(self) -> None:
        """Make what it was told outlive this process, where that can be had."""
        ...

    def close(self, status: Status) -> None:
        """Take leave; the next attempt may open the same run again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opener:
    """How a tool is opened, on global rank 0, once in an attempt."""

    open: Callable[[TrackedRun, str | None, int], Tracker]
    """The run, the ``run_id`` of earlier attempts (None: there was none), and the step that the tool is to go on from:
    with ``rewinds``, what it was told of later ones does not count any more."""
    rewinds: bool = False
    """Whether it can take back what it was told. Else steps that are done again stay as they were told first, and what
    an attempt that was killed has told may come again: it must be no news to the tool."""
    abandon: Callable[[], None] = lambda: None
    """Called from another thread when the tool does not come to an end in time: nothing of it may keep the process."""
