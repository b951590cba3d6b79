"""The loop over optimizer steps: from where the state stands to the target, or until all ranks agree to stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.data.random import seed_all
from elastic_runner.errors import LoopError
from elastic_runner.observability.progress import StepProgress
from elastic_runner.train.exact import ExactGradients, check_optimizer
from elastic_runner.train.state import TrainState
from elastic_runner.train.step import Step, StepPlace
from elastic_runner.train.synchronize import Gradients, PlainGradients


class LoopPlace(StepPlace, Protocol):
    """What the loop needs of its worker."""

    draining: bool
    """Set once the ranks have agreed to stop."""
    snapshots: Snapshots
    """Copies in the node's memory."""

    @property
    def in_memory_only(self) -> bool:
        """Whether the state that the attempt began with is nowhere else yet."""
        ...


def run_steps(state: TrainState, place: LoopPlace) -> Iterator[Step]:
    """Yield one Step after the other.

    Raises LoopError when ranks stand at different steps, or a step is not finished.
    """
    config, coordinator = place.config, place.coordinator
    state.begun_at = state.step
    steps = coordinator.gather("first step", state.step)
    if len(set(steps)) > 1:
        raise LoopError(f"ranks stand at different steps: {steps}; call checkpointer.restore() on every rank")
    world, target = coordinator.world_size, config.training.max_steps
    place.record.start(
        state.step,
        {
            "world": world,
            "strategy": config.strategy.name,
            "global_batch": config.data.global_batch,
            "target": target,
        },
    )
    gradients = _gradients(state, place)
    phase, first = "first_step", state.step + 1
    with StepProgress(total=target, done=state.step, enabled=coordinator.is_main) as progress:
        while state.step < target and not place.draining:
            with place.phase(phase):
                number = state.step + 1
                # Ranks that are elsewhere (in a save that was called on rank 0 alone) are noticed before they hang.
                said = coordinator.gather(f"step {number} begins", (place.stop_requested, place.snapshots.report()))
                place.snapshots.hear([report for _, report in said], state.step)
                place.snapshots.begins()
                if any(asked for asked, _ in said) and number == first and not place.in_memory_only:
                    place.draining = True  # nothing has been done that is not saved
                    break
                step = Step(number, state.data.begin(number), state, place, gradients)
                if config.determinism != "off":
                    seed_all(place.seed, "step", number)
                else:
                    seed_all(place.seed, "step", number, place.attempt, coordinator.rank)
                yield step
                if step.result is None:
                    raise LoopError(f"step {number}: the loop body ended without step.optimize()")
            place.draining = step.draining
            progress.step(number, step.result.loss)
            phase = "step"


def _gradients(state: TrainState, place: LoopPlace) -> Gradients:
    config = place.config
    if config.determinism != "elastic":
        return PlainGradients(state.model)
    check_optimizer(state.optimizer)
    bucket = config.strategy.ddp.bucket_cap_mb << 20
    return ExactGradients(state.model, config.data.shards, place.coordinator, bucket_bytes=bucket)
