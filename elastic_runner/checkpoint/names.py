"""Names of parameters and buffers that do not depend on wrappers, and which of them are tied."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

# By class name, since importing torch._dynamo for an isinstance costs half a second.
_WRAPPERS_BY_NAME = {"OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module"}


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which a wrapper (DDP, DP, torch.compile, activation checkpointing) keeps its module."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    # The module's own type: an OptimizedModule passes for the class of what it wraps.
    kind = type(module)
    return _WRAPPERS_BY_NAME.get(kind.__name__) if kind.__module__.startswith("torch.") else None


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside any number of wrappers."""
    while (attribute := wrapped_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def clean_name(model: nn.Module, raw: str) -> str:
    """``raw`` (a name from ``model.state_dict()``) without the segments that wrappers put in, at any depth.

    A user's own submodule called "module" keeps its name.
    """
    kept: list[str] = []
    place: nn.Module | None = model
    for segment in raw.split("."):
        # CheckpointWrapper takes its own segment out of the names of its state dict.
        while place is not None and (attribute := wrapped_attribute(place)) is not None and segment != attribute:
            place = place._modules.get(attribute)
        if place is None or segment != wrapped_attribute(place):
            kept.append(segment)
        place = place._modules.get(segment) if place is not None else None
    return ".".join(kept)


def parameter_groups(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each distinct parameter with all its clean names; more than one where it is tied."""
    found: dict[object, tuple[nn.Parameter, list[str]]] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(model, raw)
        _, names = found.setdefault(_identity(parameter), (parameter, []))
        if name not in names:
            names.append(name)
    return list(found.values())


def aliases(groups: Iterable[tuple[nn.Parameter, list[str]]]) -> dict[str, str]:
    """Every second and further name of a tied parameter, with the first name, under which it is stored."""
    return {name: names[0] for _, names in groups for name in names[1:]}


def _identity(parameter: torch.Tensor) -> object:
    if isinstance(parameter, DTensor) or parameter.numel() == 0 or parameter.is_meta:
        return id(parameter)
    return parameter.data_ptr(), parameter.shape, parameter.stride()
