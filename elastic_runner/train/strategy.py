"""Spreading a model over ranks by configuration: single, dp, ddp, fsdp, hsdp."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DataParallel

from elastic_runner.config import DataConfig, DdpConfig, FsdpConfig, RunConfig, StrategyConfig
from elastic_runner.errors import ConfigError, ModelError
from elastic_runner.train.kernels import pin_kernels
from elastic_runner.train.replicas import Replicas
from elastic_runner.train.wrapping import (
    modules_of_class,
    modules_of_size,
    recompute_activations,
    without_shared_parameters,
)

log = logging.getLogger(__name__)

SHARDED = ("fsdp", "hsdp")


def check_strategy(config: RunConfig, *, world_size: int, device: torch.device) -> None:
    """Raise ConfigError for a combination that cannot work, saying what to change."""
    strategy, precision = config.strategy, config.training.precision
    if strategy.name in ("single", "dp") and world_size > 1:
        raise ConfigError(
            f"strategy.name={strategy.name!r} runs one process, but there are {world_size}: use ddp or fsdp"
        )
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("training.precision='fp16' needs an accelerator; use bf16 on the CPU")
    if strategy.name in SHARDED and strategy.fsdp.cpu_offload and device.type == "cpu":
        raise ConfigError("strategy.fsdp.cpu_offload has nothing to offload from on the CPU: switch it off")
    if strategy.name == "ddp":
        _check_ddp(strategy, config.data, world_size)
    if config.determinism == "elastic":
        _check_exact(strategy)


def _check_exact(strategy: StrategyConfig) -> None:
    if strategy.name in ("dp", "hsdp"):
        instead = {"dp": "single or ddp", "hsdp": "fsdp or ddp"}[strategy.name]
        raise ConfigError(f"determinism='elastic' is not there for strategy.name={strategy.name!r}: use {instead}")
    if strategy.name == "fsdp" and strategy.fsdp.cpu_offload:
        raise ConfigError("determinism='elastic' keeps gradients on the device: switch strategy.fsdp.cpu_offload off")
    if strategy.name == "ddp" and strategy.ddp.static_graph:
        raise ConfigError(
            "determinism='elastic' sums the gradients itself, so that DDP learns no graph: "
            "switch strategy.ddp.static_graph off"
        )


def _check_ddp(strategy: StrategyConfig, data: DataConfig, world_size: int) -> None:
    ddp = strategy.ddp
    if ddp.static_graph and ddp.find_unused_parameters:
        raise ConfigError(
            "strategy.ddp: static_graph already finds unused parameters; switch find_unused_parameters off"
        )
    if ddp.static_graph and data.shards > world_size:
        raise ConfigError(
            "strategy.ddp.static_graph does not allow gradient accumulation, and with data.shards="
            f"{data.shards} on {world_size} ranks some rank accumulates: "
            "switch it off, or set data.shards to the world size"
        )


def prepare(model: nn.Module, config: RunConfig, *, device: torch.device, local_world_size: int) -> nn.Module:
    """Move ``model`` to ``device``, make all ranks start from rank 0's values, and wrap it.

    Raises ModelError when the model does not fit the options. Collective.
    """
    strategy, exact = config.strategy, config.determinism == "elastic"
    if exact:
        pin_kernels(device)
    model = model.to(device)
    broadcast_state(model)
    if strategy.checkpoint_classes:
        recompute_activations(model, strategy.checkpoint_classes)
    if strategy.name == "dp":
        return DataParallel(model)
    if strategy.name == "ddp":
        # Statistics are made equal by shards then, after each step.
        return _ddp(model, replace(strategy.ddp, broadcast_buffers=False) if exact else strategy.ddp, device)
    if strategy.name in SHARDED:
        mesh = _mesh(strategy, device, local_world_size)
        # Autocast and FSDP's policy compute different operations in low precision.
        return _fsdp(model, strategy.fsdp, mesh, "fp32" if exact else config.training.precision, device)
    return model


def broadcast_state(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def _ddp(model: nn.Module, options: DdpConfig, device: torch.device) -> nn.Module:
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError("every parameter is frozen: there is nothing to train")
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the new name does not exist in 2.9.
        warnings.simplefilter("ignore", FutureWarning)
        return Replicas(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            broadcast_buffers=options.broadcast_buffers,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )


def _mesh(strategy: StrategyConfig, device: torch.device, local_world_size: int) -> DeviceMesh:
    world = dist.get_world_size()
    if strategy.name == "fsdp":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    wanted = strategy.fsdp.shard_size or local_world_size
    size = math.gcd(world, wanted)
    if size != wanted and dist.get_rank() == 0:
        log.warning("hsdp: shard groups of %d do not divide %d ranks; using groups of %d", wanted, world, size)
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def _fsdp(model: nn.Module, options: FsdpConfig, mesh: DeviceMesh, precision: str, device: torch.device) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP shards rows of memory
    if options.wrap_classes:
        found = modules_of_class(model, options.wrap_classes, "strategy.fsdp.wrap_classes")
        units = [module for module in found if module is not model]
    else:
        units = modules_of_size(model, options.wrap_min_params)
    units = without_shared_parameters(model, units)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy(),
    }
    inner, outer = _mixed_precision(precision)
    # A unit inside of another one comes first, else the outer one takes its parameters.
    sharded = [fully_shard(unit, mp_policy=inner, **arguments) for unit in reversed(units)][::-1]
    root = fully_shard(model, mp_policy=outer, **arguments)
    for module in (*sharded, root):
        # Losses carry their share of the global batch, so gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _prefetch(sharded, options)
    return model


def _mixed_precision(precision: str) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For units and for the root. Only the root's output is fp32: a unit's goes into layers of the compute type."""
    compute = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if compute is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    return inner, MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _prefetch(units: list[FSDPModule], options: FsdpConfig) -> None:
    for index, unit in enumerate(units):
        ahead = units[index + 1 : index + 1 + options.forward_prefetch]
        behind = units[max(0, index - options.backward_prefetch) : index][::-1]
        if ahead:
            unit.set_modules_to_forward_prefetch(ahead)
        if behind:
            unit.set_modules_to_backward_prefetch(behind)
