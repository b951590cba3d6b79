"""Checkpoints as a save leaves them, without a model: a manifest and a data file."""

from __future__ import annotations

from typing import Any

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Checkpoint, Manifest, encode
from elastic_runner.checkpoint.marks import Marks
from elastic_runner.storage import Storage


def manifest(step: int, attempt: int = 1, **changes: Any) -> Manifest:
    """Of no files."""
    return Manifest(**{"step": step, "attempt": attempt, "world_size": 1, "format": "full", "files": (), **changes})


def checkpoint(step: int, attempt: int = 1, *, marks: Marks | None = None, **changes: Any) -> Checkpoint:
    """Not on any storage."""
    return Checkpoint(manifest=manifest(step, attempt, **changes), marks=marks or Marks())


def write_data(storage: Storage, step: int, attempt: int = 1) -> str:
    """The data directory of a save that is not committed (yet)."""
    directory = paths.data_directory(step, attempt)
    with storage.writer(f"{directory}/full.pt") as stream:
        stream.write(b"x" * 1000)
    return directory


def commit(storage: Storage, step: int, attempt: int = 1, **changes: Any) -> Manifest:
    """A checkpoint of one data file."""
    directory = paths.data_directory(step, attempt)
    with storage.writer(f"{directory}/full.pt") as stream:
        stream.write(b"x" * 1000)
    written = stream.written(f"{directory.rpartition('/')[2]}/full.pt")
    made = manifest(step, attempt, files=(written,), **changes)
    storage.put(made.path, encode(made))
    return made
