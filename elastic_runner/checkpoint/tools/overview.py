"""What lies under a checkpoint URL, for people: nothing is loaded and nothing is changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Checkpoint, Listing, Manifest, check_file, list_checkpoints
from elastic_runner.checkpoint.marks import reasons
from elastic_runner.checkpoint.pruning import Plan, plan_pruning
from elastic_runner.checkpoint.retention import Retention
from elastic_runner.checkpoint.trust import Health, describe_non_finite, health
from elastic_runner.errors import NotFound, StorageError
from elastic_runner.storage import Storage, open_storage


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint, or one thing that looks like one."""

    step: int | None = None
    """Optimizer steps in it; None for a manifest that cannot be read."""
    attempt: int | None = None
    """The attempt that wrote it."""
    created: float | None = None
    """When, seconds since the epoch."""
    size: int | None = None
    """Bytes."""
    format: str = ""
    """sharded or full."""
    world_size: int | None = None
    """Ranks that wrote it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Results of an evaluation, given at save."""
    pinned: bool = False
    """Whether it stays whatever the retention policies say."""
    being_read: bool = False
    """Whether a restore or an export is at it."""
    verified: str = ""
    """What was checked and found right: sizes, or digests."""
    unusable: str = ""
    """Why it cannot be used; empty when it can."""
    suspect: str = ""
    """Why it is used only when no other is left; empty when it is trusted."""

    def cells(self, now: float) -> list[str]:
        """The row as text, in the order of COLUMNS."""
        age = "" if self.created is None else _age(now - self.created)
        numbers = ["" if n is None else str(n) for n in (self.step, self.attempt, self.world_size)]
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        remarks = [self.unusable, self.suspect, "being read" if self.being_read else ""]
        return [
            numbers[0], numbers[1], age, readable_size(self.size), self.format, numbers[2], self.verified,
            "yes" if self.pinned else "", metrics, "; ".join(remark for remark in remarks if remark),
        ]  # fmt: skip


COLUMNS = ("step", "attempt", "age", "size", "format", "world", "verified", "pinned", "metrics", "remarks")
"""Headings for ``Row.cells``."""


def open_checkpoints(url: str, options: dict[str, str]) -> Storage:
    """The checkpoints at ``url``: a checkpoint URL, or a run directory that has them below it."""
    storage = open_storage(url, options)
    if paths.CHECKPOINTS in storage.list(""):
        return open_storage(paths.join(url, paths.CHECKPOINTS), options)
    return storage


def look(url: str, options: dict[str, str], *, digests: bool) -> list[Row]:
    """All checkpoints below ``url`` (a checkpoint URL or a run directory), newest first, their files checked.

    Raises NotFound when there is nothing that looks like a checkpoint.
    """
    storage = open_checkpoints(url, options)
    listing = _some(storage)
    now = time.time()
    rows = []
    for checkpoint in listing.checkpoints:
        manifest, marks = checkpoint.manifest, checkpoint.marks
        unusable = _unusable(storage, manifest, digests=digests)
        doubts = [describe_non_finite(manifest)] if manifest.non_finite else []
        doubts += [f"suspect: {reason}" for reason in reasons(storage, marks)]
        rows.append(
            Row(
                step=manifest.step,
                attempt=manifest.attempt,
                created=manifest.created,
                size=manifest.size,
                format=manifest.format,
                world_size=manifest.world_size,
                metrics=manifest.metrics,
                pinned=marks.pinned,
                being_read=marks.being_read(now),
                verified="" if unusable else "digests" if digests else "sizes",
                unusable=unusable,
                suspect="; ".join(doubts),
            )
        )
    return rows + [Row(unusable=rejected.reason) for rejected in listing.rejected]


def damage(storage: Storage, manifest: Manifest, *, digests: bool) -> str:
    """What is wrong with a checkpoint's files, in words; empty when nothing is."""
    found = [check_file(storage, manifest, file, digests=digests) for file in manifest.files]
    return "; ".join(reason for reason in found if reason)


def _unusable(storage: Storage, manifest: Manifest, *, digests: bool) -> str:
    """Why it cannot be used, be it damaged or not to be read; empty when it can."""
    try:
        return damage(storage, manifest, digests=digests)
    except StorageError as error:
        return f"cannot be read: {error}"


def find(storage: Storage, step: int, attempt: int | None = None) -> Checkpoint:
    """The checkpoint of a step: of ``attempt``, or of the newest that saved it. Raises NotFound."""
    listing = _some(storage)
    for checkpoint in listing.checkpoints:
        if checkpoint.manifest.step == step and attempt in (None, checkpoint.manifest.attempt):
            return checkpoint
    of = "" if attempt is None else f" of attempt {attempt}"
    there = ", ".join(f"{m.step} (attempt {m.attempt})" for m in listing.manifests)
    raise NotFound(f"no checkpoint of step {step}{of} below {storage.url}; there are steps {there or 'none'}")


def plan_by_hand(storage: Storage, retention: Retention) -> tuple[Listing, Plan]:
    """What pruning would do that no run asks for: what a run may still be writing is left. Raises NotFound."""
    listing = _some(storage)
    unusable = [m.path for m in listing.manifests if _unusable(storage, m, digests=False)]
    healthy = [c.manifest for c in listing.checkpoints if health(c, unusable) == Health.HEALTHY]
    if not listing.manifests:
        raise NotFound(f"no checkpoint below {storage.url} that can be read")
    newest = (healthy or listing.manifests)[0]
    attempt = max(manifest.attempt for manifest in listing.manifests)
    return listing, plan_pruning(listing, retention, newest, attempt, unusable)


def _some(storage: Storage) -> Listing:
    listing = list_checkpoints(storage)
    if not listing.checkpoints and not listing.rejected:
        raise NotFound(f"no checkpoint below {storage.url}")
    return listing


def readable_size(size: int | None) -> str:
    """Bytes for people."""
    if size is None:
        return ""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def _age(seconds: float) -> str:
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
