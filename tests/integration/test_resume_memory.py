"""Case c47: resuming takes no more memory than training, and nothing keeps the loaded file alive."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, TrainingConfig
from tests.support.ranks import run_ranks

MIB = 1 << 20


class AnonymousPeak:
    """The highest anonymous memory seen: mapped files do not count, since the kernel can drop their pages."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, anonymous())


def anonymous() -> int:
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def peaks(run_dir: str, kind: str, steps: int) -> tuple[int, int]:
    """Peak before the first step, and of the whole run. The model has 48 MiB in 12 tensors; AdamW makes it 192."""
    settings = er.RunConfig(
        run_dir=run_dir,
        training=TrainingConfig(max_steps=steps),
        data=DataConfig(global_batch=4, shards=4),
        checkpoint=CheckpointConfig(every=100, format=kind),  # type: ignore[arg-type]
    )
    before = anonymous()
    with AnonymousPeak() as peak, er.Worker(settings) as worker:
        model = worker.prepare(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12))))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = er.ElasticLoader(TensorDataset(torch.randn(64, 1024)), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        checkpointer.restore()
        restored = peak.bytes
        for step in worker.steps(state):
            for (x,) in step.microbatches():
                step.backward(model(x).square().mean())
            step.optimize()
            checkpointer.maybe_save(step)
    return restored - before, peak.bytes - before


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_resume_needs_no_more_than_training(kind: str, tmp_path: Path) -> None:
    trained = max(whole for _, whole in run_ranks(peaks, 2, str(tmp_path), kind, 2))
    assert trained > 190 * MIB, "the measure sees the state"
    restored = max(first for first, _ in run_ranks(peaks, 2, str(tmp_path), kind, 3))
    # "Training peak plus one tensor"; here also the slack of the allocator.
    assert restored <= trained + 16 * MIB
