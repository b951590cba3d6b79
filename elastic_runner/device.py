"""The device of a worker, what opening it ahead comes to, and the process-group backend that goes with it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastic_runner.errors import ConfigError


def choose_device(local_rank: int) -> torch.device:
    """The accelerator of this local rank, else the CPU. Raises ConfigError when workers outnumber accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no {accelerator.type} device: this node has {count}; "
            f"start at most {count} workers per node (--nproc-per-node)"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def open_device(local_rank: int) -> None:
    """Make the context and the allocator that the first use of this local rank's device would make; as choose_device.

    No kernel of cuBLAS runs: it would take CUBLAS_WORKSPACE_CONFIG as it is now, and the program sets it, for its bits.
    """
    device = choose_device(local_rank)
    if device.type != "cpu":
        torch.zeros(1, device=device)
        torch.accelerator.synchronize(device)


def choose_backend(device: torch.device) -> str:
    """gloo on the CPU; on an accelerator its own backend (nccl, xccl, hccl, ...), with gloo for CPU tensors."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
