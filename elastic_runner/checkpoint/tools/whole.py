"""A checkpoint that one process writes as a whole, from contents; who commits it writes the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from elastic_runner import paths
from elastic_runner.checkpoint.full import FILE
from elastic_runner.checkpoint.load import OPTIMIZER_GROUPS, OPTIMIZER_STATE
from elastic_runner.checkpoint.manifest import Manifest
from elastic_runner.checkpoint.saver import is_finite
from elastic_runner.checkpoint.tools.contents import MODEL, Contents
from elastic_runner.checkpoint.tools.written import Tick, write_full, write_sharded
from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage, Written


def write_files(
    storage: Storage,
    contents: Contents,
    *,
    step: int,
    attempt: int,
    world_size: int,
    format: Literal["sharded", "full"],
    metrics: Mapping[str, float],
    tick: Tick,
) -> Manifest:
    """Write the data files; returns the manifest that makes them a checkpoint, which is not written."""
    directory, root = paths.data_directory(step, attempt), paths.step_directory(step) + "/"
    watched = _Watched(tensors=contents.tensors, plain=contents.plain)
    files = _write(storage, directory, watched, format, tick)
    return Manifest(
        step=step,
        attempt=attempt,
        world_size=world_size,
        format=format,
        files=tuple(file.within(root) for file in files),
        metrics=dict(metrics),
        non_finite=tuple(watched.found),
    )


def _write(storage: Storage, directory: str, contents: Contents, format: str, tick: Tick) -> list[Written]:
    if format == "sharded":
        return write_sharded(storage, directory, contents, tick)
    path = f"{directory}/{FILE}"
    with storage.writer(path) as stream:
        write_full(stream, contents, tick)
    return [stream.written(path)]


@contextmanager
def given_up(storage: Storage, step: int, attempt: int) -> Iterator[None]:
    """After an error within, remove the data files, unless the manifest is there after all."""
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # what went wrong is the better reason
            names = storage.list(paths.step_directory(step))
            if not any(paths.manifest_attempt(name) == attempt for name in names):
                storage.delete(paths.data_directory(step, attempt))
        raise


@dataclass(frozen=True, kw_only=True)
class _Watched(Contents):
    """Contents that notice on the way what is trained and not finite, as a save does."""

    found: dict[str, None] = field(default_factory=dict)

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        values = super().rows(key, start, stop)
        if key in self.trained and not is_finite(values):
            self.found[key] = None
        return values

    @cached_property
    def trained(self) -> set[str]:
        """The optimizer's parameters and what it keeps of them; a foreign model's are not told from its buffers."""
        groups = self.plain.get(OPTIMIZER_GROUPS, [])
        parameters = {MODEL + name for group in groups for name in group["params"]}
        return parameters | {key for key in self.tensors if key.startswith(OPTIMIZER_STATE)}
