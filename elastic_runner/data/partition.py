"""Which positions form a global batch, and which logical shards a rank runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from elastic_runner.errors import ConfigError

LastBatch = Literal["drop", "pad"]


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The only data state: how much of which epoch optimizer steps have committed."""

    epoch: int = 0
    """0-based."""
    position: int = 0
    """Samples of this epoch that are committed."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The samples of one optimizer step, as positions in an epoch's order."""

    epoch: int
    """0-based."""
    first: int
    """First position."""
    last: int
    """One past the last position."""
    padded: int
    """Samples taken again from the start of the epoch to fill the batch."""
    dropped: int
    """Samples that no batch takes: the epoch's tail when this batch is its last, and, where a larger batch no longer
    fit into the epoch before, what that one had left."""
    after: Cursor
    """Where the data stand once this batch is committed."""


def next_batch(
    cursor: Cursor, *, length: int, size: int, policy: LastBatch, jumps: Mapping[Cursor, Cursor] | None = None
) -> GlobalBatch:
    """The global batch of ``size`` samples that follows ``cursor`` over a dataset of ``length``.

    ``jumps``: where to go on instead of beginning a batch at a place, for what is skipped (``data.skips``). Raises
    ConfigError when the dataset is smaller than one batch and the tail is dropped.
    """
    if length <= 0:
        raise ConfigError("the dataset is empty")
    if policy == "drop" and length < size:
        raise ConfigError(
            f"data.global_batch={size} exceeds the dataset's {length} samples: "
            "make it smaller, or set data.last_batch='pad'"
        )
    while jumps and cursor in jumps:
        cursor = jumps[cursor]
    left = length - cursor.position
    # A cursor from a run with another batch size may stand inside what is now the tail.
    if left <= 0 or (policy == "drop" and left < size):
        batch = next_batch(Cursor(epoch=cursor.epoch + 1), length=length, size=size, policy=policy, jumps=jumps)
        return replace(batch, dropped=batch.dropped + max(0, left))
    last = min(length, cursor.position + size)
    rest = length - last
    ends = rest == 0 or (policy == "drop" and rest < size)
    return GlobalBatch(
        epoch=cursor.epoch,
        first=cursor.position,
        last=last,
        padded=size - (last - cursor.position),
        dropped=rest if ends else 0,
        after=Cursor(epoch=cursor.epoch + 1) if ends else replace(cursor, position=last),
    )


def shard_positions(batch: GlobalBatch, shard: int, *, shards: int, length: int) -> list[int]:
    """Positions of one logical shard of a batch; padding wraps to the start of the same epoch."""
    size = batch.last - batch.first + batch.padded
    per = size // shards
    return [(batch.first + i) % length for i in range(shard * per, (shard + 1) * per)]


def shards_of(rank: int, *, world_size: int, shards: int) -> range:
    """The contiguous run of logical shards that ``rank`` runs; runs differ by at most one shard.

    Raises ConfigError when there are more ranks than shards.
    """
    if world_size > shards:
        raise ConfigError(f"{world_size} ranks but data.shards={shards}: raise data.shards or start fewer workers")
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)
