"""What lies under a checkpoint URL, for people: nothing is loaded and nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import check_file, list_checkpoints
from elastic_runner.errors import NotFound
from elastic_runner.storage import open_storage


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
    verified: str = ""
    """What was checked: sizes, or digests."""
    unusable: str = ""
    """Why it cannot be used; empty when it can."""

    def cells(self, now: float) -> list[str]:
        """The row as text."""
        age = "" if self.created is None else _age(now - self.created)
        size = "" if self.size is None else f"{self.size / 1e6:.1f} MB"
        numbers = ["" if n is None else str(n) for n in (self.step, self.attempt, self.world_size)]
        return [numbers[0], numbers[1], age, size, self.format, numbers[2], self.verified, self.unusable]


def look(url: str, options: dict[str, str], *, digests: bool) -> list[Row]:
    """All checkpoints below ``url`` (a checkpoint URL or a run directory), newest first, their files checked.

    Raises NotFound when there is nothing that looks like a checkpoint.
    """
    storage = open_storage(url, options)
    if paths.CHECKPOINTS in storage.list(""):
        storage = open_storage(paths.join(url, paths.CHECKPOINTS), options)
    listing = list_checkpoints(storage)
    rows = [Row(unusable=reason) for reason in listing.rejected]
    for manifest in listing.manifests:
        reasons = [check_file(storage, manifest, file, digests=digests) for file in manifest.files]
        rows.append(
            Row(
                step=manifest.step,
                attempt=manifest.attempt,
                created=manifest.created,
                size=manifest.size,
                format=manifest.format,
                world_size=manifest.world_size,
                verified="digests" if digests else "sizes",
                unusable="; ".join(reason for reason in reasons if reason),
            )
        )
    if not rows:
        raise NotFound(f"no checkpoint below {storage.url}")
    return rows


def _age(seconds: float) -> str:
    for name, unit in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
