"""A storage that fails at a chosen operation: by an error, or as if the process had died there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage, Written
from elastic_runner.storage.protocol import Bulk, DigestWriter

How = Literal["error", "death"]


class Died(BaseException):
    """Stands for the death of the process; from now on nothing reaches the storage."""


class FaultyStorage:
    """Passes everything to ``inner`` and counts what changes it: each put, create, append, sync and delete, and of
    each streamed file its opening, the middle of its first write, and its closing.

    At the ``fail_at``-th change (from 1) it raises StorageError, or Died; after Died every operation raises it.
    """

    def __init__(self, inner: Storage, *, fail_at: int | None = None, how: How = "error") -> None:
        self.url = inner.url
        self.takes_memory = inner.takes_memory
        self.changes: list[str] = []
        """What was done, in order, the failed change last."""
        self._inner = inner
        self._fail_at = fail_at
        self._how = how
        self._dead = False

    def change(self, what: str) -> None:
        """Count a change that is about to be made, and fail when it is the one."""
        self._alive()
        self.changes.append(what)
        if len(self.changes) != self._fail_at:
            return
        if self._how == "death":
            self._dead = True
            raise Died(what)
        raise StorageError(f"injected at change {self._fail_at}: {what}")

    def read(self, path: str) -> bytes:
        """Passed on."""
        self._alive()
        return self._inner.read(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Passed on."""
        self._alive()
        return self._inner.read_range(path, offset, length)

    def put(self, path: str, data: bytes) -> None:
        """Counted."""
        self.change(f"put {path}")
        self._inner.put(path, data)

    def create(self, path: str, data: bytes) -> None:
        """Counted."""
        self.change(f"create {path}")
        self._inner.create(path, data)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Counted three times."""
        self.change(f"open {path}")
        with self._inner.writer(path) as stream:
            yield _FaultyWriter(stream, self, path)
            self.change(f"close {path}")

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """Counted three times."""
        self.change(f"open {path}")
        return self._inner.write_bulk(path, _FaultyBulk(bulk, self, path))

    def put_file(self, path: str, local: Path) -> None:
        """Counted."""
        self.change(f"put {path}")
        self._inner.put_file(path, local)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Passed on."""
        self._alive()
        return self._inner.read_into(path, buffer)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """Passed on."""
        self._alive()
        with self._inner.local_copy(path) as local:
            yield local

    def append(self, path: str, data: bytes) -> bool:
        """Counted."""
        self.change(f"append to {path}")
        return self._inner.append(path, data)

    def sync(self, path: str) -> None:
        """Counted."""
        self.change(f"sync {path}")
        self._inner.sync(path)

    def list(self, path: str) -> list[str]:
        """Passed on."""
        self._alive()
        return self._inner.list(path)

    def size(self, path: str) -> int:
        """Passed on."""
        self._alive()
        return self._inner.size(path)

    def delete(self, path: str) -> None:
        """Counted."""
        self.change(f"delete {path}")
        self._inner.delete(path)

    def _alive(self) -> None:
        if self._dead:
            raise Died


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
                self._storage.change(f"write {self._path}")
            yield block[half:]
        self._storage.change(f"close {self._path}")


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
            self._storage.change(f"write {self._path}")
            self._stream.write(view[half:])
            return len(view)
        return self._stream.write(view)

    def tell(self) -> int:
        return self._stream.tell()

    def written(self, path: str) -> Written:
        return self._stream.written(path)
