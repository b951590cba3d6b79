"""The loop over optimizer steps: from where the state stands to the target, or until all ranks agree to stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from elastic_runner.checkpoint.snapshots import Report, Snapshots
from elastic_runner.data.random import seed_all
from elastic_runner.errors import LoopError, ReplayDiverged
from elastic_runner.observability.progress import StepProgress
from elastic_runner.train.divergence import Replica, ReplicaCheck
from elastic_runner.train.exact import ExactGradients, check_optimizer
from elastic_runner.train.past import Past
from elastic_runner.train.replay import Divergence
from elastic_runner.train.state import TrainState
from elastic_runner.train.step import Step, StepPlace
from elastic_runner.train.synchronize import Gradients, PlainGradients


class LoopPlace(StepPlace, Protocol):
    """What the loop needs of its worker."""

    draining: bool
    """Set once the ranks have agreed to stop."""
    snapshots: Snapshots
    """Copies in the node's memory."""
    past: Past
    """What follows from the attempts before; asked on global rank 0."""

    @property
    def in_memory_only(self) -> bool:
        """Whether the state that the attempt began with is nowhere else yet."""
        ...


class _Said(NamedTuple):
    """What a rank tells the others when a step begins."""

    stop: bool
    """Whether it was asked to stop."""
    snapshots: Report
    """How its snapshots stand."""
    replica: Replica | None
    """Its parameters, where they are to be compared."""
    objection: Divergence | None
    """Why it must not go on."""


def run_steps(state: TrainState, place: LoopPlace) -> Iterator[Step]:
    """Yield one Step after the other.

    Raises LoopError when ranks stand at different steps, or a step is not finished; ReplicasDiffer and, by
    ``training.replay``, ReplayDiverged.
    """
    config, coordinator = place.config, place.coordinator
    state.begun_at, state.agreed_at = state.step, None
    steps = coordinator.gather("first step", state.step)
    if len(set(steps)) > 1:
        raise LoopError(f"ranks stand at different steps: {steps}; call checkpointer.restore() on every rank")
    if (skips := coordinator.once("skips", lambda: place.past.skips)) or config.training.skip_failing:
        state.data.skip(skips)
    target = config.training.max_steps
    place.record.start(state.step, _facts(place), replay=config.training.replay)
    gradients, replicas = _gradients(state, place), ReplicaCheck(state, place)
    phase, first = "first_step", state.step + 1
    with StepProgress(total=target, done=state.step, enabled=coordinator.is_main) as progress:
        while state.step < target and not place.draining:
            with place.phase(phase):
                number = state.step + 1
                said = _exchange(f"step {number} begins", state, place, replicas)
                place.snapshots.hear([one.snapshots for one in said], state.step)
                place.snapshots.begins()
                if any(one.stop for one in said) and number == first and not place.in_memory_only:
                    place.draining = True  # nothing has been done that is not saved
                    break
                span = state.data.begin(number)
                if config.determinism != "off":
                    seed_all(place.seed, "step", number)
                else:
                    seed_all(place.seed, "step", number, place.attempt, coordinator.rank)
                step = Step(number, span, state, place, gradients)
                yield step
                if step.result is None:
                    raise LoopError(f"step {number}: the loop body ended without step.optimize()")
            place.draining = step.draining
            progress.step(number, step.result.loss)
            phase = "step"
    with place.phase("step"):
        _exchange("the loop ends", state, place, replicas, ends=True)


def _exchange(
    label: str, state: TrainState, place: LoopPlace, replicas: ReplicaCheck, *, ends: bool = False
) -> list[_Said]:
    """What all ranks have to say. Ranks that are elsewhere (in a save that was called on rank 0 alone) are noticed."""
    mine = _Said(
        stop=place.stop_requested,
        snapshots=place.snapshots.report(),
        replica=replicas.report(ends=ends),
        objection=place.record.divergence if place.config.training.replay == "stop" else None,
    )
    said = place.coordinator.gather(label, mine)
    for one in said:
        if one.objection is not None:
            state.agreed_at = one.objection.step - 1  # what was saved after that is doubtful
            raise ReplayDiverged(str(one.objection))
    replicas.hear([one.replica for one in said])
    return said


def _facts(place: LoopPlace) -> dict[str, Any]:
    """What results depend on, besides what is in each step's line."""
    config = place.config
    return {
        "world": place.coordinator.world_size,
        "strategy": config.strategy.name,
        "determinism": config.determinism,
        "precision": config.training.precision,
        "device": place.device.type,
        "threads": torch.get_num_threads(),
        "seed": place.seed,
        "global_batch": config.data.global_batch,
        "shards": config.data.shards,
        "last_batch": config.data.last_batch,
        "target": config.training.max_steps,
    }


def _gradients(state: TrainState, place: LoopPlace) -> Gradients:
    config = place.config
    if config.determinism != "elastic":
        return PlainGradients(state.model)
    check_optimizer(state.optimizer)
    bucket = config.strategy.ddp.bucket_cap_mb << 20
    return ExactGradients(state.model, config.data.shards, place.coordinator, bucket_bytes=bucket)
