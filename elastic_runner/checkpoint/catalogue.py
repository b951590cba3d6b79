"""The checkpoints under a URL, for one that looks again and again: what cannot have changed is not asked for twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Checkpoint, Listing, Manifest, list_checkpoints
from elastic_runner.checkpoint.marks import marks_in
from elastic_runner.storage import Storage

Names = tuple[str, ...]


class Catalogue:
    """``list_checkpoints`` with a memory, of a manifest's content and of what lies in a step directory.

    A manifest is written once; who replaces or removes one by other means than ``prune`` must ``forget`` its step. Only
    imports (attempt 0) may be replaced by others, and are always read. Step directories below the newest committed
    step that hold nothing but committed data are not listed again: of marks that come later, who deletes takes heed
    anyway.
    """

    def __init__(self, storage: Storage) -> None:
        self.is_new = True
        """Whether nothing was listed yet."""
        self._storage = storage
        self._manifests: dict[str, Manifest] = {}
        self._directories: dict[str, Names] = {}

    def add(self, manifest: Manifest) -> None:
        """It was committed just now."""
        self.forget(manifest.step)
        self._manifests[manifest.path] = manifest

    def forget(self, step: int) -> None:
        """Something has changed in the directory of ``step``."""
        directory = paths.step_directory(step)
        self._directories.pop(directory, None)
        self._manifests = {path: m for path, m in self._manifests.items() if m.step != step}

    def list(self) -> Listing:
        """What ``list_checkpoints`` finds."""
        steps = [name for name in self._storage.list("") if paths.step_number(name) is not None]
        directories = {name: self._directories.get(name) or tuple(self._storage.list(name)) for name in steps}
        there = {f"{directory}/{name}" for directory, names in directories.items() for name in names}
        known = {path: manifest for path, manifest in self._manifests.items() if path in there}
        found = list_checkpoints(cast(Storage, _Unread(self._storage, directories, known)))
        remembered = [
            Checkpoint(manifest=m, marks=marks_in(d := paths.step_directory(m.step), directories[d], m.attempt))
            for m in known.values()
        ]
        checkpoints = sorted(
            [*found.checkpoints, *remembered], key=lambda c: (c.manifest.step, c.manifest.attempt), reverse=True
        )
        listing = Listing(checkpoints=tuple(checkpoints), rejected=found.rejected, directories=directories)
        self._remember(listing)
        self.is_new = False
        return listing

    def _remember(self, listing: Listing) -> None:
        self._manifests = {m.path: m for m in listing.manifests if m.attempt}
        newest = max((m.step for m in listing.manifests), default=0)
        self._directories = {
            directory: names
            for directory, names in listing.directories.items()
            if (paths.step_number(directory) or 0) < newest and self._settled(directory, names)
        }

    def _settled(self, directory: str, names: Names) -> bool:
        """Whether it holds committed data and their manifests, and nothing else."""
        committed = {a for name in names if (a := paths.manifest_attempt(name)) is not None}
        data = {a for name in names if (a := paths.data_attempt(name)) is not None}
        return (
            committed == data
            and len(names) == len(committed) + len(data)
            and all(paths.manifest(paths.step_number(directory) or 0, a) in self._manifests for a in committed)
        )


class _Unread:
    """The storage as it looks to ``list_checkpoints`` without the manifests that are ``known``."""

    def __init__(self, storage: Storage, directories: Mapping[str, Names], known: Mapping[str, Manifest]) -> None:
        self._storage = storage
        self._directories = directories
        self._known = known

    def list(self, path: str) -> list[str]:
        if not path:
            return list(self._directories)
        return [name for name in self._directories[path] if f"{path}/{name}" not in self._known]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)
