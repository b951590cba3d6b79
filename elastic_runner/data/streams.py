"""ShardedStreams: iterable datasets with a ``state_dict`` of their own, one stream per logical shard.

A stream belongs to a shard, not to a rank: when the world changes, streams move with their state, and no sample is
read twice or by two ranks. The epoch ends for all ranks together, when the first stream runs dry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from elastic_runner.config import DataConfig
from elastic_runner.coordination import Place
from elastic_runner.data.partition import shards_of
from elastic_runner.data.random import kept, seed_all
from elastic_runner.data.source import Microbatch, Span, to_device
from elastic_runner.errors import ConfigError, Mismatch


class Stream(Protocol):
    """An iterable whose ``state_dict`` says where it stands, counting what it has yielded."""

    def __iter__(self) -> Iterator[Any]:
        """Samples, from where the loaded state stands."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where ``state`` stood."""
        ...


class ShardedStreams:
    """The data source over ``make_stream(shard, shards, epoch)``.

    Each stream yields the samples of its shard of the data; ``shards`` is ``data.shards`` whatever the world size.
    The last samples of an epoch that fill no microbatch on every shard are left out, and counted nowhere else than
    by the streams. Loading is done in the training process. Raises ConfigError when streams are empty.
    """

    def __init__(
        self,
        make_stream: Callable[[int, int, int], Stream],
        config: DataConfig,
        worker: Place,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._make_stream = make_stream
        self._config = config
        self._worker = worker
        self._collate_fn = collate_fn
        self._mine = shards_of(worker.coordinator.rank, world_size=worker.coordinator.world_size, shards=config.shards)
        self._epoch = 0
        self._position = 0
        self._committed: dict[int, dict[str, Any]] = {}
        self._open: dict[int, tuple[Stream, Iterator[Any]]] = {}
        self._pulled: dict[int, list[Any]] = {}
        self._step = 0

    def begin(self, step: int) -> Span:
        """Pull one microbatch per shard; all ranks agree whether everybody has one. Collective."""
        self._step = step
        self._pull()
        if not self._everybody_full():
            if self._position == 0:
                raise ConfigError(
                    f"a stream yields fewer than {self._per_shard} samples in epoch {self._epoch}: "
                    "lower data.global_batch"
                )
            self._epoch, self._position = self._epoch + 1, 0
            self._committed, self._open = {}, {}
            self._pull()
            if not self._everybody_full():
                raise ConfigError(f"a stream of epoch {self._epoch} fills no microbatch of {self._per_shard} samples")
        size = self._config.global_batch
        return Span(epoch=self._epoch, first=self._position, last=self._position + size)

    def count(self) -> int:
        """Microbatches of this rank in every global batch."""
        return len(self._mine)

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's logical shards of the batch begun."""
        for shard in self._mine:
            batch = to_device(self._collate_fn(self._pulled[shard]), self._worker.device)
            yield Microbatch(shard=shard, samples=self._per_shard, batch=batch)

    def commit(self) -> None:
        """Remember where each stream stands after the batch begun."""
        self._position += self._config.global_batch
        self._committed = {shard: dict(stream.state_dict()) for shard, (stream, _) in self._open.items()}

    def state_dict(self) -> dict[str, Any]:
        """States of all shards, gathered from the ranks that run them. Collective."""
        gathered = self._worker.coordinator.gather("state of streams", self._committed)
        streams = {shard: state for part in gathered for shard, state in part.items()}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "shards": self._config.shards,
            "streams": [streams.get(shard) for shard in range(self._config.shards)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; raises Mismatch when the number of shards, hence the split of the data, differs."""
        if state["shards"] != self._config.shards:
            raise Mismatch(
                f"streams were split into {state['shards']} shards, data.shards is {self._config.shards}: keep it"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._committed = {
            shard: dict(state["streams"][shard]) for shard in self._mine if state["streams"][shard] is not None
        }
        self._open, self._pulled = {}, {}

    @property
    def _per_shard(self) -> int:
        return self._config.global_batch // self._config.shards

    def _pull(self) -> None:
        for shard in self._mine:
            if shard not in self._open:
                stream = self._make_stream(shard, self._config.shards, self._epoch)
                if shard in self._committed:
                    stream.load_state_dict(self._committed[shard])
                self._open[shard] = (stream, iter(stream))
            with kept():
                seed_all(self._worker.seed, "data", self._step, shard)
                self._pulled[shard] = list(islice(self._open[shard][1], self._per_shard))

    def _everybody_full(self) -> bool:
        short = sum(len(samples) < self._per_shard for samples in self._pulled.values())
        return not self._worker.coordinator.sum("data left", torch.tensor([short])).item()
