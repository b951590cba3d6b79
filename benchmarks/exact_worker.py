"""One rank of the benchmark of exactness: runs the steps of each case in turn, trial by trial."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

import elastic_runner as er
from benchmarks import raw
from elastic_runner.config import DataConfig, FsdpConfig, StrategyConfig, TrainingConfig
from elastic_runner.environment import read_environment
from elastic_runner.recipes.gpt import Gpt, GptConfig, ModelConfig, losses, make_optimizer
from elastic_runner.recipes.text import Windows, load_text

_MODELS = {"small": ModelConfig(), "larger": ModelConfig(layers=6, heads=6, width=384)}
_STEPS = 5
"""Of each case in each trial; the first one does not count."""
_DATA = DataConfig(global_batch=16, shards=8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared."""

    size: str
    """small or larger."""
    strategy: str
    """ddp or fsdp."""
    determinism: str
    """order or elastic."""

    @property
    def name(self) -> str:
        """As in the names of the results."""
        return f"{self.strategy}_{self.determinism}_{self.size}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one start of the ranks measures."""

    cases: list[Case]
    """In this order; each trial begins with another one."""
    trials: int
    """Those that count."""


def run_steps(case: Case, directory: str, windows: Windows) -> dict[str, Any]:
    """A few steps from the beginning: seconds and bytes of each, the peak of memory by rank."""
    config = GptConfig(
        run_dir=directory,
        determinism=case.determinism,  # type: ignore[arg-type]
        training=TrainingConfig(max_steps=_STEPS, clip_norm=1.0),
        data=_DATA,
        strategy=StrategyConfig(name=case.strategy, fsdp=FsdpConfig(wrap_classes=("Block",))),  # type: ignore[arg-type]
        model=_MODELS[case.size],
    )
    with er.Worker(config) as worker:
        model = worker.prepare(Gpt(config.model))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        optimizer, schedule = make_optimizer(model, config)
        loader = er.ElasticLoader(Subset(windows, range(256)), config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader, schedule=schedule)
        before = raw.resident("VmRSS")
        raw.forget_peak()
        marks = [(time.perf_counter(), _sent())]
        for step in worker.steps(state):
            for batch in step.microbatches():
                step.backward(losses(model, batch).mean())
            step.optimize()
            marks.append((time.perf_counter(), _sent()))
        peaks = worker.coordinator.gather("peak", raw.resident("VmHWM") - before)
    return {
        "seconds": [after[0] - begun[0] for begun, after in pairwise(marks[1:])],
        "sent_bytes": [after[1] - begun[1] for begun, after in pairwise(marks[1:])],
        "peak_bytes": peaks,
        "gradient_bytes": size,
    }


def _sent() -> int:
    """Bytes that loopback has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise ValueError("no loopback device")


def main() -> None:
    """Measure and leave the result."""
    order = json.loads(Path(sys.argv[1]).read_text())
    cases, trials = [Case(**case) for case in order["cases"]], order["trials"]
    windows, _ = load_text(GptConfig().text, ModelConfig().context)
    results: dict[str, dict[str, Any]] = {}
    for trial in range(-1, trials):
        turn = max(trial, 0) % len(cases)
        for case in (*cases[turn:], *cases[:turn]):
            found = run_steps(case, f"{order['directory']}/{case.name}-{trial}", windows)
            if trial < 0:
                results[case.name] = {**found, "seconds": [], "sent_bytes": [], "peak_bytes": []}
                continue
            for kind in ("seconds", "sent_bytes", "peak_bytes"):
                results[case.name][kind] += found[kind]
    if read_environment().rank == 0:
        Path(order["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
