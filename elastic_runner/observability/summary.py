"""summary.json: one page of facts about a run, for people, schedulers and scripts."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run has come to."""

    status: Status
    """running, finished (target reached, or worker.stop), interrupted (asked to stop, start again), failed."""
    step: int = 0
    """Optimizer steps of the present model."""
    target_step: int = 0
    """Where the run ends."""
    attempt: int = 0
    """Number of the latest start, from 1."""
    restarts: int = 0
    """Starts after the first."""
    lost_steps: int = 0
    """Steps that were done and had to be done again."""
    saves_failed: int = 0
    """Saves that the storage did not take, and training went on."""
    saves_skipped: int = 0
    """Saves left out because the one before was still being written (checkpoint.when_busy = "skip")."""
    samples_seen: int = 0
    """Samples that the present model has learned from."""
    samples_repeated: int = 0
    """Samples that it has seen twice in an epoch."""
    samples_skipped: int = 0
    """Samples of an epoch that it never saw, other than the dropped tail."""
    samples_padded: int = 0
    """Samples taken again to fill an epoch's last batch (data.last_batch = "pad")."""
    samples_dropped: int = 0
    """Samples in epochs' tails that fill no batch (data.last_batch = "drop")."""
    train_loss: float | None = None
    """Loss of the last step; null when it is not finite."""
    validation: dict[str, float | None] = field(default_factory=dict)
    """Latest evaluation; null where a value is not finite."""
    validation_step: int | None = None
    """Step of that evaluation."""
    message: str = ""
    """Why it is not finished, when it failed or was interrupted."""
    updated: float = field(default_factory=time.time)
    """When this was written, seconds since the epoch."""


def encode(summary: RunSummary) -> bytes:
    """JSON, indented."""
    return json.dumps(asdict(summary), indent=1).encode() + b"\n"


def decode(data: bytes) -> RunSummary:
    """Parse; unknown fields of newer versions are left out."""
    known = {f.name for f in fields(RunSummary)}
    return RunSummary(**{name: value for name, value in json.loads(data).items() if name in known})
