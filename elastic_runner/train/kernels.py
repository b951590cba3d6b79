"""What else decides the bits of a result: the number of threads, the instructions, the kernels."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from elastic_runner.errors import ConfigError


def pin_kernels(device: torch.device) -> None:
    """Make equal inputs give equal bits on every rank of every world. Collective.

    On the CPU each process computes in one thread, since the cut of a sum depends on their number. On an accelerator
    only deterministic kernels run; torch names the operation that has none. Raises ConfigError when the ranks'
    processors or versions of torch differ.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
        kind = torch.backends.cpu.get_cpu_capability()
    else:
        # cuBLAS is deterministic only with a workspace of its own, which torch asks for in this way.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        kind = torch.get_device_module(device).get_device_name(device)
    kinds: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, f"{kind}, torch {torch.__version__}")
    if len(set(kinds)) > 1:
        found = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ConfigError(f"determinism='elastic' needs the same processor and torch on all ranks ({found})")
