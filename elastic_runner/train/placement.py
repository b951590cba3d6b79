"""Who has the sums over which subtrees, and how they become the sum over all shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from elastic_runner.data.partition import shards_of
from elastic_runner.errors import LoopError
from elastic_runner.train.tree import Node, TreeSum, cover


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The logical shards, as they are spread over the ranks of the default process group."""

    rank: int
    """This rank."""
    world_size: int
    """Ranks."""
    shards: int
    """Logical shards of a global batch."""

    def covers(self) -> list[list[Node]]:
        """The subtrees that each rank has sums of, by rank."""
        runs = (shards_of(rank, world_size=self.world_size, shards=self.shards) for rank in range(self.world_size))
        return [cover(run, shards=self.shards) for run in runs]

    def check(self, nodes: list[Node]) -> None:
        """Raise LoopError unless ``nodes`` are the sums that this rank has to have after its last microbatch."""
        wanted = self.covers()[self.rank]
        if nodes != wanted:
            ran, needed = (", ".join(f"{node.first} to {node.last - 1}" for node in each) for each in (nodes, wanted))
            raise LoopError(
                f"rank {self.rank} has gradients of the logical shards {ran or 'none'}, and determinism='elastic' "
                f"needs {needed}: each rank runs its contiguous run of shards, in order"
            )


class Exchange:
    """Sums over this rank's subtrees on their way: rank k gets the k-th chunk of everybody's, and adds those up.

    The tensors are flat, of one length that divides by the number of ranks. Begun on all ranks in the same order.
    """

    def __init__(self, sums: list[tuple[Node, torch.Tensor]], placement: Placement) -> None:
        placement.check([node for node, _ in sums])
        self._placement = placement
        world = placement.world_size
        tensors = [tensor for _, tensor in sums]
        self._chunk = tensors[0].numel() // world
        # To each rank goes what is for it of all subtrees, side by side.
        sent = tensors[0] if len(tensors) == 1 else torch.stack([t.view(world, -1) for t in tensors], dim=1).view(-1)
        counts = [len(nodes) for nodes in placement.covers()]
        self._sent = sent  # to be kept until it has gone
        self._received = sent.new_empty(sum(counts) * self._chunk)
        self._work = dist.all_to_all_single(
            self._received,
            sent,
            [count * self._chunk for count in counts],
            [len(tensors) * self._chunk] * world,
            async_op=True,
        )

    def chunk(self) -> torch.Tensor:
        """This rank's chunk of the sum over all shards. Waits for the peers."""
        assert self._work is not None
        self._work.wait()
        total: TreeSum[torch.Tensor] = TreeSum(self._placement.shards, lambda left, right: left.add_(right))
        pieces = self._received.view(-1, self._chunk).unbind()
        for node, piece in zip(chain.from_iterable(self._placement.covers()), pieces, strict=True):
            total.push(node, piece)
        [(_, whole)] = total.take()
        return whole
