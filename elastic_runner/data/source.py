"""What a training loop needs of its data, whatever they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from elastic_runner.data.skips import Skip


@dataclass(frozen=True, kw_only=True)
class Span:
    """The samples of one global batch, as the ledger records them."""

    epoch: int
    """0-based."""
    first: int
    """First position in the epoch's order."""
    last: int
    """One past the last position."""
    padded: int = 0
    """Samples taken a second time to fill the batch."""
    dropped: int = 0
    """Samples left out: at the end of the epoch, when this batch is its last, and at the end of the epoch before, where
    that turned out only now."""
    length: int | None = None
    """Samples in the epoch, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One logical shard of a global batch."""

    shard: int
    """Number of the shard, 0-based; decides its random numbers."""
    samples: int
    """Samples in it."""
    batch: Any
    """What the collate function made, on the device of the model."""
    digest: int | None = None
    """``shard_digest`` of the samples that were fetched; None where samples have no number (streams)."""


class DataSource(Protocol):
    """One global batch at a time: ``begin``, ``microbatches``, and ``commit`` once the optimizer has stepped."""

    def begin(self, step: int) -> Span:
        """Fix the next global batch. Ranks that call it see the same one."""
        ...

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's logical shards of the batch begun, in order."""
        ...

    def count(self) -> int:
        """How many of them there are on this rank."""
        ...

    def commit(self) -> None:
        """The batch begun is part of the model now."""
        ...

    def skip(self, skips: Iterable[Skip]) -> None:
        """Never give these global batches, but what follows each. Called where there are any, or may come to be.

        Raises ConfigError where that cannot be done.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What has been committed; the same on every rank. Called on all ranks together."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after what ``state`` has committed."""
        ...


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors within dicts, lists and tuples, moved to ``device``; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):  # a named tuple, one of whose tensors has to stay on the CPU
        move: Any = value.to  # torch's overloads know no device here
        return move(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value
