"""Progress of the run: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

log = logging.getLogger(__name__)

_LINE_EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class StepProgress:
    """Shows steps done of ``total``, when ``enabled`` (on global rank 0)."""

    def __init__(self, *, total: int, done: int, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled
        self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if enabled and console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=False,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, loss="")

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, number: int, loss: float) -> None:
        """A step is done."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=number, loss=f"loss {loss:.4f}")
        elif number == self._total or time.monotonic() - self._said >= _LINE_EVERY:
            self._said = time.monotonic()
            log.info("step %d/%d loss %.4f", number, self._total, loss)


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal, gone when done; nothing elsewhere. Gives what is to be told of more bytes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda more: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)
