"""Exporting: a state as one safetensors file, as a stock torch.save file, or as a stock DCP directory.

A file gets its name once it is whole; a DCP directory gets ``.metadata``, without which it is none, last.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from elastic_runner.checkpoint.metadata import METADATA
from elastic_runner.checkpoint.tools.contents import BAND_BYTES
from elastic_runner.checkpoint.tools.opening import Opened, beside
from elastic_runner.checkpoint.tools.safetensors import write_safetensors
from elastic_runner.checkpoint.tools.written import Bar, Tick, no_bar, write_full, write_sharded
from elastic_runner.errors import ConfigError, Damaged, NotFound, StorageError
from elastic_runner.storage import LocalStorage, Storage, Written, open_storage
from elastic_runner.storage.faults import mapped
from elastic_runner.storage.protocol import DigestWriter

Target = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    destination: str
    """Where."""
    to: Target
    """What it is."""
    step: int | None
    """The step of its state."""
    tensors: int
    """How many."""
    size: int
    """Bytes of all files."""
    files: tuple[Written, ...]
    """Each with its digest (xxh3-128)."""


def export(
    source: Opened,
    destination: str,
    options: dict[str, str],
    *,
    to: Target,
    model_only: bool = False,
    verify: bool = True,
    force: bool = False,
    bar: Bar = no_bar,
) -> Exported:
    """Write ``source`` to ``destination``. Raises ConfigError when something is there and ``force`` is not given.

    ``verify``: raise Damaged when the source's bytes are not those that were written.
    """
    contents = source.contents.only_model() if model_only else source.contents
    # The data of these are in that layout already; what is copied is compared on the way.
    as_it_is = (source.kind, to) in (("sharded", "dcp"), ("full", "torch")) and not model_only
    if verify and not as_it_is:
        source.verify(bar)
    storage, name = (open_storage(destination, options), "") if to == "dcp" else beside(destination, options)
    with ExitStack() as stack:
        if to == "dcp":
            stack.enter_context(_whole_directory(storage, destination, force))
        else:
            check_free(storage, name, destination, force)
        tick = stack.enter_context(bar("writing", contents.nbytes))
        if as_it_is:
            files = _copy_all(source, storage, name, tick, verify)
        elif to == "dcp":
            files = write_sharded(storage, "", contents, tick)
        else:
            with whole_file(storage, name) as stream:
                if to == "safetensors":
                    write_safetensors(stream, contents, source.step, tick)
                else:
                    write_full(stream, contents, tick)
            files = [stream.written(name)]
    return Exported(
        destination=destination,
        to=to,
        step=source.step,
        tensors=len(contents.tensors),
        size=sum(file.size for file in files),
        files=tuple(files),
    )


def check_free(storage: Storage, name: str, destination: str, force: bool) -> None:
    """Raise ConfigError when a file or directory is in the way."""
    if storage.list(name):
        raise ConfigError(f"{destination} is a directory; name a file in it")
    with suppress(NotFound):
        storage.size(name)
        if not force:
            raise ConfigError(f"{destination} exists; --force replaces it")


@contextmanager
def whole_file(storage: Storage, name: str) -> Iterator[DigestWriter]:
    """Stream to a file that has its name only when all of it is there."""
    if not isinstance(storage, LocalStorage):
        with storage.writer(name) as stream:
            yield stream
        return
    temporary = f".tmp-{uuid.uuid4().hex}"
    try:
        with storage.writer(temporary) as stream:
            yield stream
        with mapped(f"write {storage.root / name}"):
            (storage.root / temporary).replace(storage.root / name)
        storage.sync(name)
    finally:
        storage.delete(temporary)


@contextmanager
def _whole_directory(storage: Storage, destination: str, force: bool) -> Iterator[None]:
    """A directory for a DCP checkpoint, empty again after an error."""
    names = storage.list("")
    if names and METADATA not in names:
        raise ConfigError(f"{destination} holds something that is no DCP checkpoint; name a directory of its own")
    if names and not force:
        raise ConfigError(f"{destination} exists; --force replaces it")
    _clear(storage)
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # what went wrong first is the better reason
            _clear(storage)
        raise


def _clear(storage: Storage) -> None:
    """Remove a DCP checkpoint; what makes it one, first."""
    storage.delete(METADATA)
    for name in storage.list(""):
        if name.endswith(".distcp"):
            storage.delete(name)


def _copy_all(source: Opened, storage: Storage, name: str, tick: Tick, verify: bool) -> list[Written]:
    """Copy a checkpoint's files as they are; ``name``: of the one file. Raises Damaged."""
    assert source.manifest is not None
    written: list[Written] = []
    for file in sorted(source.manifest.files, key=lambda file: file.path.endswith(METADATA)):
        own = file.path.rpartition("/")[2]
        with whole_file(storage, name or own) as stream:
            for data in _blocks(source.storage, f"{source.directory}/{own}"):
                stream.write(data)
                tick(len(data))
            copied = stream.written(name or own)
            if verify and (copied.size, copied.digest) != (file.size, file.digest):
                raise Damaged(f"{source.where} is damaged: {own} has other bytes than were written")
        written.append(copied)
    return written


def _blocks(storage: Storage, path: str) -> Iterator[bytes]:
    size = storage.size(path)
    for offset in range(0, size, BAND_BYTES):
        yield storage.read_range(path, offset, min(BAND_BYTES, size - offset))
