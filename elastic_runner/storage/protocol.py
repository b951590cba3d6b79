"""The Storage protocol. Paths are relative to the storage's URL and use '/'; directories come and go by themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from elastic_runner.errors import StorageError
from elastic_runner.storage.faults import mapped

_WORTH_A_THREAD = 1 << 20
_BLOCK = 8 << 20
"""Bytes after which it is said that they move."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: enough to recognise it later."""

    path: str
    """Relative path of the file."""
    size: int
    """Bytes."""
    digest: str
    """xxh3-128 of the bytes, in hex."""

    def within(self, directory: str) -> Written:
        """The same, its path relative to ``directory``."""
        return replace(self, path=self.path.removeprefix(directory))


class Bulk(Protocol):
    """A file that lies in memory, or is about to."""

    @property
    def path(self) -> Path:
        """The same bytes as a local file, complete when ``blocks`` has ended."""
        ...

    def blocks(self) -> Iterator[memoryview]:
        """The bytes in order, each block when it is there; page-aligned where that is possible."""
        ...


class Storage(Protocol):
    """Every operation raises StorageError or one of its kinds, within the storage's deadline.

    On a local or mounted directory only tries are counted against it: a call of the operating system cannot be given
    up, and one that hangs, as on a dead file server, holds its caller until the phase's deadline ends the process.
    """

    url: str
    """For people: without credentials."""
    takes_memory: bool
    """Whether ``write_bulk`` writes blocks of memory; else it needs the bulk's path."""

    def read(self, path: str) -> bytes:
        """The whole file. Raises NotFound."""
        ...

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; fewer where the file ends. Raises NotFound."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the whole file; a reader sees the old bytes or the new ones."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """Create the whole file; ``data`` must be this writer's own (hold a number, a time), so that it knows it again.

        Raises AlreadyExists when the file is there.
        """
        ...

    def writer(self, path: str) -> AbstractContextManager[DigestWriter]:
        """Stream a new file. Leaving by an exception leaves no file that looks whole on an object store.

        What the block raises of its own passes unchanged.
        """
        ...

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """A new file from memory, at the device's speed; an error leaves none that looks whole, as with ``writer``.

        What ``bulk.blocks`` raises passes unchanged.
        """
        ...

    def put_file(self, path: str, local: Path) -> None:
        """A new file from a local one; a reader sees nothing or all of it."""
        ...

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Fill ``buffer`` with the whole file, at the device's speed. Raises NotFound, and Damaged for another size."""
        ...

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """The file as a local one for as long as the context lasts."""
        ...

    def append(self, path: str, data: bytes) -> bool:
        """Append to a file, to be made durable by ``sync``; False (and nothing done) where the storage cannot."""
        ...

    def sync(self, path: str) -> None:
        """Make what was appended to a file durable."""
        ...

    def list(self, path: str) -> list[str]:
        """Names of files and directories directly below ``path``, fresh and sorted; [] when there is none."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file. Raises NotFound."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all below it; no error when it is gone already."""
        ...


class Digest:
    """Counts and digests (xxh3-128) what passes."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self._hash = xxhash.xxh3_128()

    @contextmanager
    def taking(self, view: memoryview) -> Iterator[None]:
        """Take ``view`` in, beside the block where that is worth a thread: hashing and writing let go of the GIL."""
        thread = threading.Thread(target=self._hash.update, args=(view,)) if len(view) >= _WORTH_A_THREAD else None
        if thread is not None:
            thread.start()
        try:
            yield
        finally:
            if thread is not None:
                thread.join()
        if thread is None:
            self._hash.update(view)
        self.size += len(view)

    def written(self, path: str) -> Written:
        """The record of what passed."""
        return Written(path=path, size=self.size, digest=self._hash.hexdigest())


class DigestWriter(RawIOBase):
    """A binary stream that counts and digests what passes to ``sink``; ``what`` names it in errors.

    ``moved``: called as bytes pass.
    """

    def __init__(self, sink: BinaryIO, what: str, moved: Callable[[], None] = lambda: None) -> None:
        self._sink = sink
        self._what = what
        self._moved = moved
        self._failure: StorageError | None = None
        self._digest = Digest()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write all of ``data``. Raises StorageError."""
        view = memoryview(data).cast("B")
        try:
            with self._digest.taking(view), mapped(self._what):
                for start in range(0, len(view), _BLOCK):
                    self._sink.write(view[start : start + _BLOCK])
                    self._moved()
        except StorageError as error:
            self._failure = error
            raise
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._digest.size

    @contextmanager
    def honest(self) -> Iterator[None]:
        """Raise what went wrong in ``write``, not what came of it: torch.save closes its archive after the error, fails
        again at that and hides the first one."""
        try:
            yield
        except Exception as error:
            first = self._failure or _storage_error_behind(error)
            if first is None or first is error:
                raise
            raise first from error
        if self._failure is not None:
            raise self._failure

    def written(self, path: str) -> Written:
        """The record of what passed."""
        return self._digest.written(path)


def _storage_error_behind(error: BaseException | None) -> StorageError | None:
    while error is not None and not isinstance(error, StorageError):
        error = error.__context__
    return error


class WriteAll:
    """An unbuffered sink: os.write may take less than it was given."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def write(self, view: memoryview) -> int:
        """Write all of ``view``."""
        total = len(view)
        while view:
            view = view[os.write(self._handle, view) :]
        return total


def digest_of(file: Path, block: int = 4 << 20, moved: Callable[[], None] = lambda: None) -> str:
    """xxh3-128 of a local file, in hex; ``moved`` is called as bytes come."""
    state = xxhash.xxh3_128()
    for chunk in _blocks(file, block):
        state.update(chunk)
        moved()
    return state.hexdigest()


def _blocks(file: Path, block: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(block):
            yield chunk
