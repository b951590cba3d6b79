"""Alternating trials: every variant runs in every trial, so that what changes on the machine changes for all."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from elastic_runner.coordination import Coordinator

Figures = dict[str, float | int | str]
"""A flat JSON object."""


def _nothing() -> None:
    """The default of what comes before and after."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the things that are compared."""

    name: str
    """Its name in the results."""
    run: Callable[[], object]
    """What is timed."""
    before: Callable[[], object] = _nothing
    """What is made ready before the clock starts."""
    after: Callable[[], object] = _nothing
    """What is waited for or cleaned up after it has stopped."""


def alternate(variants: Sequence[Variant], trials: int, coordinator: Coordinator) -> dict[str, list[float]]:
    """Seconds by variant, trial by trial: the slowest rank's, all having begun together. Collective.

    A first trial warms everything up and is thrown away. Each further one begins with another variant.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for trial in range(-1, trials):
        turn = max(trial, 0) % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            variant.before()
            coordinator.gather(f"begin {variant.name}", None)
            begun = time.perf_counter()
            variant.run()
            took = time.perf_counter() - begun
            variant.after()
            slowest = max(coordinator.gather(f"end {variant.name}", took))
            if trial >= 0:
                seconds[variant.name].append(slowest)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, baseline: str) -> float:
    """Median of one variant over the median of another."""
    return statistics.median(seconds[ours]) / statistics.median(seconds[baseline])


def timings(seconds: Mapping[str, Sequence[float]], size: int, suffix: str = "") -> Figures:
    """Median, least and greatest in ms, and MB/s of ``size`` bytes at the median, as flat names."""
    figures: Figures = {}
    for name, each in seconds.items():
        figures |= milliseconds(name, each, suffix)
        figures[f"{name}_mb_per_s{suffix}"] = round(size / 1e6 / statistics.median(each), 1)
    return figures


def milliseconds(name: str, seconds: Sequence[float], suffix: str = "") -> Figures:
    """Median, least and greatest in ms, as flat names."""
    kinds = {"": statistics.median(seconds), "_min": min(seconds), "_max": max(seconds)}
    return {f"{name}_ms{kind}{suffix}": round(value * 1e3, 2) for kind, value in kinds.items()}


def spread(figures: Figures, name: str, suffix: str = "") -> str:
    """The same for a table."""
    middle, least, greatest = (figures[f"{name}_ms{kind}{suffix}"] for kind in ("", "_min", "_max"))
    return f"{middle:.0f} ({least:.0f} - {greatest:.0f})"


def machine() -> Figures:
    """Where it was measured."""
    load = Path("/proc/loadavg")
    return {
        "cores": os.cpu_count() or 1,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": float(load.read_text().split()[0]) if load.exists() else -1.0,
    }


def write_json(path: Path, figures: Figures) -> None:
    """One flat object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose first column holds names."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    # In a file or a pipe, as wide as it wants to be.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
