"""A storage that fails at a chosen operation: by an error, or as if the process had died there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage, Written
from elastic_runner.storage.protocol import Bulk, DigestWriter

How = Literal["error", "outage", "death"]


class Died(BaseException):
    """Stands for the death of the process; from now on nothing reaches the storage."""


class FaultyStorage:
    """Passes everything to ``inner`` and counts what changes it: each put, create, append, sync and delete, and of
    each streamed file its opening, the middle of its first write, and its closing. With ``reads``, what only looks
    counts as well.

    At the ``fail_at``-th operation counted (from 1) it raises StorageError (``error``; ``outage``: from then on every
    operation does, until ``heal``), or Died, and then every operation does.
    """

    def __init__(self, inner: Storage, *, fail_at: int | None = None, how: How = "error", reads: bool = False) -> None:
        self.url = inner.url
        self.takes_memory = inner.takes_memory
        self.changes: list[str] = []
        """What was counted, in order, the failed operation last."""
        self._inner = inner
        self._fail_at = fail_at
        self._how = how
        self._reads = reads
        self._down = False

    def heal(self) -> None:
        """The storage is there again, for a process that lives."""
        if self._how != "death":
            self._down = False

    def change(self, verb: str, path: str) -> None:
        """Count a change that is about to be made, and fail when it is the one."""
        self._count(f"{verb} {path}")

    def read(self, path: str) -> bytes:
        """Counted with ``reads``."""
        self._look("read", path)
        return self._inner.read(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Counted with ``reads``."""
        self._look("read", path)
        return self._inner.read_range(path, offset, length)

    def put(self, path: str, data: bytes) -> None:
        """Counted."""
        self.change("put", path)
        self._inner.put(path, data)

    def create(self, path: str, data: bytes) -> None:
        """Counted."""
        self.change("create", path)
        self._inner.create(path, data)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Counted three times."""
        self.change("open", path)
        with self._inner.writer(path) as stream:
            yield _FaultyWriter(stream, self, path)
            self.change("close", path)

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """Counted three times."""
        self.change("open", path)
        return self._inner.write_bulk(path, _FaultyBulk(bulk, self, path))

    def put_file(self, path: str, local: Path) -> None:
        """Counted."""
        self.change("put", path)
        self._inner.put_file(path, local)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Counted with ``reads``."""
        self._look("read", path)
        return self._inner.read_into(path, buffer)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """Counted with ``reads``."""
        self._look("read", path)
        with self._inner.local_copy(path) as local:
            yield local

    def append(self, path: str, data: bytes) -> bool:
        """Counted."""
        self.change("append to", path)
        return self._inner.append(path, data)

    def sync(self, path: str) -> None:
        """Counted."""
        self.change("sync", path)
        self._inner.sync(path)

    def list(self, path: str) -> list[str]:
        """Counted with ``reads``."""
        self._look("list", path)
        return self._inner.list(path)

    def size(self, path: str) -> int:
        """Counted with ``reads``."""
        self._look("size of", path)
        return self._inner.size(path)

    def delete(self, path: str) -> None:
        """Counted."""
        self.change("delete", path)
        self._inner.delete(path)

    def _look(self, verb: str, path: str) -> None:
        if self._reads:
            self._count(f"{verb} {path}")
        elif self._down:
            self._fail(f"{verb} {path}")

    def _count(self, what: str) -> None:
        if not self._down:
            self.changes.append(what)
            if len(self.changes) != self._fail_at:
                return
            self._down = self._how != "error"
        self._fail(what)

    def _fail(self, what: str) -> NoReturn:
        if self._how == "death":
            raise Died(what)
        raise StorageError(f"injected at change {self._fail_at}: {what}")


class _FaultyBulk:
    """Stops in the middle of the first block, or after the last, when that is the change to fail at."""

    def __init__(self, bulk: Bulk, storage: FaultyStorage, path: str) -> None:
        self._bulk = bulk
        self._storage = storage
        self._path = path

    @property
    def path(self) -> Path:
        return self._bulk.path

    def blocks(self) -> Iterator[memoryview]:
        for number, block in enumerate(self._bulk.blocks()):
            half = len(block) // 2 if number == 0 else 0
            yield block[:half]
            if number == 0:
                self._storage.change("write", self._path)
            yield block[half:]
        self._storage.change("close", self._path)


class _FaultyWriter(DigestWriter):
    """Stops in the middle of the first write when that is the change to fail at."""

    def __init__(self, stream: DigestWriter, storage: FaultyStorage, path: str) -> None:
        self._stream = stream
        self._storage = storage
        self._path = path
        self._begun = False

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        if not self._begun:
            self._begun = True
            half = len(view) // 2
            self._stream.write(view[:half])
            self._storage.change("write", self._path)
            self._stream.write(view[half:])
            return len(view)
        return self._stream.write(view)

    def tell(self) -> int:
        return self._stream.tell()

    def written(self, path: str) -> Written:
        return self._stream.written(path)
