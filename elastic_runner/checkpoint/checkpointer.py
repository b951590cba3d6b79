"""Checkpointer: when to save, how a save is committed, which checkpoint to restore."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed.checkpoint as dcp

from elastic_runner import paths
from elastic_runner.checkpoint.capture import Captured, Parts, capture
from elastic_runner.checkpoint.full import FullReader, gather_full, write_full
from elastic_runner.checkpoint.load import load_into, mapped_dcp
from elastic_runner.checkpoint.manifest import Manifest, check_file, encode, list_checkpoints
from elastic_runner.checkpoint.matching import Lenience
from elastic_runner.checkpoint.reader import Reader
from elastic_runner.checkpoint.retention import superseded
from elastic_runner.checkpoint.sharded import ShardedReader, ShardedWriter
from elastic_runner.config import CheckpointConfig
from elastic_runner.coordination import Place
from elastic_runner.errors import (
    CheckpointError,
    Damaged,
    Fenced,
    NoUsableCheckpoint,
    SaveFailed,
    StorageError,
)
from elastic_runner.storage import Storage, Written, open_storage

log = logging.getLogger(__name__)


class CheckpointPlace(Place, Protocol):
    """What a checkpointer needs of its worker."""

    run_url: str
    """The run directory."""
    storage_options: dict[str, str]
    """Options of the run directory's filesystem."""
    storage_timeout: float
    """Deadline of a storage operation, seconds."""

    def check_fence(self) -> None:
        """Raise Fenced when a newer attempt owns the run."""
        ...

    def prepare_save(self, parts: Parts) -> None:
        """Make replicated buffers equal on all ranks."""
        ...

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed."""
        ...


class FinishedStep(Protocol):
    """A step after ``optimize``."""

    number: int
    """Its number, from 1."""
    is_last: bool
    """Whether it is the run's last one."""
    draining: bool
    """Whether all ranks have agreed to stop after it."""


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
        self._saved_step: int | None = None
        self._unusable: set[str] = set()

    def maybe_save(self, step: FinishedStep) -> bool:
        """Save when ``step`` is due, is the last one, or the run is draining. Returns whether it saved."""
        if step.number % self._config.every and not step.is_last and not step.draining:
            return False
        self.save()
        return True

    def save(self) -> None:
        """Save the state after the last finished step. Raises SaveFailed on every rank when any rank fails."""
        step = self._parts.step
        if self._saved_step == step:
            return
        with self._worker.phase("save"), _as_save_failed(step):
            self._worker.prepare_save(self._parts)
            captured = self._capture(f"save: capture step {step}")
            files = self._write(captured, paths.data_directory(step, self._worker.attempt))
            self._coordinator.once("save: commit", lambda: self._commit(step, files))
        self._saved_step = step
        self._worker.saved(step)

    def restore(self) -> int:
        """Restore the newest usable checkpoint and return its step; 0 when there is none and the run starts fresh.

        Raises Mismatch when the checkpoint does not fit the model, NoUsableCheckpoint when there are checkpoints
        but each is damaged; AccessDenied or StateError when no checkpoint could be saved later.
        """
        with self._worker.phase("load"):
            # What would make the first save fail shall not wait for it.
            self._coordinator.agree("restore: probe", self._probe)
            self._capture("restore: capture")
            listing = self._coordinator.once("restore: list", lambda: list_checkpoints(self._storage))
            rejected = list(listing.rejected)
            for manifest in listing.manifests:
                reason = self._verify(manifest) or self._load(manifest)
                if reason is None:
                    self._parts.step = self._saved_step = manifest.step
                    self._say(f"restored step {manifest.step} ({manifest.format}, by {manifest.world_size} ranks)")
                    return manifest.step
                rejected.append(f"step {manifest.step}: {reason}")
                self._unusable.add(manifest.path)
                self._warn(f"checkpoint not used: {rejected[-1]}")
        if rejected:
            raise NoUsableCheckpoint(
                f"no checkpoint under {self._storage.url} can be used: {'; '.join(rejected)}. "
                "Repair one, or remove them all to start from step 0."
            )
        self._say("no checkpoint yet: starting from step 0")
        return 0

    def _capture(self, label: str) -> Captured:
        """This rank's state; an error in it is everybody's. Only that it went well travels, not the tensors."""
        captured: list[Captured] = []
        self._coordinator.agree(label, lambda: captured.append(capture(self._parts)))
        return captured[0]

    def _probe(self) -> None:
        name = f"probe-{self._worker.attempt:06d}-{self._coordinator.rank}"
        self._storage.put(name, b"can this rank write here?")
        self._storage.delete(name)

    def _write(self, captured: Captured, directory: str) -> list[Written]:
        if self._config.format == "full":
            whole = gather_full(captured, keep=self._coordinator.is_main)
            return self._coordinator.once(
                "save: write full", lambda: write_full(self._storage, directory, captured, whole)
            )
        writer = ShardedWriter(self._storage, directory)
        if not self._coordinator.is_main:
            captured = captured.only_shared()
        with mapped_dcp("save: write"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.save(
                {**captured.tensors, **captured.plain},
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._coordinator.group,
            )
        return [file for part in self._coordinator.gather("save: files", writer.files) for file in part]

    def _commit(self, step: int, files: list[Written]) -> None:
        root = paths.step_directory(step) + "/"
        manifest = Manifest(
            step=step,
            attempt=self._worker.attempt,
            world_size=self._coordinator.world_size,
            format=self._config.format,
            files=tuple(Written(path=f.path.removeprefix(root), size=f.size, digest=f.digest) for f in files),
        )
        self._worker.check_fence()
        self._storage.create(manifest.path, encode(manifest))
        log.info("saved step %d (%.1f MB)", step, manifest.size / 1e6)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Delete what is superseded; trouble here is reported, since the save itself is durable."""
        try:
            manifests = list_checkpoints(self._storage).manifests
            for step in superseded(manifests, keep=self._config.keep, newest=newest, unusable=self._unusable):
                for manifest in manifests:
                    if manifest.step == step:
                        self._storage.delete(manifest.path)  # first, so that no half-deleted one counts
                self._storage.delete(paths.step_directory(step))
            self._sweep({manifest.step for manifest in manifests})
        except StorageError as error:
            log.warning("old checkpoints could not be deleted: %s", error)

    def _sweep(self, committed: set[int]) -> None:
        """Delete what saves that were never committed have left, below the oldest committed step."""
        for name in self._storage.list(""):
            step = paths.step_number(name)
            if step is None or step >= min(committed):
                continue
            # One with a manifest, also a damaged one, was committed once and is left for people to look at.
            if not any(paths.manifest_attempt(file) is not None for file in self._storage.list(name)):
                self._storage.delete(name)

    def _verify(self, manifest: Manifest) -> str | None:
        """Check the files, shared out among the ranks; the first reason found, agreed by all."""
        rank, world = self._coordinator.rank, self._coordinator.world_size
        digests = self._config.verify == "digests"

        def check() -> str | None:
            for file in manifest.files[rank::world]:
                if reason := check_file(self._storage, manifest, file, digests=digests):
                    return reason
            return None

        reasons = self._coordinator.agree("restore: verify", check)
        return next((reason for reason in reasons if reason), None)

    def _load(self, manifest: Manifest) -> str | None:
        lenience = Lenience(allow_missing=self._config.allow_missing, allow_extra=self._config.allow_extra)
        reader = open_reader(self._storage, manifest)
        try:
            load_into(self._parts, reader, self._coordinator, lenience)
        except Damaged as error:
            return str(error)
        finally:
            reader.close()
        return None

    def _say(self, message: str) -> None:
        if self._coordinator.is_main:
            log.info(message)

    def _warn(self, message: str) -> None:
        if self._coordinator.is_main:
            log.warning(message)


def checkpoint_storage(
    config: CheckpointConfig, *, run_url: str, run_options: dict[str, str], seconds: float
) -> Storage:
    """Where a run's checkpoints are: ``checkpoint.url``, else below the run directory."""
    if config.url is not None:
        return open_storage(config.url, config.options, seconds)
    return open_storage(paths.join(run_url, paths.CHECKPOINTS), config.options or run_options, seconds)


def open_reader(storage: Storage, manifest: Manifest) -> Reader:
    """The reader for a checkpoint's format."""
    directory = paths.data_directory(manifest.step, manifest.attempt)
    return FullReader(storage, directory) if manifest.format == "full" else ShardedReader(storage, directory)


@contextmanager
def _as_save_failed(step: int) -> Iterator[None]:
    try:
        yield
    except (StorageError, CheckpointError) as error:
        # Fenced, a full disk and the like say more, and a later save would not go better.
        if not error.restartable or isinstance(error, (SaveFailed, Fenced)):
            raise
        raise SaveFailed(f"step {step} was not saved: {error}") from error
