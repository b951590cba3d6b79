"""``determinism = "elastic"``: the gradients of the logical shards are added in one order at every world size.

Nothing of it is state: between two steps there are only pieces of memory to be used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_runner.checkpoint.names import unwrap
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import ConfigError, ModelError
from elastic_runner.train.buckets import Bucket, buckets_of
from elastic_runner.train.norm import exact_norm
from elastic_runner.train.placement import Placement
from elastic_runner.train.sharded import ShardedSums
from elastic_runner.train.statistics import Statistics
from elastic_runner.train.synchronize import exchanging

_TWICE = (
    "a parameter's gradient came in two parts in one backward (re-entrant activation checkpointing): "
    "use strategy.checkpoint_classes (non-reentrant) for recomputation"
)


class Sums(Protocol):
    """How the gradients of the logical shards become one."""

    def backward(self, shard: int | None, *, last: bool) -> AbstractContextManager[None]:
        """Around the backward of a shard, or of a round that counts for nothing; ``last`` on all ranks together."""
        ...

    def finish(self) -> None:
        """After the last backward: the parameters have the gradients of the global batch. Collective."""
        ...


class ExactGradients:
    """Gradients, statistics and the norm as one process would get them that runs all shards one after the other."""

    def __init__(self, model: nn.Module, shards: int, coordinator: Coordinator, *, bucket_bytes: int) -> None:
        self._wrapper = exchanging(model)
        self._statistics = Statistics(unwrap(model), coordinator)
        placement = Placement(rank=coordinator.rank, world_size=coordinator.world_size, shards=shards)
        if isinstance(self._wrapper, FSDPModule):
            self._wrapper.set_requires_gradient_sync(True)  # each round's gradient is wanted by itself
        self._sums: Sums
        # FSDP of one rank reduces nothing, and every parameter's gradient is whole.
        if isinstance(self._wrapper, FSDPModule) and placement.world_size > 1:
            self._sums = ShardedSums(self._wrapper, placement)
        else:
            self._sums = WholeSums(buckets_of(model.parameters(), placement, cap=bucket_bytes), placement)

    def microbatch(self, *, last: bool, extra: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch. ``extra``: it counts for nothing."""
        self._statistics.begin()
        # DDP's own reduction never runs.
        return self._wrapper.no_sync() if isinstance(self._wrapper, DistributedDataParallel) else nullcontext()

    @contextmanager
    def backward(self, *, shard: int | None, last: bool) -> Iterator[None]:
        """Around the backward of one microbatch. After the last one's the gradients are those of the global batch."""
        if shard is not None:
            self._statistics.take()
        with self._sums.backward(shard, last=last):
            yield
        if last:
            self._sums.finish()
            self._statistics.finish()

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The global L2 norm. Collective where they are sharded."""
        return exact_norm(gradients)


class WholeSums:
    """For gradients that each rank has whole: single, DDP, and FSDP of one rank.

    A bucket is sent as soon as the last backward has all its gradients, while that goes on.
    """

    def __init__(self, buckets: list[Bucket], placement: Placement) -> None:
        self._buckets = buckets
        self._alone = placement.world_size == 1
        self._leaf = 0
        self._lacking: list[int] = []
        self._sent = 0

    @contextmanager
    def backward(self, shard: int | None, *, last: bool) -> Iterator[None]:
        """See Sums. Raises ModelError for gradients that come in parts."""
        assert shard is not None, "only sharded models have rounds that count for nothing"
        self._leaf, self._sent = shard, 0
        self._lacking = [len(bucket.parameters) for bucket in self._buckets]
        hooks = self._watch() if last and not self._alone else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if last:
            self._lacking = [0] * len(self._buckets)  # what has no gradient now gets none
            self._send()
            return
        for bucket in self._buckets:
            bucket.collect(self._leaf)

    def finish(self) -> None:
        """See Sums."""
        for bucket in self._buckets:
            bucket.receive()
        for bucket in self._buckets:
            bucket.finish()

    def _watch(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if index < self._sent:
            raise ModelError(_TWICE)
        self._lacking[index] -= 1
        self._send()

    def _send(self) -> None:
        """Send what is complete, in the same order on every rank."""
        while self._sent < len(self._buckets) and self._lacking[self._sent] == 0:
            self._buckets[self._sent].collect(self._leaf)
            self._buckets[self._sent].send()
            self._sent += 1


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for one whose steps depend on how a parameter is cut."""
    on_cpu = any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    if on_cpu and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            "determinism='elastic': on the CPU the fused optimizers round the last few numbers of a tensor in another "
            "way, so that the result depends on how FSDP cuts it: leave fused out"
        )
