"""ElasticSampler: the endless sequence of a rank's logical shards, as lists of dataset indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.utils.data import Sampler

from elastic_runner.config import DataConfig
from elastic_runner.data.order import samples_at
from elastic_runner.data.partition import Cursor, GlobalBatch, next_batch, shard_positions, shards_of


class ShardIndices(list[int]):
    """Dataset indices of one logical shard; it knows which one it is, also in a loader process."""

    epoch: int
    step: int
    shard: int


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader: one item per logical shard of this rank, global batch by global batch.

    It starts after ``cursor`` at optimizer step ``step`` and runs through epochs without end, so that loader
    processes are told of each epoch through the items themselves. ``jumps``: as in ``next_batch``. Raises ConfigError
    for impossible sizes.
    """

    def __init__(
        self,
        length: int,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        cursor: Cursor | None = None,
        step: int = 1,
        jumps: Mapping[Cursor, Cursor] | None = None,
    ) -> None:
        self._length = length
        self._config = config
        self._seed = seed
        self._mine = shards_of(rank, world_size=world_size, shards=config.shards)
        self._cursor = cursor or Cursor()
        self._step = step
        self._jumps = jumps
        self._next(self._cursor)

    def __iter__(self) -> Iterator[list[int]]:
        cursor, step = self._cursor, self._step
        while True:
            batch = self._next(cursor)
            for shard in self._mine:
                positions = shard_positions(batch, shard, shards=self._config.shards, length=self._length)
                item = ShardIndices(samples_at(positions, length=self._length, seed=self._seed, epoch=batch.epoch))
                item.epoch, item.step, item.shard = batch.epoch, step, shard
                yield item
            cursor, step = batch.after, step + 1

    def _next(self, cursor: Cursor) -> GlobalBatch:
        config = self._config
        return next_batch(
            cursor, length=self._length, size=config.global_batch, policy=config.last_batch, jumps=self._jumps
        )
