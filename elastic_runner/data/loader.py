"""ElasticLoader: any map-style dataset as the data of a job whose world may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from elastic_runner.config import DataConfig
from elastic_runner.coordination import Place
from elastic_runner.data.digest import shard_digest
from elastic_runner.data.partition import Cursor, GlobalBatch, next_batch, shards_of
from elastic_runner.data.processes import notices_held, shield
from elastic_runner.data.random import kept, seed_cpu
from elastic_runner.data.sampler import ElasticSampler, ShardIndices
from elastic_runner.data.skips import Skip, jumps
from elastic_runner.data.source import Microbatch, Span, to_device
from elastic_runner.errors import ConfigError, LoopError, Mismatch


class ElasticLoader:
    """Loads this rank's logical shards; its only state is the position that optimizer steps have committed.

    What loader processes have prefetched is never counted. ``collate_fn`` as in torch's DataLoader. A dataset with
    ``set_epoch`` is told the epoch in whichever process loads from it. Random augmentations, of the dataset and of
    ``collate_fn``, draw from generators seeded by (seed, step, shard). Raises ConfigError when the dataset cannot be
    used.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        config: DataConfig,
        worker: Place,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ConfigError(
                "ElasticLoader needs a dataset with __len__ and __getitem__; wrap a stream in ShardedStreams instead"
            )
        self._dataset = dataset
        self._length = len(dataset)
        self._config = config
        self._worker = worker
        self._collate_fn = collate_fn
        self._cursor = Cursor()
        self._jumps: dict[Cursor, Cursor] = {}
        self._batch: GlobalBatch | None = None
        self._step = 0
        self._iterator: Iterator[Any] | None = None
        self._ready: tuple[Cursor, int] | None = None  # what the iterator yields next, where that is known
        self._mine = shards_of(worker.coordinator.rank, world_size=worker.coordinator.world_size, shards=config.shards)
        self._next(self._cursor)  # impossible sizes fail here, not at the first step

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        whole, rest = divmod(self._length, self._config.global_batch)
        return whole + (1 if rest and self._config.last_batch == "pad" else 0)

    def begin(self, step: int) -> Span:
        """Fix the next global batch; the same one again when the last was not committed."""
        self._batch, self._step = self._next(self._cursor), step
        if self._ready != (self._cursor, step):
            self._iterator = None  # ends its processes before new ones start
            with notices_held():
                self._iterator = iter(self._open(step))
            self._ready = (self._cursor, step)
        b = self._batch
        return Span(epoch=b.epoch, first=b.first, last=b.last, padded=b.padded, dropped=b.dropped, length=self._length)

    def count(self) -> int:
        """Microbatches of this rank in every global batch."""
        return len(self._mine)

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's logical shards of the batch begun, once."""
        if self._iterator is None or self._batch is None or self._ready != (self._cursor, self._step):
            raise LoopError("microbatches() comes once after each begin()")
        samples = self._config.global_batch // self._config.shards
        self._ready = None
        for shard in self._mine:
            fetched, digest = next(self._iterator)
            batch = to_device(fetched, self._worker.device)
            if shard == self._mine[-1]:
                self._ready = (self._batch.after, self._step + 1)
            yield Microbatch(shard=shard, samples=samples, batch=batch, digest=digest)

    def commit(self) -> None:
        """Move the position past the batch begun."""
        if self._batch is None:
            raise LoopError("begin() comes before commit()")
        self._cursor, self._batch = self._batch.after, None

    def skip(self, skips: Iterable[Skip]) -> None:
        """Pass over these from now on, and over no others."""
        self._jumps = jumps(skips)
        self._batch, self._iterator, self._ready = None, None, None

    def state_dict(self) -> dict[str, Any]:
        """Committed position, with what the order depends on."""
        return {
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            "length": self._length,
            "seed": self._worker.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a committed position. Raises Mismatch when another dataset or seed would change the order."""
        wanted = {"length": self._length, "seed": self._worker.seed}
        differing = [f"{name} was {state[name]}, is {value}" for name, value in wanted.items() if state[name] != value]
        if differing:
            raise Mismatch(f"the data order would change: {'; '.join(differing)}. Use the same dataset and seed.")
        self._cursor = Cursor(epoch=state["epoch"], position=state["position"])
        self._batch, self._iterator, self._ready = None, None, None

    def _next(self, cursor: Cursor) -> GlobalBatch:
        config = self._config
        return next_batch(
            cursor, length=self._length, size=config.global_batch, policy=config.last_batch, jumps=self._jumps
        )

    def _open(self, step: int) -> DataLoader[Any]:
        coordinator, workers = self._worker.coordinator, self._config.loader_workers
        sampler = ElasticSampler(
            self._length,
            self._config,
            seed=self._worker.seed,
            rank=coordinator.rank,
            world_size=coordinator.world_size,
            cursor=self._cursor,
            step=step,
            jumps=self._jumps,
        )
        return DataLoader(
            _Keyed(self._dataset, self._worker.seed, self._collate_fn or default_collate),
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_as_it_is,
            prefetch_factor=self._config.prefetch if workers else None,
            pin_memory=self._worker.device.type == "cuda",
            worker_init_fn=shield,
            # Its own generator: making an iterator must not draw from the training's.
            generator=torch.Generator(),
        )


class _Keyed(Dataset[Any]):
    """Fetches and collates whole shards, under random numbers keyed by step and shard; gives the digest of each too."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate_fn = collate_fn
        self._epoch: int | None = None

    def __getitems__(self, indices: ShardIndices) -> tuple[Any, int]:
        with kept() if get_worker_info() is None else nullcontext():
            return self._fetch(indices), shard_digest(indices)

    def _fetch(self, indices: ShardIndices) -> Any:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None and indices.epoch != self._epoch:
            set_epoch(indices.epoch)
        self._epoch = indices.epoch
        seed_cpu(self._seed, "data", indices.step, indices.shard)
        fetch_all = getattr(self._dataset, "__getitems__", None)
        if fetch_all is not None:
            return self._collate_fn(list(fetch_all(list(indices))))
        return self._collate_fn([self._dataset[index] for index in indices])


def _as_it_is(batch: Any) -> Any:
    return batch
