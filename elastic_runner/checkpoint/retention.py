"""Which checkpoints to delete. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_runner.checkpoint.manifest import Manifest


def superseded(manifests: Sequence[Manifest], *, keep: int, newest: int, unusable: Collection[str] = ()) -> list[int]:
    """Steps to delete so that ``newest`` (just committed) and the ``keep - 1`` committed steps before it stay.

    Steps after ``newest`` are not counted and not touched: they were there and this run did not continue from them
    (they are damaged, or somebody wants them). ``unusable`` holds paths of manifests found damaged; a step with no
    other manifest takes no usable one's place.
    """
    usable = {m.step for m in manifests if m.step <= newest and m.path not in unusable} | {newest}
    kept = sorted(usable, reverse=True)[: max(1, keep)]
    if len(kept) < keep:
        return []
    return sorted({m.step for m in manifests if m.step < kept[-1]})
