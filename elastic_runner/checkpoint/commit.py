"""What happens to a state once it is copied: written by every rank, committed by one, older ones pruned.

All of it runs beside training, in a group of its own: nothing here may meet the steps' exchanges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elastic_runner import paths
from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.manifest import Manifest, create_fenced
from elastic_runner.checkpoint.marks import read_marks, trust
from elastic_runner.checkpoint.pruning import prune
from elastic_runner.checkpoint.retention import retention_of
from elastic_runner.checkpoint.saver import Part, Saver
from elastic_runner.checkpoint.spill import Spill
from elastic_runner.config import CheckpointConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import CheckpointError, NotFound, SaveFailed, StorageError
from elastic_runner.storage import Storage

log = logging.getLogger(__name__)


class CommitPlace(Protocol):
    """What a commit needs of its worker."""

    background_coordinator: Coordinator
    """For what is written beside training."""
    attempt: int
    """The fence."""

    def check_fence(self) -> None:
        """Raise Fenced when a newer attempt owns the run."""
        ...

    def before_commit(self) -> None:
        """What is on record of the run must not be younger than a checkpoint of it: make it durable."""
        ...

    def committed(self, step: int) -> None:
        """Tell of it, on rank 0 and beside training."""
        ...


class Commit:
    """Saves what a saver has copied. ``unusable``: manifests that a restore has found damaged, by path."""

    def __init__(
        self,
        config: CheckpointConfig,
        spill: Spill | None,
        place: CommitPlace,
        unusable: set[str],
        catalogue: Catalogue,
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._spill = spill
        self._place = place
        self._unusable = unusable
        self._newest: Manifest | None = None

    def run(self, storage: Storage, saver: Saver, step: int, metrics: Mapping[str, float]) -> None:
        """Write and commit; collective. Raises SaveFailed, or what no later save would cure, alike on every rank."""
        coordinator = self._place.background_coordinator
        with _as_save_failed(step):
            try:
                coordinator.once(f"save of step {step}: clear the way", lambda: self._clear_the_way(storage, step))
                manifest = self._write(saver, storage, step, metrics)
                coordinator.once(f"save of step {step}: commit", lambda: self._commit(storage, manifest))
            except StorageError as error:
                if self._spill is not None:
                    self._spill_over(self._spill, saver, step, metrics, error)
                raise
        if self._spill is not None:
            self._spill.clear(step)

    def tidy(self, storage: Storage) -> None:
        """What follows the newest commit and delays nobody; on rank 0, which alone has committed. Not collective."""
        if self._newest is None:
            return
        self._place.committed(self._newest.step)
        attempt, retention = self._place.attempt, retention_of(self._config)
        prune(storage, retention, self._newest, attempt, self._unusable, self._catalogue)

    def _clear_the_way(self, storage: Storage, step: int) -> None:
        """A run that went back comes to a step a second time: what a manifest names is not written over."""
        old = _Committed(step=step, attempt=self._place.attempt)
        try:
            storage.size(old.path)
        except NotFound:
            return
        marks = read_marks(storage, old)
        if marks.pinned or marks.being_read(time.time()):
            raise SaveFailed(f"{old.path}, saved by this attempt before, is pinned or being read: it is not replaced")
        log.warning("step %d was saved by this attempt before and is saved anew", step)
        storage.delete(old.path)
        self._catalogue.forget(step)
        trust(storage, old)  # what was said of the old one is not true of the new
        self._unusable.discard(old.path)

    def _write(self, saver: Saver, storage: Storage, step: int, metrics: Mapping[str, float]) -> Manifest:
        coordinator = self._place.background_coordinator
        directory = paths.data_directory(step, self._place.attempt)
        parts = coordinator.agree(f"save of step {step}: write", partial(saver.write, storage, directory))
        return self._manifest(step, parts, metrics)

    def _manifest(self, step: int, parts: Sequence[Part], metrics: Mapping[str, float]) -> Manifest:
        root = paths.step_directory(step) + "/"
        return Manifest(
            step=step,
            attempt=self._place.attempt,
            world_size=self._place.background_coordinator.world_size,
            format=self._config.format,
            files=tuple(file.within(root) for part in parts for file in part.files),
            metrics=dict(metrics),
            non_finite=tuple(sorted({key for part in parts for key in part.non_finite})),
        )

    def _commit(self, storage: Storage, manifest: Manifest) -> None:
        self._place.before_commit()
        create_fenced(storage, manifest, self._place.check_fence)
        self._newest = manifest
        log.info("saved step %d (%.1f MB)", manifest.step, manifest.size / 1e6)
        if manifest.non_finite:
            log.error("step %d holds NaN or infinity in %s", manifest.step, ", ".join(manifest.non_finite[:8]))

    def _spill_over(
        self, spill: Spill, saver: Saver, step: int, metrics: Mapping[str, float], error: StorageError
    ) -> None:
        coordinator = self._place.background_coordinator
        manifest = self._write(saver, spill.storage, step, metrics)
        coordinator.agree(f"save of step {step}: spill", lambda: spill.keep(manifest))
        spill.clear(step - 1)
        if coordinator.is_main:
            log.warning("step %d was spilled to %s: %s", step, spill.storage.url, error)


@dataclass(frozen=True, kw_only=True)
class _Committed:
    """What marks belong to, before its manifest is read."""

    step: int
    attempt: int

    @property
    def path(self) -> str:
        return paths.manifest(self.step, self.attempt)


@contextmanager
def _as_save_failed(step: int) -> Iterator[None]:
    try:
        yield
    except (StorageError, CheckpointError) as error:
        # A full disk, a refusal and the like say what to do, and a new start would not go better.
        if not error.restartable or isinstance(error, SaveFailed):
            raise
        raise SaveFailed(f"step {step} was not saved: {error}") from error
