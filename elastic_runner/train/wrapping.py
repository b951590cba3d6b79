"""Choosing the blocks of a model that are sharded, or recomputed, as units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_runner.errors import ModelError


def modules_of_class(model: nn.Module, names: Sequence[str], field: str) -> list[nn.Module]:
    """All submodules whose class has one of ``names``. Raises ModelError, naming ``field``, for a name none has."""
    found = [m for m in model.modules() if type(m).__name__ in names]
    absent = [name for name in names if not any(type(m).__name__ == name for m in found)]
    if absent:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ModelError(f"{field}: the model has no module of class {', '.join(absent)}; it has {', '.join(known)}")
    return found


def modules_of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Submodules to make units of, inner before outer: each leaves at least ``least`` parameters to itself.

    Parameters of units inside a module do not count for it. The root is not among them.
    """
    units: list[nn.Module] = []

    def left(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        count = own + sum(left(child) for child in module.children())
        # Containers without a forward of their own cannot be hooked.
        if count >= least and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            units.append(module)
            return 0
        return count

    left(model)
    return units


def recompute_activations(model: nn.Module, names: Sequence[str]) -> None:
    """Compute the activations of these blocks again in backward (non-reentrant, random numbers preserved).

    The blocks' ``forward`` is replaced on the instance, so no name in the state dict changes.
    """
    for block in modules_of_class(model, names, "strategy.checkpoint_classes"):
        forward: Any = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
