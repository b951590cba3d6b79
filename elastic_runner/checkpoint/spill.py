"""Spill: a directory on each node where a save goes that the storage did not take, until it does.

It has the layout of a checkpoint URL, with those data files only that its node wrote, and the manifest of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Listing, Manifest, create_fenced, encode, list_checkpoints
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import AlreadyExists, StorageError
from elastic_runner.storage import LocalStorage, Storage

log = logging.getLogger(__name__)

Held = Mapping[str, tuple[Manifest, frozenset[str]]]
"""By path of the manifest: what was spilled, and the files of it that a node has."""


class Spill:
    """The spill directory as one rank sees it: a part of ``directory`` for checkpoints meant for ``target`` only.

    ``moved``: called as bytes move.
    """

    def __init__(self, directory: str, target: Storage, moved: Callable[[], None] = lambda: None) -> None:
        own = Path(directory) / xxhash.xxh3_64_hexdigest(target.url.encode())
        self.storage: Storage = LocalStorage(own, moved=moved)

    def keep(self, manifest: Manifest) -> None:
        """Add the manifest to what this rank has written here. On every rank."""
        with suppress(AlreadyExists):  # by another rank of this node
            self.storage.create(manifest.path, encode(manifest))

    def clear(self, newest: int) -> None:
        """Forget what is not younger than a committed step. Trouble is only reported."""
        try:
            for name in self.storage.list(""):
                if (step := paths.step_number(name)) is not None and step <= newest:
                    self.storage.delete(name)
        except StorageError as error:
            log.warning("spilled checkpoints could not be deleted: %s", error)

    def held(self) -> Held:
        """What lies here."""
        found = {}
        for manifest in list_checkpoints(self.storage).manifests:
            there = frozenset(f.path for f in manifest.files if self._has(manifest, f.path, f.size))
            found[manifest.path] = (manifest, there)
        return found

    def _has(self, manifest: Manifest, path: str, size: int) -> bool:
        with suppress(StorageError):
            return self.storage.size(f"{paths.step_directory(manifest.step)}/{path}") == size
        return False


def newest_whole(held: Sequence[Held], committed: int) -> tuple[Manifest, dict[str, int]] | None:
    """The newest spilled checkpoint beyond step ``committed`` of which the nodes have every file, and which rank is to
    bring which file. ``held`` by rank. Pure.
    """
    manifests = {path: manifest for of_rank in held for path, (manifest, _) in of_rank.items()}
    for manifest in sorted(manifests.values(), key=lambda m: (m.step, m.attempt), reverse=True):
        if manifest.step <= committed:
            return None
        holders = {
            file: rank
            for rank in reversed(range(len(held)))
            if manifest.path in held[rank]
            for file in held[rank][manifest.path][1]
        }
        if all(file.path in holders for file in manifest.files):
            return manifest, holders
    return None


def _newest_step(listing: Listing) -> int:
    """Also of what cannot be read: it was committed."""
    rejected = [committed[0] for r in listing.rejected if (committed := paths.committed(r.path)) is not None]
    return max([*(m.step for m in listing.manifests), *rejected], default=0)


def bring_back(
    spill: Spill, storage: Storage, coordinator: Coordinator, check_fence: Callable[[], None]
) -> Manifest | None:
    """Upload and commit the newest spilled checkpoint, if it is newer than all that is committed. Collective.

    Trouble with the storage is only reported: what is committed may still be read.
    """
    held = coordinator.agree("restore: spilled", spill.held)
    if not any(held):
        return None
    committed = coordinator.once("restore: committed", lambda: _newest_step(list_checkpoints(storage)))
    found = newest_whole(held, committed)
    if found is None:
        return None
    manifest, holders = found

    def upload() -> None:
        for file, rank in holders.items():
            if rank == coordinator.rank:
                path = f"{paths.step_directory(manifest.step)}/{file}"
                with spill.storage.local_copy(path) as local:
                    storage.put_file(path, local)

    try:
        coordinator.agree("restore: upload", upload)
        coordinator.once("restore: commit", lambda: create_fenced(storage, manifest, check_fence))
    except StorageError as error:
        if coordinator.is_main:
            log.warning("step %d stays spilled in %s: %s", manifest.step, spill.storage.url, error)
        return None
    if coordinator.is_main:
        log.warning("step %d, spilled to %s when it could not be saved, is committed", manifest.step, spill.storage.url)
    return manifest
