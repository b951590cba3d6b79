"""Evaluation that counts each sample once, with the same result at every world size.

The batches are a fixed grid over the dataset; only who computes which batch depends on the world. Per-sample
values are added in the order of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, default_collate

from elastic_runner.coordination import Coordinator
from elastic_runner.data.random import seed_all
from elastic_runner.data.source import to_device
from elastic_runner.errors import ConfigError, LoopError
from elastic_runner.train.step import StepPlace, autocast
from elastic_runner.train.synchronize import for_evaluation, make_buffers_equal

Metric = Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    metric: Metric,
    place: StepPlace,
    *,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    stoppable: bool = True,
) -> dict[str, float]:
    """Mean over all samples of ``dataset`` of each value that ``metric(model, batch)`` returns, shape [samples].

    Runs in eval mode without gradients and leaves every module in the mode it was in. Buffers are made equal on all
    ranks first. Random numbers are keyed by the batch. When a rank is asked to stop meanwhile and it is ``stoppable``,
    it ends early on all ranks and returns {}. Collective. Raises ConfigError for an empty dataset, LoopError for values
    that are not one per sample.
    """
    length = len(cast(Sized, dataset))
    if length == 0:
        raise ConfigError("the evaluation dataset is empty")
    modes = {module: module.training for module in model.modules()}
    with place.phase("evaluate"):
        # Labelled, so that an evaluation on one rank alone is noticed at once.
        place.coordinator.gather("evaluation begins", None)
        make_buffers_equal(model)
        model.eval()
        try:
            with torch.no_grad(), autocast(place.config, place.device):
                sums = _sums(for_evaluation(model), dataset, length, metric, place, batch_size, collate_fn, stoppable)
        finally:
            for module, training in modes.items():
                module.training = training
        if sums is None:
            return {}
        gathered = place.coordinator.gather("evaluation", sums)
    grid = {index: values for part in gathered for index, values in part.items()}
    names = sorted(grid[0])
    if any(sorted(values) != names for values in grid.values()):
        raise LoopError(f"the metric must return the same names for every batch; the first gave {', '.join(names)}")
    return {name: sum(grid[index][name] for index in sorted(grid)) / length for name in names}


def _sums(
    model: nn.Module,
    dataset: Dataset[Any],
    length: int,
    metric: Metric,
    place: StepPlace,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any],
    stoppable: bool,
) -> dict[int, dict[str, float]] | None:
    """Sums of each value by batch number, for this rank's batches; None when stopped."""
    coordinator = place.coordinator
    batches = -(-length // batch_size)
    rank, world = coordinator.rank, coordinator.world_size
    mine = range(rank * batches // world, (rank + 1) * batches // world)
    rounds = -(-batches // world)
    sums: dict[int, dict[str, float]] = {}
    for turn in range(rounds):
        if stoppable and _stop(coordinator, place.stop_requested):
            return None
        has_own = turn < len(mine)
        if not has_own and not isinstance(model, FSDPModule):
            continue
        # Sharded models gather parameters in forward, so a rank without a batch repeats one and drops the result.
        index = mine[turn] if has_own else batches - 1
        if place.config.determinism != "off":
            seed_all(place.seed, "evaluate", index)
        samples = [dataset[i] for i in range(index * batch_size, min(length, (index + 1) * batch_size))]
        values = metric(model, to_device(collate_fn(samples), place.device))
        if not isinstance(values, Mapping):
            raise LoopError(f"the metric must return its values by name, not a {type(values).__name__}")
        if has_own:
            sums[index] = {name: _total(name, value, len(samples)) for name, value in values.items()}
    return sums


def _total(name: str, value: torch.Tensor, samples: int) -> float:
    if getattr(value, "shape", None) != (samples,):
        raise LoopError(f"metric {name!r} must have one value per sample, shape [{samples}], not {_shape(value)}")
    return value.double().sum().item()


def _shape(value: object) -> object:
    return list(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _stop(coordinator: Coordinator, requested: bool) -> bool:
    return bool(coordinator.sum("evaluation goes on", torch.tensor([float(requested)])).item())
