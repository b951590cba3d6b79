"""Marks: small files beside a manifest that say of one checkpoint that it is pinned, suspect, or being read.

Their names say all that decisions need, so that the listing finds them without reading one. A mark never deletes
anything; it goes when its checkpoint goes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_runner import paths
from elastic_runner.errors import AlreadyExists, NotFound, StorageError
from elastic_runner.storage import Storage

log = logging.getLogger(__name__)

LEASE_SECONDS = 6 * 3600
"""How long a lease counts: the reader may be dead. Far above what clocks differ by."""


class Committed(Protocol):
    """What a mark belongs to: one manifest."""

    @property
    def step(self) -> int:
        """Its step."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        ...

    @property
    def path(self) -> str:
        """Where it is kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What was said of one checkpoint, by the names of files alone."""

    pinned: bool = False
    """Whether it stays whatever the policies say."""
    suspicions: tuple[str, ...] = ()
    """Paths of the files that say why it is distrusted; ``reasons`` reads them."""
    readers: tuple[float, ...] = ()
    """Since when each reader has been at it, seconds since the epoch."""

    @property
    def suspect(self) -> bool:
        """Whether anybody distrusts it."""
        return bool(self.suspicions)

    def being_read(self, now: float) -> bool:
        """Whether a lease still counts. One from the future does as well, within reason: clocks differ."""
        return any(abs(now - since) < LEASE_SECONDS for since in self.readers)


def marks_in(directory: str, names: Iterable[str], attempt: int) -> Marks:
    """The marks of ``attempt``'s checkpoint among the ``names`` in a step directory."""
    pinned, suspicions, readers = False, [], []
    for name in names:
        mark = paths.mark(name)
        if mark is None or mark.attempt != attempt:
            continue
        if mark.kind == "pinned":
            pinned = True
        elif mark.kind == "suspect":
            suspicions.append(f"{directory}/{name}")
        else:
            readers.append(float(mark.number))
    return Marks(pinned=pinned, suspicions=tuple(suspicions), readers=tuple(readers))


def read_marks(storage: Storage, manifest: Committed) -> Marks:
    """The marks as they are now."""
    directory = paths.step_directory(manifest.step)
    return marks_in(directory, storage.list(directory), manifest.attempt)


def pin(storage: Storage, manifest: Committed) -> None:
    """Keep a checkpoint until ``unpin``. Raises NotFound when it was deleted in the meantime."""
    mark = paths.pin(manifest.step, manifest.attempt)
    storage.put(mark, note())
    # Only after the mark is there: whoever deletes looks for marks after the manifest is gone, and puts it back.
    _still_there(storage, manifest, mark)


def unpin(storage: Storage, manifest: Committed) -> None:
    """Leave a checkpoint to the policies again."""
    storage.delete(paths.pin(manifest.step, manifest.attempt))


def mark_suspect(storage: Storage, manifest: Committed, reason: str, attempt: int) -> None:
    """Put on record why ``attempt`` distrusts a checkpoint; its first reason stands. Trouble is logged, not raised."""
    try:
        with suppress(AlreadyExists):
            storage.create(
                paths.suspicion(manifest.step, manifest.attempt, attempt), note(reason=reason, attempt=attempt)
            )
    except StorageError as error:
        log.warning("step %d could not be marked suspect: %s", manifest.step, error)


def trust(storage: Storage, manifest: Committed) -> list[str]:
    """Take back what is said against a checkpoint; returns what that was."""
    marks = read_marks(storage, manifest)
    said = reasons(storage, marks)
    for path in marks.suspicions:
        storage.delete(path)
    return said


def reasons(storage: Storage, marks: Marks) -> list[str]:
    """Why a checkpoint is distrusted, in words, oldest attempt first."""
    found = []
    for path in marks.suspicions:
        try:
            found.append(str(json.loads(storage.read(path))["reason"]))
        except NotFound:
            continue
        except (ValueError, KeyError, TypeError, StorageError):
            found.append(f"{path} cannot be read")
    return found


@contextmanager
def reading(storage: Storage, manifest: Committed) -> Iterator[None]:
    """Hold a lease on a checkpoint, so that nobody prunes it meanwhile.

    A storage that cannot be written to is read without one. Raises NotFound when the checkpoint was deleted before.
    """
    lease: str | None = paths.lease(manifest.step, manifest.attempt, time.time(), uuid.uuid4().hex[:12])
    assert lease is not None
    try:
        storage.put(lease, note())
    except StorageError as error:
        log.warning("step %d is read without a lease: %s", manifest.step, error)
        lease = None
    _still_there(storage, manifest, lease)
    try:
        yield
    finally:
        _remove(storage, lease)


def _still_there(storage: Storage, manifest: Committed, mark: str | None) -> None:
    try:
        storage.size(manifest.path)
    except BaseException:
        _remove(storage, mark)
        raise


def _remove(storage: Storage, mark: str | None) -> None:
    """Trouble must not hide what went on before it; a lease that stays only ages."""
    if mark is None:
        return
    try:
        storage.delete(mark)
    except StorageError as error:
        log.warning("%s could not be removed: %s", mark, error)


def note(**facts: Any) -> bytes:
    """What a small file says: ``facts``, who wrote it, and when."""
    said = {**facts, "who": f"{socket.gethostname()}:{os.getpid()}", "when": time.time()}
    return json.dumps(said, indent=1).encode()
