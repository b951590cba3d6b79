"""BatchNorm's running statistics as a function of the logical shards, whoever runs them.

Each microbatch finds the statistics as they were before the step. What it makes of them is taken when its forward is
done, so that a forward which is computed again in backward does not count. After the step the shards' contributions
are put in one after the other, in the order of the shards, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic_runner.coordination import Coordinator
from elastic_runner.errors import ModelError


class Statistics:
    """The running statistics of a model's BatchNorm modules. Raises ModelError for what no order can make equal."""

    def __init__(self, model: nn.Module, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            raise ModelError(
                "SyncBatchNorm takes its statistics over what all ranks run at the same time, which depends on the "
                "world size: use BatchNorm with determinism='elastic'"
            )
        self._kept = [
            tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None
        ]
        self._counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._momentum = [norm.momentum for norm in norms]
        mine = {id(buffer) for buffer in (*self._kept, *self._counts)}
        self._others = [
            (name, module, own)
            for name, module in model.named_modules()
            for own, buffer in module.named_buffers(recurse=False)
            if id(buffer) not in mine
        ]
        self._before: list[tuple[object, int]] = []
        self._base: torch.Tensor | None = None
        self._taken: list[torch.Tensor] = []

    def begin(self) -> None:
        """Before a microbatch: the statistics are those before the step."""
        self._before = list(self._versions())
        if self._base is None:
            self._base = self._read()
        else:
            self._write(self._base)

    def take(self) -> None:
        """After the forward of the next logical shard of this rank."""
        for (name, _, own), before, now in zip(self._others, self._before, self._versions(), strict=True):
            if before[0] is not now[0] or before[1] != now[1]:
                raise ModelError(
                    f"the forward changes the buffer {f'{name}.{own}'.lstrip('.')}. Of those, determinism='elastic' "
                    "knows only BatchNorm's statistics: take it out of the forward, or use determinism='order'"
                )
        if self._kept:
            self._taken.append(self._read())

    def finish(self) -> None:
        """After the last microbatch: put all shards' contributions in. Collective."""
        base, taken = self._base, self._taken
        self._base, self._taken = None, []
        if base is None or not self._kept:
            return
        parts = self._coordinator.gather("BatchNorm statistics", torch.stack(taken).cpu())
        self._write(self._folded(base.cpu(), torch.cat(parts)).to(base.device))

    def _folded(self, base: torch.Tensor, shards: torch.Tensor) -> torch.Tensor:
        """Affine steps, as each forward makes them: ``decay * running + gain * (what the shard adds)``."""
        sizes = torch.tensor([tensor.numel() for tensor in self._kept])
        pairs = torch.arange(len(self._counts)).repeat_interleave(2)
        momentum = torch.tensor([m or 0.0 for m in self._momentum], dtype=torch.float64)
        cumulative = torch.tensor([m is None for m in self._momentum])
        start = base[-len(self._counts) :]
        kept, counts = base[: -len(self._counts)].clone(), start.clone()

        def spread(factor: torch.Tensor) -> torch.Tensor:
            return factor[pairs].repeat_interleave(sizes)

        for shard in shards:
            forwards = shard[-len(self._counts) :] - start
            fixed = (1 - momentum) ** forwards
            # Without momentum the statistics are the mean over all forwards there have been.
            decay = torch.where(cumulative, counts / (counts + forwards).clamp(min=1), fixed)
            alone = torch.where(cumulative, start / (start + forwards).clamp(min=1), fixed)
            gain = torch.where(
                cumulative, (start + forwards) / (counts + forwards).clamp(min=1), torch.ones_like(fixed)
            )
            added = shard[: -len(self._counts)] - spread(alone) * base[: -len(self._counts)]
            used = spread(forwards) > 0
            kept = torch.where(used, spread(decay) * kept + spread(gain) * added, kept)
            counts = counts + forwards
        return torch.cat([kept, counts])

    def _read(self) -> torch.Tensor:
        if not self._kept:
            return torch.empty(0)
        return torch.cat([t.detach().reshape(-1).to(torch.float64) for t in (*self._kept, *self._counts)])

    def _write(self, values: torch.Tensor) -> None:
        tensors = [*self._kept, *self._counts]
        for tensor, value in zip(tensors, values.split([t.numel() for t in tensors]), strict=True) if tensors else ():
            tensor.copy_(value.view_as(tensor))

    def _versions(self) -> Iterator[tuple[object, int]]:
        """Of the buffers that are not ours: which tensor it is, and how often it was changed."""
        for _, module, own in self._others:
            buffer = module._buffers.get(own)
            yield buffer, 0 if buffer is None else buffer._version
