"""What a checkpointer needs of what is around it."""

from __future__ import annotations

from typing import Protocol

from elastic_runner import paths
from elastic_runner.checkpoint.background import Background
from elastic_runner.checkpoint.capture import Parts
from elastic_runner.checkpoint.commit import CommitPlace
from elastic_runner.checkpoint.snapshot import Keep
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import CheckpointConfig
from elastic_runner.coordination import Place


class CheckpointPlace(Place, CommitPlace, Protocol):
    """What a checkpointer needs of its worker."""

    run_url: str
    """The run directory."""
    storage_options: dict[str, str]
    """Options of the run directory's filesystem."""
    storage_timeout: float
    """Deadline of a storage operation, seconds."""
    background: Background
    """Where a save is written beside training."""

    @property
    def node(self) -> str:
        """What ranks that share memory and local files have in common."""
        ...

    def prepare_save(self, parts: Parts) -> None:
        """Make replicated buffers equal on all ranks. Collective."""
        ...

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed."""
        ...

    snapshots: Snapshots
    """Copies in the node's memory."""

    def restored(self, path: str | None, *, attempt: int, step: int, in_memory: bool = False) -> None:
        """The run goes on from the checkpoint with this manifest, or from a later snapshot ``in_memory``: from what
        ``attempt`` had at ``step``."""
        ...

    def recovered(self, lines: bytes) -> None:
        """On rank 0: these ledger lines came with what was restored; put on record those that are not there."""
        ...

    def distrusted(self) -> int:
        """What attempts up to this number left in memory is not to be used, since it may be what fails; 0: none."""
        ...

    @property
    def target(self) -> int:
        """The run's last step."""
        ...

    def blamed(self) -> dict[str, str]:
        """Checkpoints that led to the same failure again and again: why, by path of the manifest."""
        ...

    def not_saved(self, step: int, reason: str, *, skipped: bool) -> None:
        """The save of this step was skipped, or has failed; training goes on."""
        ...


class FinishedStep(Protocol):
    """A step after ``optimize``."""

    number: int
    """Its number, from 1."""
    is_last: bool
    """Whether it is the run's last one."""
    draining: bool
    """Whether all ranks have agreed to stop after it."""
    save_ended: bool
    """Whether, as all ranks know, the save in flight has ended on some rank."""


def checkpoint_url(config: CheckpointConfig, run_url: str, run_options: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where a run's checkpoints are, and the options of that filesystem."""
    if config.url is not None:
        return config.url, config.options
    return paths.join(run_url, paths.CHECKPOINTS), config.options or run_options


def keep_of(config: CheckpointConfig, worker: CheckpointPlace) -> Keep:
    """Where a state belongs that is in memory only."""
    url, options = checkpoint_url(config, worker.run_url, worker.storage_options)
    seconds, demote_after = worker.storage_timeout, config.demote_after
    return Keep(run=worker.run_url, url=url, options=options, seconds=seconds, demote_after=demote_after)
