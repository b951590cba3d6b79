"""ShardedStreams: iterable datasets with a ``state_dict`` of their own, one stream per logical shard.

A stream belongs to a shard, not to a rank: when the world changes, streams move with their state, and no sample is
read twice or by two ranks. The epoch ends for all ranks together, when the first stream runs dry.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, Protocol

import torch
import xxhash
from torch.utils.data import default_collate

from elastic_runner.config import DataConfig
from elastic_runner.coordination import Place
from elastic_runner.data.partition import shards_of
from elastic_runner.data.random import kept, seed_cpu
from elastic_runner.data.skips import Skip
from elastic_runner.data.source import Microbatch, Span, to_device
from elastic_runner.errors import ConfigError, LoopError, Mismatch

log = logging.getLogger(__name__)


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
    The epoch's last samples, too few for a microbatch on every shard, are left out and counted as dropped by the first
    batch of the next epoch; what a longer stream has beyond them is not read, and not counted. Loading is done in the
    training process, and random numbers are keyed by (seed, step, shard). Raises ConfigError when streams are empty.
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
        self._begun: Span | None = None
        self._aligned = True  # open streams stand where the committed states say
        self._compared = False

    def begin(self, step: int) -> Span:
        """Pull one microbatch per shard; all ranks agree whether everybody has one. Collective."""
        if not self._aligned:  # what was pulled last was not committed: the streams have gone too far
            self._open = {}
        self._aligned = False
        self._step = step
        epoch, position, dropped = self._epoch, self._position, 0
        full, pulled = self._pull(epoch, self._committed)
        if not full and position:
            epoch, position, dropped = epoch + 1, 0, pulled
            self._open = {}
            full, _ = self._pull(epoch, {})
        if not full:
            raise ConfigError(
                f"a stream yields fewer than {self._per_shard} samples in epoch {epoch}: lower data.global_batch"
            )
        self._compare()
        last = position + self._config.global_batch
        self._begun = Span(epoch=epoch, first=position, last=last, dropped=dropped)
        return self._begun

    def count(self) -> int:
        """Microbatches of this rank in every global batch."""
        return len(self._mine)

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's logical shards of the batch begun."""
        if self._begun is None:
            raise LoopError("begin() comes before microbatches()")
        for shard in self._mine:
            with kept():
                seed_cpu(self._worker.seed, "collate", self._step, shard)
                collated = self._collate_fn(self._pulled[shard])
            batch = to_device(collated, self._worker.device)
            yield Microbatch(shard=shard, samples=self._per_shard, batch=batch)

    def commit(self) -> None:
        """Remember where each stream stands after the batch begun."""
        if self._begun is None:
            raise LoopError("begin() comes before commit()")
        self._epoch, self._position, self._begun = self._begun.epoch, self._begun.last, None
        self._aligned = True
        # Copies: a stream may go on changing what its state_dict handed out.
        self._committed = {shard: deepcopy(stream.state_dict()) for shard, (stream, _) in self._open.items()}

    def skip(self, skips: Iterable[Skip]) -> None:
        """A stream has no positions to go to: what it fails at, it would have to read to pass over it."""
        raise ConfigError("training.skip_failing needs an ElasticLoader: streams cannot skip samples; set it to 0")

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
            shard: state["streams"][shard] for shard in self._mine if state["streams"][shard] is not None
        }
        self._open, self._pulled, self._begun = {}, {}, None

    @property
    def _per_shard(self) -> int:
        return self._config.global_batch // self._config.shards

    def _pull(self, epoch: int, states: Mapping[int, dict[str, Any]]) -> tuple[bool, int]:
        """Pull a microbatch per shard; whether there was one on every shard of the job, and how many samples in all."""
        for shard in self._mine:
            with kept():
                if shard not in self._open:
                    seed_cpu(self._worker.seed, "stream", epoch, shard)
                    stream = self._make_stream(shard, self._config.shards, epoch)
                    if shard in states:
                        stream.load_state_dict(deepcopy(states[shard]))
                    self._open[shard] = (stream, iter(stream))
                seed_cpu(self._worker.seed, "data", self._step, shard)
                self._pulled[shard] = list(islice(self._open[shard][1], self._per_shard))
        counts = [len(samples) for samples in self._pulled.values()]
        mine = torch.tensor([sum(count < self._per_shard for count in counts), sum(counts)])
        short, pulled = self._worker.coordinator.sum("data left", mine).tolist()
        return not short, pulled

    def _compare(self) -> None:
        """Warn, once, when streams begin alike: then most likely nobody has split the data."""
        if self._compared:
            return
        self._compared = True
        mine = {shard: _digest(samples) for shard, samples in self._pulled.items()}
        gathered = self._worker.coordinator.gather("first samples", mine)
        shards_by_digest: dict[str, list[int]] = {}
        for part in gathered:
            for shard, digest in part.items():
                if digest is not None:
                    shards_by_digest.setdefault(digest, []).append(shard)
        alike = [shards for shards in shards_by_digest.values() if len(shards) > 1]
        if alike and self._worker.coordinator.is_main:
            log.warning(
                "streams of shards %s begin with the same samples: every one of these is then trained more than once. "
                "make_stream(shard, shards, epoch) has to split the data by shard.",
                ", ".join(map(str, alike[0])),
            )


def _digest(samples: list[Any]) -> str | None:
    try:
        return xxhash.xxh3_128_hexdigest(pickle.dumps(samples))
    except Exception:  # samples of a kind that cannot be pickled are not compared
        return None
