"""When ranks exchange gradients and buffers, by the kind of wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastic_runner.checkpoint.names import unwrap


def accumulation(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """A context for one microbatch, forward and backward both: gradients are exchanged on the last one only."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def make_buffers_equal(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), as DDP does before a forward. Collective."""
    with torch.no_grad():
        for buffer in unwrap(model).buffers():
            if not isinstance(buffer, nn.Parameter):
                dist.broadcast(buffer, src=0)


def for_evaluation(model: nn.Module) -> nn.Module:
    """The module to call where ranks may differ in the number of forwards: without DDP's exchange of buffers."""
    return model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else model
