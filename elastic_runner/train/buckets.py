"""Gradients of several parameters in one flat piece of memory, for each subtree of logical shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_runner.errors import ModelError
from elastic_runner.train.placement import Exchange, Placement
from elastic_runner.train.tree import Node, TreeSum


class Flat:
    """A gradient each of some parameters, and a mark for each that has one at all, in one tensor."""

    def __init__(self, parameters: list[torch.Tensor], multiple: int) -> None:
        count = sum(p.numel() for p in parameters)
        length = count + len(parameters)
        self.tensor = parameters[0].new_zeros(length + -length % multiple)
        """Gradients, marks, and zeros up to the next multiple."""
        self.marks = self.tensor[count:length]
        """Positive for each parameter with a gradient."""
        self.views = [
            view.view(p.shape)
            for view, p in zip(self.tensor[:count].split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        """The gradients, each in its parameter's shape."""

    def set(self, gradients: list[torch.Tensor | None]) -> Flat:
        """Take these in place of what is there."""
        for view, gradient in zip(self.views, gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        self.marks.copy_(torch.tensor([gradient is not None for gradient in gradients]))
        return self

    def add(self, gradients: list[torch.Tensor | None]) -> Flat:
        """Add these: the same as ``set`` in another one and adding that, in less memory."""
        for view, gradient in zip(self.views, gradients, strict=True):
            view.add_(0.0 if gradient is None else gradient)
        self.marks.add_(torch.tensor([gradient is not None for gradient in gradients]).to(self.marks))
        return self


class Bucket:
    """Parameters whose gradients are summed, sent and received together."""

    def __init__(self, parameters: list[nn.Parameter], placement: Placement) -> None:
        self.parameters = parameters
        """Of one type, on one device; whole on each rank."""
        self._placement = placement
        self._local = [_local(p) for p in parameters]
        self._free: list[Flat] = []
        self._sums: TreeSum[Flat] = TreeSum(placement.shards, self._added)
        self._pending: list[tuple[Node, Flat]] = []
        self._exchange: Exchange | None = None
        self._gathering: dist.Work | None = None

    def collect(self, shard: int) -> None:
        """Take the gradients of one logical shard from the parameters."""
        leaf = Node(shard, shard + 1)
        gradients = [_gradient(p) for p in self.parameters]
        before = self._sums.other_half(leaf)
        # A shard next to one that is there needs no memory of its own.
        self._sums.push(leaf, self._empty().set(gradients) if before is None else before.add(gradients))
        for parameter in self.parameters:
            parameter.grad = None

    def send(self) -> None:
        """Begin the exchange with the other ranks, after this rank's last shard."""
        self._pending = self._sums.take()
        if self._placement.world_size > 1:
            self._exchange = Exchange([(node, flat.tensor) for node, flat in self._pending], self._placement)
        else:
            self._placement.check([node for node, _ in self._pending])

    def receive(self) -> None:
        """Add up this rank's chunk, and begin to give it to all. Waits for the peers."""
        if self._exchange is None:
            return
        whole = self._pending[0][1].tensor.view(self._placement.world_size, -1)
        self._gathering = dist.all_gather(list(whole.unbind()), self._exchange.chunk(), async_op=True)
        self._exchange = None

    def finish(self) -> None:
        """Give each parameter that was used its gradient of the global batch. Waits for the peers."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        (_, total), *others = self._pending
        # Its memory is the gradients' until the next step asks for some.
        self._free += [total, *(flat for _, flat in others)]
        self._pending = []
        for parameter, view, mark in zip(self.parameters, total.views, total.marks.tolist(), strict=True):
            if mark > 0:
                parameter.grad = _as_gradient(view, parameter)

    def _added(self, left: Flat, right: Flat) -> Flat:
        if right is not left:  # else it has been added already
            left.tensor.add_(right.tensor)
            self._free.append(right)
        return left

    def _empty(self) -> Flat:
        return self._free.pop() if self._free else Flat(self._local, self._placement.world_size)


def buckets_of(parameters: Iterable[nn.Parameter], placement: Placement, *, cap: int) -> list[Bucket]:
    """Buckets of at most ``cap`` bytes (of one parameter, where that is larger), in the order of the backward."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], int] = {}
    space: dict[int, int] = {}
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        index = filling.get(kind)
        if index is None or space[index] < size:
            index = filling[kind] = len(buckets)
            space[index] = cap
            buckets.append([])
        buckets[index].append(parameter)
        space[index] -= size
    return [Bucket(members, placement) for members in buckets]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    if parameter.grad is None:
        return None
    if parameter.grad.layout != torch.strided:
        raise ModelError("determinism='elastic' adds up dense gradients only: use sparse=False in embeddings")
    return _local(parameter.grad)


def _as_gradient(view: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return view
    return DTensor.from_local(
        view, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
