"""The global gradient norm, to the last bit the same however the gradients are sharded.

Squares are added up as integers, whose sum has no order: each parameter's gradient is scaled by the power of two above
its largest value, so that 46 bits of each square relative to the largest one count.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_BITS = 46
_BLOCK = 1 << 16
"""Elements that are added up within 64 bits: 16 + 46 < 63. It fits into the processor's cache, too."""
_HALF = 1 << 32


def exact_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients; infinite when a value is not finite. Collective where they are sharded.

    Sharded ones are sharded over all ranks of the default process group, without replicas.
    """
    if not gradients:
        return torch.zeros(())
    device = gradients[0].device
    local = [(g.to_local() if isinstance(g, DTensor) else g).detach().reshape(-1) for g in gradients]
    sharded = isinstance(gradients[0], DTensor) and dist.get_world_size() > 1
    peaks = torch.stack([largest(g) for g in local])
    if sharded:
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    tops = peaks.tolist()
    if not all(map(math.isfinite, tops)):
        return torch.tensor(math.inf, device=device)
    exponents = [max(math.frexp(top)[1], -500) for top in tops]  # a double has no larger scale
    sums = torch.stack([squares(g, _BITS // 2 - exponent) for g, exponent in zip(local, exponents, strict=True)])
    if sharded:
        dist.all_reduce(sums)
    total = math.fsum(
        math.ldexp(float(high * _HALF + low), 2 * exponent - _BITS)
        for (high, low), exponent in zip(sums.tolist(), exponents, strict=True)
    )
    return torch.tensor(math.sqrt(total), dtype=torch.float32, device=device)


def largest(gradient: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, infinite instead of NaN."""
    if gradient.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    low, high = torch.aminmax(gradient)
    return torch.maximum(-low, high).double().nan_to_num(nan=math.inf, posinf=math.inf)


def squares(gradient: torch.Tensor, shift: int) -> torch.Tensor:
    """The sum of the squares of ``gradient * 2**shift``, each without its fraction: above 32 bits, and the rest.

    The scaled values are to be below 2**23. Sums of such pairs are exact in any order.
    """
    halves = torch.zeros(2, dtype=torch.int64, device=gradient.device)
    for block in gradient.split(_BLOCK):
        scaled = block.double().mul_(2.0**shift)
        total = scaled.mul_(scaled).to(torch.int64).sum()
        halves[0] += total // _HALF
        halves[1] += total % _HALF
    return halves
