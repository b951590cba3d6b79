"""A storage whose data files wait at a gate, or fail, as a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage
from elastic_runner.storage.protocol import Bulk, DigestWriter, Written


class GatedStorage:
    """Passes everything on to ``inner``; data files (``write_bulk`` and ``writer``) wait until ``gate`` is set."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        """Set when somebody has come to the gate."""
        self.failing: StorageError | None = None
        """What is raised instead of writing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        self._pass()
        return self.inner.write_bulk(path, bulk)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        self._pass()
        with self.inner.writer(path) as stream:
            yield stream

    def _pass(self) -> None:
        self.reached.set()
        assert self.gate.wait(60)
        if self.failing is not None:
            raise self.failing
