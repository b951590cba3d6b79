"""Storage on any fsspec filesystem (s3, gs, memory, ...), and the choice between it and LocalStorage.

What is known of s3fs 2026.9 and avoided here: ``open("wb")`` commits on an exception and uploads parts one after
the other, listings are cached, a lost exclusive create is OSError(EINVAL) on some servers. So files are spooled to
local disk and put whole, and listings are never cached.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elastic_runner.config import nested_options
from elastic_runner.errors import AlreadyExists, ConfigError, NotFound
from elastic_runner.storage.faults import hide, mapped, retried
from elastic_runner.storage.local import LocalStorage
from elastic_runner.storage.protocol import DigestWriter, Storage, WriteAll

T = TypeVar("T")

_PASSWORD = re.compile(r"://[^/@]*:[^@]*@")
_SECRET = re.compile(r"key|secret|token|password|passphrase|credential", re.IGNORECASE)
# fsspec's memory filesystem looks and then stores; threads of one process race for it.
_MEMORY_LOCK = threading.Lock()


def open_storage(url: str, options: dict[str, str] | None = None, seconds: float = 300) -> Storage:
    """The storage at ``url``; ``options`` as in the configuration; ``seconds`` is the deadline of one operation.

    Raises ConfigError for a scheme that fsspec does not know or whose package is not installed, and for a password in
    the URL, which is shown in logs and kept in files.
    """
    if _PASSWORD.search(url):
        raise ConfigError(f"storage URL {hide(url)!r} holds a password: give it as an option (storage_options) instead")
    arguments = nested_options(options or {})
    if url.partition("://")[0] in ("s3", "s3a"):
        arguments.setdefault("use_listings_cache", False)
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **arguments)
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"cannot open storage {hide(url)!r}: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(root)
    secrets = [value for name, value in (options or {}).items() if _SECRET.search(name) and len(value) > 3]
    return FsspecStorage(filesystem, root, url=hide(url), seconds=seconds, secrets=secrets)


class FsspecStorage:
    """Objects below ``root`` of an fsspec filesystem."""

    def __init__(self, filesystem: Any, root: str, *, url: str, seconds: float, secrets: Sequence[str] = ()) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._seconds = seconds
        self._secrets = tuple(secrets)
        self.url = url if url.endswith("://") else url.rstrip("/")

    def read(self, path: str) -> bytes:
        """The whole object."""
        return self._retried("read", path, lambda at: cast(bytes, self._fs.cat_file(at)))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of the object."""
        if length == 0:  # s3fs would ask for bytes 0 to -1 and get them all
            self.size(path)
            return b""
        return self._retried(
            "read", path, lambda at: cast(bytes, self._fs.cat_file(at, start=offset, end=offset + length))
        )

    def put(self, path: str, data: bytes) -> None:
        """One whole object; stores replace it atomically."""
        self._retried("write", path, lambda at: self._fs.pipe_file(at, data))

    def create(self, path: str, data: bytes) -> None:
        """Exclusive create where the store has it; read back in any case, since some stores only pretend."""
        if self._retried("look for", path, self._is_there):
            raise AlreadyExists(f"{self._name(path)} exists")
        try:
            self._retried("create", path, lambda at: self._create(at, data))
        except AlreadyExists:
            # A retry after a lost answer meets our own object.
            if self.read(path) != data:
                raise
        if self.read(path) != data:
            raise AlreadyExists(f"{self._name(path)} was created by another writer at the same time")

    def _is_there(self, at: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(at))

    def _create(self, at: str, data: bytes) -> None:
        with _MEMORY_LOCK if isinstance(self._fs, MemoryFileSystem) else contextlib.nullcontext():
            try:
                self._fs.pipe_file(at, data, mode="create")
            except TypeError:  # a filesystem without conditional writes
                self._fs.pipe_file(at, data)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Spool to a local temporary file, then put it whole; an exception puts nothing."""
        what = f"write {self._name(path)} (temporary file in {tempfile.gettempdir()})"
        with contextlib.ExitStack() as stack:
            with mapped(what):
                spool = stack.enter_context(tempfile.NamedTemporaryFile(prefix="elastic-runner-"))
            stream = DigestWriter(cast(BinaryIO, WriteAll(spool.fileno())), what)
            with stream.honest():
                yield stream
            self._retried("write", path, lambda at: self._fs.put_file(spool.name, at))

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """A download into a temporary file."""
        with tempfile.TemporaryDirectory(prefix="elastic-runner-") as directory:
            target = Path(directory) / "file"
            self._retried("read", path, lambda at: self._fs.get_file(at, str(target)))
            yield target

    def append(self, path: str, data: bytes) -> bool:
        """Objects cannot be appended to."""
        return False

    def sync(self, path: str) -> None:
        """Nothing was appended."""

    def list(self, path: str) -> list[str]:
        """Names below a prefix, past any listing cache."""

        def names(at: str) -> list[str]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(at, detail=False)
            except FileNotFoundError:
                return []
            found = {
                str(entry).rstrip("/").rpartition("/")[2]
                for entry in entries
                if str(entry).rstrip("/") != at.rstrip("/")
            }
            return sorted(found)

        return self._retried("list", path, names)

    def size(self, path: str) -> int:
        """Bytes of an object."""

        def size(at: str) -> int:
            self._fs.invalidate_cache()
            info = self._fs.info(at)
            if info.get("type") == "directory":
                raise NotFound(f"{self._name(path)} is a directory")
            return int(info["size"])

        return self._retried("stat", path, size)

    def delete(self, path: str) -> None:
        """Delete an object, or all below a prefix."""

        def delete(at: str) -> None:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if not has_magic(at):
                    self._fs.rm(at, recursive=True)
                    return
                # ``rm`` would take it for a pattern, and runs/[1] would delete from runs/1.
                for each in self._fs.find(at):
                    self._fs.rm_file(each)

        self._retried("delete", path, delete)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _name(self, path: str) -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{path}"

    def _retried(self, verb: str, path: str, action: Callable[[str], T]) -> T:
        at = self._at(path)
        return retried(lambda: action(at), f"{verb} {self._name(path)}", self._seconds, self._secrets)
