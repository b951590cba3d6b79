"""When ranks exchange gradients and buffers, by the kind of wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import get_total_norm

from elastic_runner.checkpoint.names import unwrap, wrapped_attribute
from elastic_runner.train.replicas import Explained, Replicas


class Gradients(Protocol):
    """How the microbatches' gradients become that of the global batch."""

    def microbatch(self, *, last: bool, extra: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch. ``last``: on all ranks together. ``extra``: it counts for
        nothing."""
        ...

    def backward(self, *, shard: int | None, last: bool) -> AbstractContextManager[None]:
        """Around the backward of one microbatch; its logical shard, None for an extra one. Raises ModelError."""
        ...

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """L2 norm over all ranks' shards of all gradients. Collective where they are sharded."""
        ...


class PlainGradients:
    """Added up by torch: on each rank as they come, then over the ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def microbatch(self, *, last: bool, extra: bool) -> Iterator[None]:
        """See Gradients."""
        with ExitStack() as contexts:
            if extra:
                contexts.enter_context(buffers_kept(self._model))
            contexts.enter_context(accumulation(self._model, last=last))
            yield

    def backward(self, *, shard: int | None, last: bool) -> AbstractContextManager[None]:
        """See Gradients."""
        return exchange(self._model, last=last)

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See Gradients."""
        if not gradients:
            return torch.zeros(())
        norm = get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def accumulation(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """A context for one microbatch, forward and backward both: gradients are exchanged on the last one only."""
    wrapper = exchanging(model)
    if isinstance(wrapper, Replicas):
        if not last:
            return wrapper.no_sync()
        wrapper.begin_reduction()
    if isinstance(wrapper, FSDPModule):
        wrapper.set_requires_gradient_sync(last)
    return nullcontext()


def exchanging(model: nn.Module) -> nn.Module:
    """The DDP or FSDP module inside other wrappers, such as torch.compile's; the innermost module if there is none."""
    while not isinstance(model, (DistributedDataParallel, FSDPModule)):
        attribute = wrapped_attribute(model)
        if attribute is None:
            break
        model = getattr(model, attribute)
    return model


@contextmanager
def exchange(model: nn.Module, *, last: bool) -> Iterator[None]:
    """A context for the backward of one microbatch. Raises ModelError when the model does not fit DDP's options."""
    wrapper = exchanging(model)
    if not isinstance(wrapper, Replicas):
        yield
        return
    with Explained(wrapper):
        yield
    if last:
        wrapper.check_reduced()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Leave the buffers (BatchNorm statistics) as they were found."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def make_buffers_equal(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), as DDP does before a forward. Collective."""
    with torch.no_grad():
        for buffer in unwrap(model).buffers():
            if not isinstance(buffer, nn.Parameter):
                dist.broadcast(buffer, src=0)


def for_evaluation(model: nn.Module) -> nn.Module:
    """The module to call where ranks may differ in the number of forwards: without DDP's exchange of buffers."""
    wrapper = exchanging(model)
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper.module
    if isinstance(wrapper, FSDPModule):
        return wrapper
    return model.module if isinstance(model, DataParallel) else model
