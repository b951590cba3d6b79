"""The checkpoint benchmark: starts the ranks of each cell, and puts together what they measured."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import tyro
from rich.console import Console

from benchmarks.checkpoint_worker import Cell, write_cell
from benchmarks.ranks import measured_by
from benchmarks.trials import Figures, machine, print_table, ratio, spread, timings, write_json
from tests.support.seaweed import SeaweedFS, running_seaweed, weed

TIME_RATIOS = {
    "async_stall_over_memcpy": ("async_stall", "memcpy"),
    "dcp_async_stall_over_memcpy": ("dcp_async_stall", "memcpy"),
    "dcp_async_kept_stall_over_memcpy": ("dcp_async_kept_stall", "memcpy"),
    "save_over_raw": ("save", "raw_write"),
    "dcp_save_over_raw": ("dcp_save", "raw_write"),
    "save_over_raw_huge": ("save", "raw_huge_write"),
    "load_over_raw": ("load", "raw_read"),
    "load_over_raw_new": ("load", "raw_new_read"),
    "dcp_load_over_raw": ("dcp_load", "raw_read"),
    "load_over_raw_huge": ("load", "raw_huge_read"),
}
"""Time of the first over time of the second: 1.25 is 0.8 of the speed."""
S3_RATIO = "s3_over_plain_upload"
"""Throughput of ours over that of the plain upload: more is better."""
PEAK = "async_peak_memory_over_state"

HEADLINE = Cell(directory="", megabytes=400, ranks=2, strategy="ddp", trials=7, thorough=True)
"""Its names have no suffix."""
QUICK = replace(HEADLINE, megabytes=40, trials=3)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What checkpoints cost: state of 400 MB and 1.5 GB (parameters and AdamW's moments, fp32) x 1 and 2 ranks x DDP
    and FSDP.

    All variants of a cell alternate within the same processes; the first trial is thrown away; of each trial the
    slowest rank counts; medians.

    async_stall_over_memcpy: what Checkpointer.maybe_save takes of a step, over copying the bytes that it copies from
    warm memory to warm memory. dcp_async_stall_over_memcpy: torch.distributed.checkpoint.async_save(state) with its
    defaults; dcp_async_kept_...: with a DefaultStager that is kept from save to save.

    save_over_raw: Checkpointer.save() (data, directory and manifest durable) over a direct write of the same bytes by
    the same processes, one new file each, with fsync of file and directory. dcp_save_over_raw:
    torch.distributed.checkpoint.save by FileSystemWriter's defaults, then fsync of every file and the directory. Older
    files are deleted while no clock runs, everybody's.

    load_over_raw: Checkpointer.restore() (digests checked, past the page cache) over a direct read of the same bytes
    split over the processes, into memory that was used before; load_over_raw_new: into memory that is new to the
    processes, as a restore's buffers are: on a virtual machine, whose host may have to find the pages first, that can
    take longer than the disk. dcp_load_over_raw: torch.distributed.checkpoint.load, its files dropped from the cache.
    ..._over_raw_huge: the raw write or read is made from memory in huge pages, which direct I/O likes better.

    These are ratios of times: 1.25 is 0.8 of the speed, less is better. s3_over_plain_upload is a ratio of
    throughputs, more is better: Checkpointer.save() to a SeaweedFS server on this machine, against s3fs's put_file of
    one file per rank. async_peak_memory_over_state: extra resident memory of all ranks at its peak in three
    asynchronous saves and the allocation before them, over the bytes of the state; less is better.

    In the JSON, names without a suffix are for 400 MB, 2 ranks, DDP (with --quick: 40 MB). For that one only
    there are dcp_async_kept_..., dcp_load_... and ..._huge.
    """

    json: Path | None = None
    """Write the figures to this file, one flat object."""
    dir: Path = Path()
    """Everything is written to a temporary directory in this one, on whose disk it depends."""
    trials: Annotated[int, annotated_types.Ge(1)] = 7
    """Trials that count."""
    only: str | None = None
    """Measure one cell, such as 400mb_2ranks_ddp, or 400mb_2ranks_ddp_s3."""
    quick: bool = False
    """40 MB, 2 ranks, DDP, 3 trials: to see that it works. Its figures mean nothing."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and clean up on the way
    wanted = tyro.cli(Arguments, prog="scripts/bench checkpoint", args=list(argv))
    headline = QUICK if wanted.quick else replace(HEADLINE, trials=wanted.trials)
    cells = [headline] if wanted.quick else matrix(wanted.trials)
    s3 = replace(headline, s3_url="s3://to-be-known")
    names = [cell.name for cell in (*cells, s3)]
    if wanted.only is not None and wanted.only not in names:
        raise SystemExit(f"no cell {wanted.only!r}; there are {', '.join(names)}")
    figures: Figures = {**machine(), "trials": headline.trials}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="elastic-runner-bench-", dir=wanted.dir.absolute()) as directory:
        for cell in cells:
            if wanted.only in (None, cell.name):
                with console.status(cell.name):
                    figures |= figures_of(cell, run_cell(cell, directory), "" if cell == headline else f"_{cell.name}")
        if wanted.only in (None, s3.name) and weed() is not None:
            with console.status(s3.name), server(directory) as seaweed:
                place = seaweed.place()
                result = run_cell(replace(s3, s3_url=place.url, s3_options=place.options), directory)
                figures |= figures_of(s3, result, "")
    report(figures, [("" if cell == headline else f"_{cell.name}", cell.name) for cell in cells])
    if wanted.json is not None:
        write_json(wanted.json, figures)
    return 0


def matrix(trials: int) -> list[Cell]:
    """All cells, the headline first."""
    every = [
        replace(HEADLINE, megabytes=megabytes, ranks=ranks, strategy=strategy, trials=trials, thorough=False)
        for megabytes in (400, 1500)
        for ranks in (2, 1)
        for strategy in ("ddp", "fsdp")
    ]
    return [replace(every[0], thorough=True), *every[1:]]


@contextmanager
def server(directory: str) -> Iterator[SeaweedFS]:
    """An S3 server that lives as long as the context, its data on the disk of everything else."""
    with tempfile.TemporaryDirectory(prefix="seaweed-", dir=directory) as home, running_seaweed(Path(home)) as seaweed:
        yield seaweed


def run_cell(cell: Cell, parent: str) -> dict[str, Any]:
    """Start the ranks and wait for what they leave; nothing else is left behind."""
    with tempfile.TemporaryDirectory(prefix=f"{cell.name}-", dir=parent) as directory:
        cell = replace(cell, directory=directory)
        path = write_cell(cell)
        return measured_by("benchmarks.checkpoint_worker", path, cell.result, ranks=cell.ranks, name=cell.name)


def figures_of(cell: Cell, result: Mapping[str, Any], suffix: str) -> Figures:
    """Ratios and times of one cell."""
    seconds, size = result["seconds"], result["state_bytes"]
    figures = timings(seconds, size, suffix)
    if cell.s3_url:
        return {**figures, S3_RATIO: round(ratio(seconds, "plain_upload", "s3_save"), 3)}
    figures[f"state_bytes{suffix}"] = size
    for name, (ours, baseline) in TIME_RATIOS.items():
        if {ours, baseline} <= seconds.keys():
            figures[f"{name}{suffix}"] = round(ratio(seconds, ours, baseline), 3)
    figures[f"{PEAK}{suffix}"] = round(result["peak_bytes"] / size, 3)
    return figures


def report(figures: Figures, cells: Sequence[tuple[str, str]]) -> None:
    """Print the ratios and the times. ``cells``: suffix and name."""
    cells = [(suffix, name) for suffix, name in cells if f"memcpy_ms{suffix}" in figures]
    columns = ["", *(name for _, name in cells)]
    if cells:
        about = ", ".join(f"{name} {value}" for name, value in machine().items() if name in ("cores", "torch"))
        print_table(
            f"Ratios of times, less is better (1.25 is 0.8 of the speed); {about}",
            columns,
            [[_words(name), *(_ratio(figures, name + end) for end, _ in cells)] for name in (*TIME_RATIOS, PEAK)],
        )
        names = dict.fromkeys(name for pair in TIME_RATIOS.values() for name in pair)
        print_table(
            "Median ms (least - greatest); MB/s of the state",
            columns,
            [[_words(name), *(_time(figures, name, end) for end, _ in cells)] for name in names],
        )
    if S3_RATIO in figures:
        print_table(
            "S3 (SeaweedFS on this machine): ratio of throughputs, more is better",
            [_words(S3_RATIO), "s3 save", "plain upload"],
            [[f"{figures[S3_RATIO]:.2f}", _time(figures, "s3_save", ""), _time(figures, "plain_upload", "")]],
        )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _ratio(figures: Figures, name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else ""


def _time(figures: Figures, name: str, suffix: str) -> str:
    if f"{name}_ms{suffix}" not in figures:
        return ""
    return f"{spread(figures, name, suffix)}; {figures[f'{name}_mb_per_s{suffix}']:.0f}"
