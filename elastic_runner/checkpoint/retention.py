"""Which checkpoints to delete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_runner.checkpoint.manifest import Manifest


def superseded(manifests: Sequence[Manifest], *, keep: int) -> list[int]:
    """Steps to delete so that the newest ``keep`` (at least one) committed steps stay."""
    steps = sorted({manifest.step for manifest in manifests}, reverse=True)
    return steps[max(1, keep) :]
