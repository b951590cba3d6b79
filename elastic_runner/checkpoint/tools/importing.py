"""Importing: what a file or directory holds becomes a committed checkpoint, of attempt 0.

Attempts of runs count from 1, so that whatever a run saves itself at the same step comes before what was imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from elastic_runner import paths
from elastic_runner.checkpoint.load import OPTIMIZER_GROUPS
from elastic_runner.checkpoint.manifest import Manifest, Torn, encode, list_checkpoints
from elastic_runner.checkpoint.marks import note
from elastic_runner.checkpoint.tools.contents import Contents
from elastic_runner.checkpoint.tools.opening import Opened
from elastic_runner.checkpoint.tools.overview import damage
from elastic_runner.checkpoint.tools.whole import given_up, write_files
from elastic_runner.checkpoint.tools.written import Bar, Tick, no_bar
from elastic_runner.errors import AlreadyExists, ConfigError, SaveFailed, StorageError
from elastic_runner.storage import Storage, open_storage

ATTEMPT = 0
"""No run's: those begin at 1."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint that was committed."""

    url: str
    """The checkpoint URL it is below."""
    step: int
    """Its step."""
    format: Literal["sharded", "full"]
    """Its layout."""
    tensors: int
    """How many."""
    size: int
    """Bytes."""
    weights_only: bool
    """Whether there is nothing but a model in it."""
    notes: tuple[str, ...]
    """What people should know of the file."""


def import_state(
    source: Opened,
    url: str,
    options: dict[str, str],
    *,
    step: int | None = None,
    format: Literal["sharded", "full"] = "sharded",
    model_only: bool = False,
    verify: bool = True,
    bar: Bar = no_bar,
) -> Imported:
    """Commit ``source`` as a checkpoint below ``url`` (a checkpoint URL or a run directory), the manifest last.

    Raises ConfigError where the step is taken, missing, or another than the state's own.
    """
    contents = source.contents.only_model() if model_only else source.contents
    weights_only = OPTIMIZER_GROUPS not in contents.plain
    step = _step(source, step, weights_only)
    storage = _checkpoints(url, options)
    with _claimed(storage, step):
        _require_free(storage, step)
        if verify:
            source.verify(bar)
        with bar("writing", contents.nbytes) as tick:
            manifest = _commit(storage, step, format, contents, source.manifest, tick)
    return Imported(
        url=storage.url,
        step=step,
        format=format,
        tensors=len(contents.tensors),
        size=manifest.size,
        weights_only=weights_only,
        notes=source.notes,
    )


@contextmanager
def _claimed(storage: Storage, step: int) -> Iterator[None]:
    """Keep other imports of this step away. Raises ConfigError when one is at it."""
    claim = paths.import_claim(step)
    try:
        storage.create(claim, note())
    except AlreadyExists:
        raise ConfigError(
            f"another import of step {step} is going on; if it was killed, delete {claim} below {storage.url}"
        ) from None
    try:
        yield
    finally:
        with suppress(StorageError):
            storage.delete(claim)


def _require_free(storage: Storage, step: int) -> None:
    """Raise ConfigError where something was committed as this step."""
    listing = list_checkpoints(storage)
    for manifest in listing.manifests:
        if manifest.step == step:
            by = "an earlier import" if manifest.attempt == ATTEMPT else f"attempt {manifest.attempt}"
            raise ConfigError(f"{storage.url} has a checkpoint of step {step} already, written by {by}")
    for rejected in listing.rejected:
        of_step, attempt = paths.committed(rejected.path) or (-1, -1)
        if of_step == step and not isinstance(rejected.error, Torn):
            raise ConfigError(f"{storage.url} has a checkpoint of step {step} already: {rejected.reason}")
        if of_step == step and attempt == ATTEMPT:
            storage.delete(rejected.path)  # what an import that was killed has left


def _commit(
    storage: Storage,
    step: int,
    format: Literal["sharded", "full"],
    contents: Contents,
    original: Manifest | None,
    tick: Tick,
) -> Manifest:
    """Write the data files and, last, the manifest; after an error nothing is left."""
    storage.delete(paths.data_directory(step, ATTEMPT))  # what an import that was killed has left
    with given_up(storage, step, ATTEMPT):
        manifest = write_files(
            storage,
            contents,
            step=step,
            attempt=ATTEMPT,
            world_size=1,
            format=format,
            metrics=original.metrics if original else {},
            tick=tick,
        )
        storage.create(manifest.path, encode(manifest))
        _check_there(storage, manifest)
    return manifest


def _step(source: Opened, step: int | None, weights_only: bool) -> int:
    if step is None and source.step is None:
        raise ConfigError(f"{source.where} does not say of which step it is; give one, such as --step 0")
    if step is None:
        assert source.step is not None
        return source.step
    if not weights_only and source.step is not None and step != source.step:
        raise ConfigError(
            f"{source.where} is the state of step {source.step}: leave --step out, "
            f"or take its weights alone with --model-only --step {step}"
        )
    return step


def _checkpoints(url: str, options: dict[str, str]) -> Storage:
    """Where checkpoints go: ``url`` itself, or below it when it is a run directory."""
    storage = open_storage(url, options)
    if {paths.CHECKPOINTS, paths.ATTEMPTS, paths.SUMMARY} & set(storage.list("")):
        return open_storage(paths.join(url, paths.CHECKPOINTS), options)
    return storage


def _check_there(storage: Storage, manifest: Manifest) -> None:
    """A run that is going on may have swept the files before the manifest was there, as those of a dead attempt."""
    if missing := damage(storage, manifest, digests=False):
        storage.delete(manifest.path)
        raise SaveFailed(f"{missing}: a run that saves there has removed it; import while none is going on")
