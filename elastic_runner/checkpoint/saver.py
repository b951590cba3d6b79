"""What the two formats have in common in saving: a copy within the step, all else beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.capture import Captured
from elastic_runner.checkpoint.layout import Piece
from elastic_runner.coordination import Coordinator
from elastic_runner.storage import Storage, Written


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank has written of a checkpoint."""

    files: tuple[Written, ...] = ()
    """Its files, paths as given to the storage."""
    non_finite: tuple[str, ...] = ()
    """Keys of what is trained and holds NaN or infinity."""


class Saver(Protocol):
    """Buffers for one state, kept from save to save. One save at a time."""

    def fits(self, captured: Captured) -> bool:
        """Whether the buffers were made for a state like this one. Raises StateError for what cannot be saved."""
        ...

    def allocate(self, coordinator: Coordinator) -> None:
        """Make the buffers anew, for the state that did not fit. Collective."""
        ...

    def begin(self, captured: Captured) -> None:
        """A new save: ``write`` may be called from now on, and waits for ``copy``."""
        ...

    def copy(self, captured: Captured) -> None:
        """Copy the state; it may change afterwards. Collective."""
        ...

    def abandon(self) -> None:
        """``copy`` has failed: let ``write`` fail too."""
        ...

    def write(self, storage: Storage, directory: str) -> Part:
        """Write this rank's part, durably. Beside training: not collective."""
        ...


def box(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a captured tensor that ``piece`` stands for."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.dim() and piece.sizes[0] != local.shape[0]:
        local = local[piece.row : piece.row + piece.sizes[0]]
    return local


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity in a CPU tensor; in one pass, without a copy of its size."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no arithmetic
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def non_finite(tensors: Iterable[tuple[str, torch.Tensor]], trained: set[str]) -> tuple[str, ...]:
    """Keys among ``trained`` with NaN or infinity, each once."""
    return tuple(dict.fromkeys(key for key, tensor in tensors if key in trained and not is_finite(tensor)))
