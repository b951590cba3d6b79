"""The groups that a worker is in, one for each thing that goes on: steps, checkpoints, saves beside training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from elastic_runner.config import TimeoutConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.device import choose_backend
from elastic_runner.environment import Environment
from elastic_runner.worker.process_group import connect, start_groups


def join(
    environment: Environment, device: torch.device, timeouts: TimeoutConfig, moved: Callable[[], None]
) -> tuple[Coordinator, Coordinator, Coordinator]:
    """Coordinators of steps, of checkpoints and of what is saved beside training. Raises SetupError.

    ``moved``: called as bytes of a checkpoint move.
    """
    # Less than the phase has, so that it is said who is absent; TCPStore counts whole seconds.
    patience = max(0.9 * timeouts.setup - 1, timeouts.setup / 2)
    steps, checkpoints, background = start_groups(
        connect(environment, patience),
        environment,
        choose_backend(device),
        setup=patience,
        step=max(timeouts.step, timeouts.first_step, timeouts.evaluate, timeouts.on_main),
        checkpoint=max(timeouts.save, timeouts.load),
    )
    # Often enough for who waits, and seldom.
    every = min(timeouts.save, timeouts.load) / 4
    return (
        Coordinator(steps),
        Coordinator(checkpoints, moved=moved, every=every),
        Coordinator(background, moved=moved, every=every),
    )


def leave(coordinators: Iterable[Coordinator]) -> None:
    """Close them and the default group, where there is one."""
    for coordinator in coordinators:
        coordinator.close()
    if dist.is_initialized():
        dist.destroy_process_group()
