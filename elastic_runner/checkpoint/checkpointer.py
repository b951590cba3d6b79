"""Checkpointer: when to save, how a save is committed, which checkpoint to restore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from elastic_runner import paths
from elastic_runner.checkpoint.capture import Captured, Parts, capture
from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.commit import Commit
from elastic_runner.checkpoint.full import FullSaver
from elastic_runner.checkpoint.load import Loader
from elastic_runner.checkpoint.manifest import Manifest, Rejected, Torn, check_file, list_checkpoints
from elastic_runner.checkpoint.marks import mark_suspect, reading, reasons
from elastic_runner.checkpoint.matching import Lenience
from elastic_runner.checkpoint.place import CheckpointPlace, FinishedStep, checkpoint_url, keep_of
from elastic_runner.checkpoint.saver import Saver
from elastic_runner.checkpoint.sharded import ShardedSaver
from elastic_runner.checkpoint.snapshot_source import Offer, SnapshotSource
from elastic_runner.checkpoint.snapshots import Report
from elastic_runner.checkpoint.source import open_source
from elastic_runner.checkpoint.spill import Spill, bring_back
from elastic_runner.checkpoint.trust import Candidate, Health, candidates
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import Damaged, LoopError, NoUsableCheckpoint, SaveFailed, StorageError
from elastic_runner.storage import Storage, creates_exclusively, open_storage

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores ``parts`` (a TrainState).

    ``storage``: where; by default what the configuration says. (Its ``moved`` should be the worker's
    ``checkpoint_coordinator.moved``: without it a slow save is taken for one that stands still.) Every method is
    collective: call it on every rank. An error on any rank is raised on every rank.
    """

    def __init__(
        self, config: CheckpointConfig, parts: Parts, worker: CheckpointPlace, *, storage: Storage | None = None
    ) -> None:
        self._config = config
        self._parts = parts
        self._worker = worker
        self._coordinator = worker.checkpoint_coordinator
        self._storage = storage or checkpoint_storage(
            config, run_url=worker.run_url, run_options=worker.storage_options, seconds=worker.storage_timeout,
            moved=self._coordinator.moved,
        )  # fmt: skip
        self._saver: Saver = (
            FullSaver(main=self._coordinator.is_main)
            if config.format == "full"
            else ShardedSaver(worker.device, shared=not self._storage.takes_memory)
        )
        self._unusable: set[str] = set()
        self._spill = Spill(config.spill, self._storage, self._coordinator.moved) if config.spill is not None else None
        self._commit = Commit(config, self._spill, worker, self._unusable, Catalogue(self._storage))
        self._in_flight: int | None = None
        self._saved_step: int | None = None
        self._failures = 0
        self._origin: str | None = None
        """The newest durable checkpoint behind the state."""
        self._keep = None if storage is not None else keep_of(config, worker)

    def maybe_save(self, step: FinishedStep, metrics: Mapping[str, float] | None = None) -> bool:
        """Save when ``step`` is due, is the last one, or the run is draining. Returns whether it saves.

        Call it at the end of every step: each is copied to the node's memory, too, where there is one (``snapshot``).
        The step waits for one copy only (``checkpoint.mode``); the last save is waited for. A save that fails is
        reported, and training goes on until ``checkpoint.failures_allowed`` are used up; then, and when the last one
        fails, SaveFailed is raised. ``metrics``: results of an evaluation of this state, by which
        ``checkpoint.keep_best`` chooses.
        """
        last = step.is_last or step.draining
        if step.save_ended:
            self._settle(judge=not last)
        self._keep_in_memory()
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
        """Restore the newest usable state and return its step; 0 when there is none and the run starts fresh.

        That is a snapshot in the memory of the nodes where all ranks can get a newer one there, else a checkpoint.
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
            if (step := self._try_all(chosen, loader, refused)) is not None:
                return step
            _require_none({said: one for said, one in refused.items() if not isinstance(one, Torn)}, self._storage)
            self._worker.snapshots.clear()
        self._say("no checkpoint yet: starting from step 0")
        return 0

    def _try_all(
        self, chosen: Sequence[Candidate], loader: Loader, refused: dict[str, Damaged | StorageError]
    ) -> int | None:
        """Restore the first that can be: a snapshot that is newer than the healthy checkpoint in turn, or that."""
        distrusted = self._coordinator.once("restore: distrusted", self._worker.distrusted)
        turns = [(c.manifest.step if c.health == Health.HEALTHY else -1, c) for c in chosen]
        asked: int | None = None
        for newer_than, candidate in [*turns, (-1, None)]:
            if newer_than != asked and (step := self._restore_from_memory(newer_than, distrusted, loader)) is not None:
                return step
            asked = newer_than
            if candidate is None:
                break
            manifest = candidate.manifest
            error = self._try(manifest, loader)
            if error is None:
                self._went_back(candidate)
                return manifest.step
            said = f"step {manifest.step}: {'' if isinstance(error, Damaged) else 'cannot be read: '}{error}"
            refused[said] = error
            self._warn(f"checkpoint not used: {said}")
        return None

    def _went_back(self, candidate: Candidate) -> None:
        manifest = candidate.manifest
        doubt = f"; for want of a better one: {candidate.doubt}" if candidate.doubt else ""
        self._say(f"restored step {manifest.step} ({manifest.format}, by {manifest.world_size} ranks{doubt})")
        self._parts.step = self._saved_step = manifest.step
        self._origin = manifest.path
        self._worker.restored(manifest.path, attempt=manifest.attempt, step=manifest.step)
        self._worker.snapshots.clear()  # they are of a course that the run does not take

    def _restore_from_memory(self, newer_than: int, distrusted: int, loader: Loader) -> int | None:
        """Restore the newest snapshot that is newer than this step, and return its step."""
        for offer in self._worker.snapshots.find(newer_than=newer_than, trusted_after=distrusted):
            source = SnapshotSource(offer, self._coordinator)
            try:
                loader.load(source)
            except (Damaged, OSError) as error:
                self._warn(f"snapshot not used: step {offer.head.step}: {error}")
                continue
            finally:
                source.close()
            self._went_on(offer)
            return offer.head.step
        return None

    def _went_on(self, offer: Offer) -> None:
        head = offer.head
        self._say(f"restored step {head.step} from memory (by {head.world_size} ranks, attempt {head.attempt})")
        self._parts.step, self._saved_step, self._origin = head.step, None, head.origin
        self._worker.restored(head.origin, attempt=head.attempt, step=head.step, in_memory=True)
        self._worker.snapshots.went_on(head)
        self._coordinator.once("restore: ledger", lambda: self._worker.recovered(offer.lines))
        if head.step % self._config.every == 0 or head.step >= self._worker.target:
            self._begin({}, wait=False)  # it was due when the attempt ended

    def _keep_in_memory(self, *, forced: bool = False) -> None:
        phase = self._worker.phase("save")
        self._worker.snapshots.take(self._parts, phase, origin=self._origin, keep=self._keep, forced=forced)

    def _keep_in_memory_anew(self, step: int) -> None:
        """Now that all know that the state has another shape."""
        self._keep_in_memory(forced=True)
        snapshots = self._worker.snapshots
        snapshots.hear(self._worker.coordinator.gather(f"snapshot of step {step}", snapshots.report()), step)

    def _begin(self, metrics: Mapping[str, float], *, wait: bool) -> None:
        """Copy the state and start writing it; with ``wait``, writing begins while the copy is made."""
        step = self._parts.step
        if step in (self._saved_step, self._in_flight):
            return
        if self._worker.background.busy and self._in_flight is None:
            raise LoopError("another Checkpointer of this worker is saving: use one, and give it the whole state")
        numbers = _numbers(metrics)
        # First: what is on record must not be younger than a checkpoint, nor younger than what a kill leaves.
        self._keep_in_memory(forced=True)
        with self._worker.phase("save"):
            # In the group of the steps: a rank that went on to its next step meets this here, and both say so.
            captured, fits, reports = self._capture(f"save of step {step}")
            if not self._worker.snapshots.hear(reports, step):
                self._keep_in_memory_anew(step)
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
        self._origin = None if step is None else paths.manifest(step, self._worker.attempt)

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

    def _capture(self, label: str) -> tuple[Captured, bool, list[Report]]:
        """This rank's state, whether the buffers fit it on all ranks, and what all say of their snapshots.

        An error in it is everybody's.
        """
        taken: list[Captured] = []

        def take() -> tuple[bool, Report]:
            captured = capture(self._parts)
            taken.append(captured if self._coordinator.is_main else captured.only_shared())
            return self._saver.fits(taken[0]), self._worker.snapshots.report()

        said = self._worker.coordinator.agree(label, take)
        return taken[0], all(fits for fits, _ in said), [report for _, report in said]

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
    config: CheckpointConfig, *, run_url: str, run_options: dict[str, str], seconds: float,
    moved: Callable[[], None] = lambda: None,
) -> Storage:  # fmt: skip
    """Where a run's checkpoints are: ``checkpoint.url``, else below the run directory."""
    return open_storage(*checkpoint_url(config, run_url, run_options), seconds, moved)
