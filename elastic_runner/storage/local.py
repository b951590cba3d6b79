"""Storage on a local or mounted directory: durable (file and directory fsync) and atomic (rename, link)."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from elastic_runner.storage.faults import mapped
from elastic_runner.storage.protocol import DigestWriter


class LocalStorage:
    """A directory, created when first written to."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)

    def read(self, path: str) -> bytes:
        """The whole file."""
        with mapped(f"read {self._at(path)}"):
            return self._at(path).read_bytes()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of the file."""
        with mapped(f"read {self._at(path)}"), self._at(path).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def put(self, path: str, data: bytes) -> None:
        """Replace by rename."""
        target = self._at(path)
        with mapped(f"write {target}"):
            with self._temporary(target, data) as temporary:
                temporary.replace(target)
            _sync_directory(target.parent)

    def create(self, path: str, data: bytes) -> None:
        """Create by link, which fails when the target exists and never shows a part of the file."""
        target = self._at(path)
        with mapped(f"create {target}"):
            with self._temporary(target, data) as temporary:
                os.link(temporary, target)
            _sync_directory(target.parent)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Stream to the file itself: it counts only once a manifest names it."""
        target = self._at(path)
        with mapped(f"write {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb", buffering=0) as file:
                stream = DigestWriter(cast(BinaryIO, _WriteAll(file.fileno())))
                yield stream
                os.fsync(file.fileno())
            _sync_directory(target.parent)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """The file itself."""
        self.size(path)
        yield self._at(path)

    def append(self, path: str, data: bytes) -> bool:
        """One write call, so that a kill tears at most the last line."""
        target = self._at(path)
        with mapped(f"append to {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, data)
            finally:
                os.close(handle)
        return True

    def list(self, path: str) -> list[str]:
        """Names below a directory; our own temporary files are left out."""
        with mapped(f"list {self._at(path)}"):
            try:
                return sorted(p.name for p in self._at(path).iterdir() if not p.name.startswith(".tmp-"))
            except FileNotFoundError:
                return []

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with mapped(f"stat {self._at(path)}"):
            return self._at(path).stat().st_size

    def delete(self, path: str) -> None:
        """Delete a file or tree."""
        target = self._at(path)
        with mapped(f"delete {target}"), suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def _at(self, path: str) -> Path:
        return self.root / path if path else self.root

    @contextmanager
    def _temporary(self, target: Path, data: bytes) -> Iterator[Path]:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


class _WriteAll:
    """An unbuffered sink: os.write may take less than it was given."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def write(self, view: memoryview) -> int:
        total = len(view)
        while view:
            view = view[os.write(self._handle, view) :]
        return total


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
