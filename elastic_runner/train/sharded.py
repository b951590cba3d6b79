"""FSDP's reduce-scatter in the order of the tree over logical shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_runner.errors import ModelError
from elastic_runner.train.placement import Exchange, Placement
from elastic_runner.train.tree import Node, TreeSum

_PARTIAL = (
    "a microbatch used other parameters than the one before. FSDP with determinism='elastic' needs the same ones in "
    "each: use strategy.name='ddp', or multiply what is left out by zero"
)


class ShardedSums:
    """For gradients that FSDP shards: each backward gives every unit's whole gradient, the last one the sum's shard."""

    def __init__(self, root: nn.Module, placement: Placement) -> None:
        self._parameters = list(root.parameters())
        self._units = []
        for module in root.modules():
            if isinstance(module, FSDPModule):
                unit = UnitSum(placement)
                self._units.append(unit)
                comm: Any = unit
                module.set_custom_reduce_scatter(comm)

    @contextmanager
    def backward(self, shard: int | None, *, last: bool) -> Iterator[None]:
        """See Sums."""
        for unit in self._units:
            unit.expect(shard, last=last)
        yield
        if not last:
            for parameter in self._parameters:
                parameter.grad = None  # of no meaning yet

    def finish(self) -> None:
        """See Sums. Raises ModelError."""
        if any(unit.unfinished for unit in self._units):
            raise ModelError(_PARTIAL)


class UnitSum:
    """One unit's reduce-scatter (torch's ReduceScatter): keeps sums over subtrees, and exchanges them when told."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._shard: int | None = None
        self._last = False
        self._free: list[torch.Tensor] = []
        self._length: int | None = None
        self._sums: TreeSum[torch.Tensor] = TreeSum(placement.shards, self._added)

    @property
    def unfinished(self) -> bool:
        """Whether gradients have been taken that were not exchanged."""
        return self._length is not None

    def expect(self, shard: int | None, *, last: bool) -> None:
        """The next gradient is that of ``shard``, or counts for nothing."""
        self._shard, self._last = shard, last

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what comes in or goes out; FSDP has waited for what was done with it before."""
        [count] = size
        if self._free and self._free[-1].numel() == count:
            return self._free.pop()
        return torch.empty(count, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Take a microbatch's gradient of the unit, its chunks by rank; give this rank's chunk of the sum at the last.

        Raises ModelError when it is not of the same parameters as the one before.
        """
        if self._length not in (None, input_tensor.numel()):
            raise ModelError(_PARTIAL)
        self._length = input_tensor.numel()
        if self._shard is None:
            self._free.append(input_tensor)
        else:
            self._sums.push(Node(self._shard, self._shard + 1), input_tensor)
        if self._last:
            sums = self._sums.take()
            output_tensor.copy_(Exchange(sums, self._placement).chunk())
            self._free += [tensor for _, tensor in sums]
            self._length = None

    def _added(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left.add_(right)
        self._free.append(right)
        return left
