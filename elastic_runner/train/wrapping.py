"""Choosing the blocks of a model that are sharded, or recomputed, as units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_runner.errors import ModelError

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def modules_of_class(model: nn.Module, names: Sequence[str], field: str) -> list[nn.Module]:
    """All submodules whose class has one of ``names``. Raises ModelError, naming ``field``, for a name none has."""
    found = [m for m in model.modules() if type(m).__name__ in names]
    containers = sorted({type(m).__name__ for m in found if isinstance(m, _WITHOUT_FORWARD)})
    if containers:
        raise ModelError(f"{field}: {', '.join(containers)} has no forward of its own; name the class of its members")
    absent = [name for name in names if not any(type(m).__name__ == name for m in found)]
    if absent:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ModelError(f"{field}: the model has no module of class {', '.join(absent)}; it has {', '.join(known)}")
    return found


def modules_of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Submodules to make units of, in the model's order: each leaves at least ``least`` parameters to itself.

    Parameters of units inside a module do not count for it. The root is not among them.
    """
    units: set[nn.Module] = set()

    def left(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        count = own + sum(left(child) for child in module.children())
        # Containers without a forward of their own cannot be hooked.
        if count >= least and module is not model and not isinstance(module, _WITHOUT_FORWARD):
            units.add(module)
            return 0
        return count

    left(model)
    return [module for module in model.modules() if module in units]


def without_shared_parameters(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """``units`` less those with a parameter that is used outside of them too: a tied parameter belongs to the root."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1

    def shared(unit: nn.Module) -> bool:
        inside: dict[int, int] = {}
        for module in unit.modules():
            for parameter in module.parameters(recurse=False):
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        return any(users[key] > count for key, count in inside.items())

    return [unit for unit in units if not shared(unit)]


def recompute_activations(model: nn.Module, names: Sequence[str]) -> None:
    """Compute the activations of these blocks again in backward (non-reentrant, random numbers preserved).

    The blocks' ``forward`` is replaced on the instance, so no name in the state dict changes.
    """
    for block in modules_of_class(model, names, "strategy.checkpoint_classes"):
        forward: Any = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
