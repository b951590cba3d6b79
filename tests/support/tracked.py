"""A tracker that writes what is done to it into a file, and a job that it follows."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, TrackingConfig, TrainingConfig
from elastic_runner.observability.summary import Status
from elastic_runner.tracking.protocol import Opener, TrackedRun

FILE = "calls.jsonl"


class Calls:
    """See Tracker. Beside the run directory; it takes nothing back, and ignores steps that it has."""

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        self._file = Path(run.storage.url).parent / FILE
        self.run_id = run_id or f"calls-{run.id}"
        self.holds = max([step, *(call["step"] for call in read_calls(self._file.parent) if call["did"] == "log")])
        self._add(did="open", run=self.run_id, name=run.name, settings=dict(run.settings))

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._add(did="log", step=step, values=dict(values))

    def flush(self) -> None:
        self._add(did="flush")

    def close(self, status: Status) -> None:
        self._add(did="close", status=status)

    def _add(self, **call: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"rank": os.environ.get("RANK"), **call}) + "\n")


OPENER = Opener(open=Calls)


def read_calls(where: Path) -> list[dict[str, Any]]:
    file = where / FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def train(run_dir: str, killed_after: int | None = None, trackers: tuple[str, ...] = (f"{__name__}:OPENER",)) -> str:
    """Twenty steps, a checkpoint each five and an evaluation each ten; gives the run's id.

    In the first attempt each rank kills itself after step ``killed_after``.
    """
    config = er.RunConfig(
        run_dir=run_dir,
        storage_options={"key": "a secret"},
        training=TrainingConfig(max_steps=20),
        data=DataConfig(global_batch=8, shards=4),
        checkpoint=CheckpointConfig(every=5),
        tracking=TrackingConfig(trackers=trackers, name="my run"),
    )
    dataset = TensorDataset(torch.arange(50, dtype=torch.float32)[:, None])
    with er.Worker(config) as worker:
        model = worker.prepare(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = er.ElasticLoader(dataset, config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)
        checkpointer.restore()
        for step in worker.steps(state):
            for (samples,) in step.microbatches():
                step.log(mean=samples.mean(), largest=float(samples.max()))
                step.backward(model(samples / 50).square().mean())
            step.optimize()
            if step.number == killed_after and worker.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.maybe_save(step)
            if step.number % 10 == 0:
                worker.evaluate(model, dataset, lambda model, batch: {"mean": batch[0][:, 0]}, batch_size=10)
    return worker.run_id
