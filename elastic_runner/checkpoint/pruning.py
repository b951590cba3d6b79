"""Deletes checkpoints that no policy keeps, and what saves that were never committed have left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from elastic_runner import paths
from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.manifest import Checkpoint, Listing, Manifest, encode
from elastic_runner.checkpoint.marks import marks_in, read_marks
from elastic_runner.checkpoint.retention import Retention, decide
from elastic_runner.errors import StorageError, StorageTimeout
from elastic_runner.storage import Storage, abort_old_uploads

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to go and why the rest stays."""

    delete: tuple[tuple[Checkpoint, str], ...]
    """Checkpoints that go, oldest first, each with the reason."""
    keep: dict[str, str]
    """Paths of the manifests that stay, newest first, each with the reasons."""
    sweep: tuple[str, ...]
    """Data directories of saves that can never be committed any more."""
    empty: tuple[str, ...] = ()
    """Step directories that then hold no save at all."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was done."""

    deleted: tuple[str, ...]
    """Paths of the manifests that went."""
    swept: tuple[str, ...]
    """Data directories of uncommitted saves that went."""
    kept: dict[str, str]
    """Paths of the manifests that stay, newest first, each with the reasons."""
    trouble: tuple[str, ...]
    """What could not be done."""


def prune(
    storage: Storage,
    retention: Retention,
    newest: Manifest,
    attempt: int,
    unusable: Collection[str] = (),
    catalogue: Catalogue | None = None,
) -> Pruned:
    """Clean up after ``newest`` was committed by ``attempt``. Trouble is logged and returned, never raised.

    ``catalogue``: one of ``storage``, kept from one call to the next. The first call with it also looks for uploads
    that killed processes have left.
    """
    try:
        if catalogue is not None and catalogue.is_new:
            abort_old_uploads(storage)
        catalogue = catalogue or Catalogue(storage)
        catalogue.add(newest)
        plan = plan_pruning(catalogue.list(), retention, newest, attempt, unusable)
        for path in (*(checkpoint.manifest.path for checkpoint, _ in plan.delete), *plan.sweep, *plan.empty):
            catalogue.forget(paths.step_number(path.partition("/")[0]) or 0)
        return carry_out(storage, plan)
    except Exception as error:  # what is committed stays so
        log.warning("old checkpoints could not be looked for: %s", error, exc_info=not isinstance(error, StorageError))
        return Pruned(deleted=(), swept=(), kept={}, trouble=(str(error),))


def plan_pruning(
    listing: Listing, retention: Retention, newest: Manifest, attempt: int, unusable: Collection[str] = ()
) -> Plan:
    """Decide; nothing is read or changed. ``attempt``: those before it are fenced and commit nothing any more."""
    now = time.time()
    decision = decide(listing.checkpoints, retention, newest=newest, unusable=unusable, now=now)
    by_path = {checkpoint.manifest.path: checkpoint for checkpoint in listing.checkpoints}
    oldest = min((manifest.step for manifest in listing.manifests), default=0)
    sweep, empty = [], []
    for directory, names in listing.directories.items():
        step = paths.step_number(directory) or 0
        uncommitted = _uncommitted(names)
        gone = set()
        for owner, name in uncommitted.items():
            # This attempt saves one step after the other: below what is committed it writes nothing.
            # An import (attempt 0) belongs to no attempt, and may be going on.
            dead = 0 < owner < attempt or (owner == attempt and step < oldest)
            if dead and not marks_in(directory, names, owner).being_read(now):
                gone.add(name)
        sweep += [f"{directory}/{name}" for name in sorted(gone)]
        # A step yet to come may be in the making.
        over = step < oldest or (gone and step <= newest.step)
        if over and not any(_is_of_a_save(name) for name in names if name not in gone):
            empty.append(directory)
    return Plan(
        delete=tuple((by_path[path], why) for path, why in decision.delete.items()),
        keep=decision.keep,
        sweep=tuple(sweep),
        empty=tuple(empty),
    )


def carry_out(storage: Storage, plan: Plan) -> Pruned:
    """Do what is planned, step by step; what fails does not keep the rest from being done."""
    deleted: list[str] = []
    swept: list[str] = []
    kept = dict(plan.keep)

    def delete(checkpoint: Checkpoint) -> None:
        path = checkpoint.manifest.path
        if reason := _delete(storage, checkpoint.manifest):
            kept[path] = reason
        else:
            deleted.append(path)

    def sweep(directory: str) -> None:
        storage.delete(directory)
        swept.append(directory)

    actions: list[Callable[[], object]] = [partial(delete, checkpoint) for checkpoint, _ in plan.delete]
    actions += [partial(sweep, directory) for directory in plan.sweep]
    actions += [partial(_tidy, storage, directory) for directory in plan.empty]
    trouble = _all(actions)
    if trouble:
        log.warning("old checkpoints could not be deleted: %s", "; ".join(trouble))
    return Pruned(deleted=tuple(deleted), swept=tuple(swept), kept=kept, trouble=tuple(trouble))


def _all(actions: Collection[Callable[[], object]]) -> list[str]:
    trouble: list[str] = []
    for action in actions:
        try:
            action()
        except StorageTimeout as error:
            return [*trouble, str(error)]  # each of the others would wait as long
        except StorageError as error:
            trouble.append(str(error))
    return trouble


def _delete(storage: Storage, manifest: Manifest) -> str:
    """Delete a checkpoint; or say why it is left: somebody has pinned it or begun to read it since it was listed."""
    if reason := _wanted(storage, manifest):
        return reason
    storage.delete(manifest.path)  # first, so that no half-deleted one counts
    # Who pins or reads puts its mark and then looks for the manifest. One of us two sees the other.
    if reason := _wanted(storage, manifest):
        storage.put(manifest.path, encode(manifest))
        return reason
    storage.delete(paths.data_directory(manifest.step, manifest.attempt))
    directory = paths.step_directory(manifest.step)
    for name in storage.list(directory) if not _tidy(storage, directory) else ():
        mark = paths.mark(name)
        if mark is not None and mark.attempt == manifest.attempt:
            storage.delete(f"{directory}/{name}")
    return ""


def _wanted(storage: Storage, manifest: Manifest) -> str:
    marks = read_marks(storage, manifest)
    return "pinned" if marks.pinned else "being read" if marks.being_read(time.time()) else ""


def _tidy(storage: Storage, directory: str) -> bool:
    """Delete a step directory without any save in it."""
    if any(_is_of_a_save(name) for name in storage.list(directory)):
        return False
    storage.delete(directory)
    return True


def _is_of_a_save(name: str) -> bool:
    return paths.manifest_attempt(name) is not None or paths.data_attempt(name) is not None


def _uncommitted(names: Collection[str]) -> dict[int, str]:
    """Data directories by attempt, without those that have a manifest: also a damaged one was committed once, and is
    left for people to look at."""
    committed = {paths.manifest_attempt(name) for name in names}
    data = {owner: name for name in names if (owner := paths.data_attempt(name)) is not None}
    return {owner: name for owner, name in data.items() if owner not in committed}
