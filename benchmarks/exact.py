"""What ``determinism = "elastic"`` costs: seconds, bytes and memory of a step, against plain DDP and plain FSDP2."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import tyro
from rich.console import Console

from benchmarks.exact_worker import Case, Plan
from benchmarks.ranks import measured_by
from benchmarks.trials import Figures, machine, milliseconds, print_table, spread, write_json

SIZES = ("small", "larger")
STRATEGIES = ("ddp", "fsdp")
ALIGNED, UNALIGNED = 2, 3
"""Ranks: 8 shards on 2 are a subtree each, on 3 they are not."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What determinism = "elastic" costs: the gpt recipe in two sizes (0.8 and 11 million parameters, fp32), 16 windows
    of 128 bytes in 8 logical shards, 2 ranks, gloo over loopback, a thread for each rank.

    In each trial every variant runs a few steps from the beginning, in the same processes; the first trial, and the
    first step of each, are thrown away. Medians over all steps that count.

    overhead_ddp, overhead_fsdp: seconds of a step with "elastic" over those with "order" (plain DDP, plain FSDP2), less
    1, for the larger size: 0.05 is 5 %. ..._small: for the small one.

    bytes_over_ring_aligned, ..._unaligned: bytes that the loopback device carried in a step of "elastic" under DDP, the
    step's small exchanges and the protocols' own bytes included, over the 2 (W - 1) x size of the gradients that a ring
    all-reduce has to move, on 2 and on 3 ranks; bytes_over_ring_plain: of plain DDP on 2. Larger size. What else goes
    over that device meanwhile is counted, too.

    peak_..._mb: the most resident memory of a rank beyond what was there before the steps, optimizer state included.
    """

    json: Path | None = None
    """Write the figures to this file, one flat object."""
    trials: Annotated[int, annotated_types.Ge(1)] = 7
    """Trials that count."""
    quick: bool = False
    """The small size for the larger one, and one trial: to see that it works. Its figures mean nothing."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and clean up on the way
    wanted = tyro.cli(Arguments, prog="scripts/bench exact", args=list(argv))
    trials = 1 if wanted.quick else wanted.trials
    every = [
        Case(size=size, strategy=strategy, determinism=determinism)
        for size in (SIZES[:1] if wanted.quick else SIZES)
        for strategy in STRATEGIES
        for determinism in ("order", "elastic")
    ]
    largest = every[-1].size
    console = Console(stderr=True)
    with console.status(f"{ALIGNED} ranks"):
        aligned = run(Plan(cases=every, trials=trials), ALIGNED)
    with console.status(f"{UNALIGNED} ranks"):
        exact = [Case(size=largest, strategy="ddp", determinism="elastic")]
        unaligned = run(Plan(cases=exact, trials=1), UNALIGNED)
    figures: Figures = {**machine(), "trials": trials, **figures_of(aligned, unaligned, largest)}
    report(figures, every)
    if wanted.json is not None:
        write_json(wanted.json, figures)
    return 0


def run(plan: Plan, ranks: int) -> dict[str, Any]:
    """Measurements by the name of the case, of ``ranks`` processes that are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="elastic-runner-bench-") as directory:
        order, result = Path(directory) / "plan.json", Path(directory) / "result.json"
        order.write_text(json.dumps({**asdict(plan), "directory": directory, "result": str(result)}))
        return measured_by("benchmarks.exact_worker", order, result, ranks=ranks, name=f"{ranks} ranks")


def figures_of(aligned: Mapping[str, Any], unaligned: Mapping[str, Any], largest: str) -> Figures:
    """Flat names. Pure."""
    figures: Figures = {}
    for name, found in aligned.items():
        figures |= milliseconds(f"step_{name}", found["seconds"])
        figures[f"peak_{name}_mb"] = round(max(found["peak_bytes"]) / 1e6, 1)
    for size in SIZES:
        for strategy in STRATEGIES:
            ours, plain = f"step_{strategy}_elastic_{size}_ms", f"step_{strategy}_order_{size}_ms"
            if ours in figures:
                suffix = "" if size == largest else f"_{size}"
                figures[f"overhead_{strategy}{suffix}"] = round(float(figures[ours]) / float(figures[plain]) - 1, 4)
    figures["bytes_over_ring_plain"] = _over_ring(aligned[f"ddp_order_{largest}"], ALIGNED)
    figures["bytes_over_ring_aligned"] = _over_ring(aligned[f"ddp_elastic_{largest}"], ALIGNED)
    figures["bytes_over_ring_unaligned"] = _over_ring(unaligned[f"ddp_elastic_{largest}"], UNALIGNED)
    return figures


def _over_ring(found: Mapping[str, Any], ranks: int) -> float:
    return round(statistics.median(found["sent_bytes"]) / (2 * (ranks - 1) * found["gradient_bytes"]), 3)


def report(figures: Figures, cases: Sequence[Case]) -> None:
    """Print what was measured."""
    rows = []
    for plain, ours in zip(cases[::2], cases[1::2], strict=True):
        steps = [spread(figures, f"step_{case.name}") for case in (plain, ours)]
        ratio = float(figures[f"step_{ours.name}_ms"]) / float(figures[f"step_{plain.name}_ms"]) - 1
        peaks = [f"{figures[f'peak_{case.name}_mb']:.0f}" for case in (plain, ours)]
        rows.append([f"{plain.strategy}, {plain.size}", *steps, f"{ratio:+.1%}", *peaks])
    about = ", ".join(f"{name} {value}" for name, value in figures.items() if name in ("cores", "torch"))
    columns = ["2 ranks", "order: ms a step", "elastic", "overhead", "order: peak MB", "elastic"]
    print_table(f'determinism = "elastic" against "order"; median (least - greatest); {about}', columns, rows)
    for name in ("plain", "aligned", "unaligned"):
        print(f"bytes_over_ring_{name}: {figures[f'bytes_over_ring_{name}']}")
