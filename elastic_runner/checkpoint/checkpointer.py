"""Checkpointer: when to save, how a save is committed, which checkpoint to restore."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from elastic_runner import paths
from elastic_runner.checkpoint.background import Background
from elastic_runner.checkpoint.capture import Captured, Parts, capture
from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.commit import Commit, CommitPlace
from elastic_runner.checkpoint.full import FullSaver
from elastic_runner.checkpoint.load import Loader
from elastic_runner.checkpoint.manifest import Manifest, Rejected, Torn, check_file, list_checkpoints
from elastic_runner.checkpoint.marks import mark_suspect, reading, reasons
from elastic_runner.checkpoint.matching import Lenience
from elastic_runner.checkpoint.saver import Saver
from elastic_runner.checkpoint.sharded import ShardedSaver
from elastic_runner.checkpoint.source import open_source
from elastic_runner.checkpoint.spill import Spill, bring_back
from elastic_runner.checkpoint.trust import Candidate, candidates
from elastic_runner.config import CheckpointConfig
from elastic_runner.coordination import Place
from elastic_runner.errors import Damaged, LoopError, NoUsableCheckpoint, SaveFailed, StorageError
from elastic_runner.storage import Storage, creates_exclusively, open_storage

log = logging.getLogger(__name__)


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

    def restored(self, path: str) -> None:
        """The run goes on from the checkpoint with this manifest."""
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


class Checkpointer:
    """Saves and restores ``parts`` (a TrainState).

    ``storage``: where; by default what the configuration says. Every method is collective: call it on every rank. An
    error on any rank is raised on every rank.
    """

    def __init__(
        self, config: CheckpointConfig, parts: Parts, worker: CheckpointPlace, *, storage: Storage | None = None
    ) -> None:
        self._config = config
        self._parts = parts
        self._worker = worker
        self._coordinator = worker.checkpoint_coordinator
        self._storage = storage or checkpoint_storage(
            config, run_url=worker.run_url, run_options=worker.storage_options, seconds=worker.storage_timeout
        )
        self._saver: Saver = (
            FullSaver(main=self._coordinator.is_main)
            if config.format == "full"
            else ShardedSaver(worker.device, shared=not self._storage.takes_memory)
        )
        self._unusable: set[str] = set()
        self._spill = Spill(config.spill, self._storage) if config.spill is not None else None
        self._commit = Commit(config, self._spill, worker, self._unusable, Catalogue(self._storage))
        self._in_flight: int | None = None
        self._saved_step: int | None = None
        self._failures = 0

    def maybe_save(self, step: FinishedStep, metrics: Mapping[str, float] | None = None) -> bool:
        """Save when ``step`` is due, is the last one, or the run is draining. Returns whether it saves.

        The step waits for one copy only (``checkpoint.mode``); the last save is waited for. A save that fails is
        reported, and training goes on until ``checkpoint.failures_allowed`` are used up; then, and when the last one
        fails, SaveFailed is raised. ``metrics``: results of an evaluation of this state, by which
        ``checkpoint.keep_best`` chooses.
        """
        last = step.is_last or step.draining
        if step.save_ended:
            self._settle(judge=not last)
        due = last or step.number % self._config.every == 0
        if not due or step.number in (self._saved_step, self._in_flight):
            return False
        if self._in_flight is not None and self._config.when_busy == "skip" and not last:
            reason = f"the save of step {self._in_flight} is still going on"
            self._worker.not_saved(step.number, reason, skipped=True)
            return False
        # The last save is tried whatever became of those before it.
        self._settle(judge=not last)
        self._begin(metrics or {}, wait=last or self._config.mode == "sync")
        if last:
            self._finish()
        elif self._config.mode == "sync":
            self._settle()
        return True

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state after the last finished step, and return when that is durable.

        Raises SaveFailed, StorageFull or AccessDenied on every rank when any rank fails.
        """
        self._settle(judge=False)
        self._begin(metrics or {}, wait=True)
        self._finish()

    def restore(self) -> int:
        """Restore the newest usable checkpoint and return its step; 0 when there is none and the run starts fresh.

        What is found damaged, or has led to the same failure ``checkpoint.demote_after`` times, is marked suspect and
        from then on tried last; what cannot be read is passed over, this time. A manifest that was never written to its
        end does not count. Raises Mismatch when the checkpoint does not fit the model, NoUsableCheckpoint when there
        are checkpoints but each is damaged, StorageError when none can be read; AccessDenied or StateError when none
        could be saved later.
        """
        self._settle(judge=False)
        with self._worker.phase("load"):
            # What would make the first save fail shall not wait for it.
            self._coordinator.agree("restore: probe", self._probe)
            self._capture("restore: capture")
            if self._spill is not None:
                bring_back(self._spill, self._storage, self._coordinator, self._worker.check_fence)
            chosen, rejected = self._coordinator.once("restore: list", self._candidates)
            refused = {one.reason: one.error for one in rejected}
            for said in refused:
                self._warn(f"checkpoint not used: {said}")
            lenience = Lenience(allow_missing=self._config.allow_missing, allow_extra=self._config.allow_extra)
            loader = Loader(self._parts, self._coordinator, lenience)
            for candidate in chosen:
                manifest = candidate.manifest
                error = self._try(manifest, loader)
                if error is None:
                    doubt = f"; for want of a better one: {candidate.doubt}" if candidate.doubt else ""
                    by = f"{manifest.format}, by {manifest.world_size} ranks{doubt}"
                    self._say(f"restored step {manifest.step} ({by})")
                    self._parts.step = self._saved_step = manifest.step
                    self._worker.restored(manifest.path)
                    return manifest.step
                said = f"step {manifest.step}: {'' if isinstance(error, Damaged) else 'cannot be read: '}{error}"
                refused[said] = error
                self._warn(f"checkpoint not used: {said}")
        _require_none({said: error for said, error in refused.items() if not isinstance(error, Torn)}, self._storage)
        self._say("no checkpoint yet: starting from step 0")
        return 0

    def _begin(self, metrics: Mapping[str, float], *, wait: bool) -> None:
        """Copy the state and start writing it; with ``wait``, writing begins while the copy is made."""
        step = self._parts.step
        if step in (self._saved_step, self._in_flight):
            return
        if self._worker.background.busy and self._in_flight is None:
            raise LoopError("another Checkpointer of this worker is saving: use one, and give it the whole state")
        numbers = _numbers(metrics)
        with self._worker.phase("save"):
            # In the group of the steps: a rank that went on to its next step meets this here, and both say so.
            captured, fits = self._capture(f"save of step {step}")
            if not fits:
                self._saver.allocate(self._coordinator)
            self._worker.prepare_save(self._parts)
            self._saver.begin(captured)
            if not wait:
                self._saver.copy(captured)
            self._worker.background.start(
                f"save of step {step}",
                partial(self._commit.run, self._storage, self._saver, step, numbers),
                done=partial(self._worker.saved, step),
                after=partial(self._commit.tidy, self._storage),
            )
            self._in_flight = step
            if wait:
                self._copy_beside_writing(captured)

    def _copy_beside_writing(self, captured: Captured) -> None:
        try:
            self._saver.copy(captured)
        except BaseException:
            self._saver.abandon()
            raise

    def _finish(self) -> None:
        """Wait for the save in flight; its error is raised."""
        if self._in_flight is None:
            return
        with self._worker.phase("save"):
            step, error = self._in_flight, self._worker.background.outcome()
        self._in_flight = None
        if error is not None:
            raise error
        self._failures = 0
        self._saved_step = step

    def _settle(self, *, judge: bool = True) -> None:
        """``_finish``, but a failure that the budget has room for, or that is not to be judged, is only reported."""
        step = self._in_flight
        try:
            self._finish()
        except (SaveFailed, StorageError) as error:
            self._failures += 1
            allowed = self._config.failures_allowed
            if judge and self._failures > allowed:
                failed = f"{self._failures} saves in a row have failed (checkpoint.failures_allowed = {allowed})"
                raise type(error)(f"{failed}; the last: {error}") from error
            within = f" of {allowed} allowed" if self._failures <= allowed else ""
            reason = f"{error} (failure {self._failures}{within} in a row)"
            self._worker.not_saved(step or 0, reason, skipped=False)

    def _capture(self, label: str) -> tuple[Captured, bool]:
        """This rank's state, and whether the buffers fit it on all ranks; an error in it is everybody's."""
        taken: list[Captured] = []

        def take() -> bool:
            captured = capture(self._parts)
            taken.append(captured if self._coordinator.is_main else captured.only_shared())
            return self._saver.fits(taken[0])

        fits = self._worker.coordinator.agree(label, take)
        return taken[0], all(fits)

    def _probe(self) -> None:
        name = f"probe-{self._worker.attempt:06d}-{self._coordinator.rank}"
        self._storage.put(name, b"can this rank write here?")
        self._storage.delete(name)
        if self._coordinator.is_main and not creates_exclusively(self._storage, name):
            log.warning(
                "%s lets two writers create the same file: should two jobs ever save here at the same time, the fence "
                "between them rests on reading back what was written",
                self._storage.url,
            )

    def _candidates(self) -> tuple[list[Candidate], tuple[Rejected, ...]]:
        """Committed checkpoints in the order in which to try them, and what is not one."""
        listing = list_checkpoints(self._storage)
        blamed = self._worker.blamed()
        words = dict(blamed)
        for checkpoint in listing.checkpoints:
            manifest, marks = checkpoint.manifest, checkpoint.marks
            if marks.suspect:
                words[manifest.path] = "; ".join(reasons(self._storage, marks))
            elif manifest.path in blamed:
                mark_suspect(self._storage, manifest, blamed[manifest.path], self._worker.attempt)
        chosen = candidates(listing.checkpoints, words)
        for candidate in chosen:
            if candidate.doubt:
                log.warning(
                    "step %d is not used while there is a better one: %s", candidate.manifest.step, candidate.doubt
                )
        return chosen, listing.rejected

    def _try(self, manifest: Manifest, loader: Loader) -> Damaged | StorageError | None:
        """Load a checkpoint; why it cannot be used, agreed by all."""
        attempt = self._worker.attempt
        with ExitStack() as lease:
            try:
                self._coordinator.once("restore: lease", lambda: lease.enter_context(reading(self._storage, manifest)))
                self._verify(manifest)
                self._load(manifest, loader)
            except Damaged as error:
                self._unusable.add(manifest.path)
                reason = str(error)
                self._coordinator.once("restore: mark", lambda: mark_suspect(self._storage, manifest, reason, attempt))
                return error
            except StorageError as error:
                # Nothing is known against what it holds, so it is not marked: the next start tries it again.
                self._unusable.add(manifest.path)
                return error
        return None

    def _verify(self, manifest: Manifest) -> None:
        """Compare the files' sizes, shared out among the ranks. Raises Damaged on all."""
        rank, world = self._coordinator.rank, self._coordinator.world_size

        def check() -> str | None:
            for file in manifest.files[rank::world]:
                if reason := check_file(self._storage, manifest, file, digests=False):
                    return reason
            return None

        for reason in self._coordinator.agree("restore: sizes", check):
            if reason:
                raise Damaged(reason)

    def _load(self, manifest: Manifest, loader: Loader) -> None:
        digests = self._config.verify == "digests"
        source = open_source(self._storage, manifest, self._coordinator, node=self._worker.node, digests=digests)
        try:
            loader.load(source)
        finally:
            source.close()

    def _say(self, message: str) -> None:
        if self._coordinator.is_main:
            log.info(message)

    def _warn(self, message: str) -> None:
        if self._coordinator.is_main:
            log.warning(message)


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as plain numbers; tensors and numpy scalars of one element are taken. Raises LoopError."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LoopError(f"the metric {name!r} given to a save is not a number: {error}") from error
    return numbers


def _require_none(refused: Mapping[str, Damaged | StorageError], storage: Storage) -> None:
    """Raise unless there is nothing that was committed: to start from step 0 would be to lose it."""
    said = f"no checkpoint under {storage.url} can be used: {'; '.join(refused)}"
    for error in refused.values():
        if isinstance(error, StorageError):  # which may pass
            raise type(error)(said) from error
    if refused:
        raise NoUsableCheckpoint(f"{said}. Repair one, or remove them all to start from step 0.")


def checkpoint_storage(
    config: CheckpointConfig, *, run_url: str, run_options: dict[str, str], seconds: float
) -> Storage:
    """Where a run's checkpoints are: ``checkpoint.url``, else below the run directory."""
    if config.url is not None:
        return open_storage(config.url, config.options, seconds)
    return open_storage(paths.join(run_url, paths.CHECKPOINTS), config.options or run_options, seconds)
