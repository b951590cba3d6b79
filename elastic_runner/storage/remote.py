"""Storage on any fsspec filesystem (s3, gs, memory, ...), and the choice between it and LocalStorage.

What is known of s3fs 2026.9 and avoided here: ``open("wb")`` commits on an exception and uploads parts one after
the other, so files are spooled to local disk and put whole; listings are cached, so the caches are passed by; a lost
exclusive create is OSError(EINVAL) on some servers; ``rm`` swallows errors of single objects, so what is left is
looked for; a request given up would go on and take effect later, so it is cancelled; an upload that cannot be aborted
at once (the server is away) stays in progress, so it is aborted later.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elastic_runner.config import nested_options
from elastic_runner.errors import AlreadyExists, ConfigError, Damaged, NotFound, StorageError
from elastic_runner.storage.calls import Call, Progress, fill
from elastic_runner.storage.faults import Deadline, hide, mapped, retried
from elastic_runner.storage.leftovers import Leftovers
from elastic_runner.storage.local import LocalStorage
from elastic_runner.storage.protocol import Bulk, Digest, DigestWriter, Storage, WriteAll, Written

T = TypeVar("T")

PART = 8 << 20
"""Bytes of one part of an S3 object, sent or fetched beside others."""

_WINDOW = 8 * PART
# S3 takes no more parts.
_MOST_PARTS = 10_000
_PASSWORD = re.compile(r"://[^/@]*:[^@]*@")
SECRET = re.compile(r"key|secret|token|password|passphrase|credential", re.IGNORECASE)
"""What is never shown, by its name."""
# fsspec's memory filesystem looks and then stores; threads of one process race for it.
_MEMORY_LOCK = threading.Lock()


def open_storage(
    url: str,
    options: dict[str, str] | None = None,
    seconds: float = 300,
    moved: Callable[[], None] = lambda: None,
) -> Storage:
    """The storage at ``url``; ``options`` as in the configuration; ``seconds`` is the deadline of one operation.

    ``moved``: called as bytes move, in pieces as small as the filesystem tells of, and for every operation that is
    done.

    Raises ConfigError for a scheme that fsspec does not know or whose package is not installed, and for a password in
    the URL, which is shown in logs and kept in files.
    """
    if _PASSWORD.search(url):
        raise ConfigError(f"storage URL {hide(url)!r} holds a password: give it as an option (storage_options) instead")
    arguments = nested_options(options or {})
    try:
        if url.partition("://")[0] in ("s3", "s3a"):
            _set_up_s3(arguments, seconds)
        filesystem, root = fsspec.core.url_to_fs(url, **arguments)
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"cannot open storage {hide(url)!r}: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(root, seconds=seconds, moved=moved)
    secrets = [value for name, value in (options or {}).items() if SECRET.search(name) and len(value) > 3]
    return FsspecStorage(filesystem, root, url=hide(url), seconds=seconds, secrets=secrets, moved=moved)


def _set_up_s3(arguments: dict[str, Any], seconds: float) -> None:
    """Defaults that leave time for other tries where one connection hangs; options are text, s3fs takes numbers."""
    config = arguments.setdefault("config_kwargs", {})
    config.setdefault("connect_timeout", min(5.0, seconds / 6))
    config.setdefault("read_timeout", min(15.0, seconds / 6))
    arguments.setdefault("use_listings_cache", False)
    arguments.setdefault("default_block_size", PART)
    for place, name, kind in (
        (config, "connect_timeout", float),
        (config, "read_timeout", float),
        (config, "max_pool_connections", int),
        (arguments, "max_concurrency", int),
        (arguments, "default_block_size", int),
    ):
        if name in place:
            place[name] = kind(place[name])


def creates_exclusively(storage: Storage, path: str) -> bool:
    """Whether the store itself lets one of two creators of a file win; a file named from ``path`` comes and goes."""
    return not isinstance(storage, FsspecStorage) or storage.creates_exclusively(path)


def abort_old_uploads(storage: Storage, seconds: float = 24 * 3600) -> None:
    """Take away what uploads by killed processes have left on S3, begun so long ago. Trouble is logged, not raised."""
    if isinstance(storage, FsspecStorage):
        storage.abort_old_uploads(seconds)


class FsspecStorage:
    """Objects below ``root`` of an fsspec filesystem; ``moved`` as in ``open_storage``."""

    takes_memory = False

    def __init__(
        self,
        filesystem: Any,
        root: str,
        *,
        url: str,
        seconds: float,
        secrets: Sequence[str] = (),
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._seconds = seconds
        self._secrets = tuple(secrets)
        self._moved = moved
        self._is_s3 = isinstance(filesystem, AsyncFileSystem) and "s3" in filesystem.protocol
        self.url = url if url.endswith("://") else url.rstrip("/")
        self._leftovers = Leftovers(filesystem, self.url, self._secrets)

    def read(self, path: str) -> bytes:
        """The whole object."""
        return self._read(path, Deadline(self._seconds))

    def _read(self, path: str, deadline: Deadline) -> bytes:
        return self._retried("read", path, lambda call, at: cast(bytes, call("cat_file", at)), deadline)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of the object."""
        if length == 0:  # s3fs would ask for bytes 0 to -1 and get them all
            self.size(path)
            return b""
        return self._retried(
            "read", path, lambda call, at: cast(bytes, call("cat_file", at, start=offset, end=offset + length))
        )

    def put(self, path: str, data: bytes) -> None:
        """One whole object; stores replace it atomically."""
        parts = self._parts(len(data))
        self._upload("write", path, len(data), lambda call, at, _: call("pipe_file", at, data, **parts))

    def put_file(self, path: str, local: Path) -> None:
        """One whole object, its parts sent beside each other."""
        with mapped(f"read {local}"):
            size = local.stat().st_size
        parts = self._parts(size)
        self._upload(
            "write", path, size, lambda call, at, progress: call("put_file", str(local), at, callback=progress, **parts)
        )

    def create(self, path: str, data: bytes) -> None:
        """Exclusive create where the store has it; read back in any case, since some stores only pretend."""
        deadline = Deadline(self._seconds)
        if self._retried("look for", path, self._is_there, deadline):
            raise AlreadyExists(f"{self._name(path)} exists")
        try:
            self._upload("create", path, len(data), lambda call, at, _: self._create(data, call, at), deadline)
        except AlreadyExists:
            # A retry after a lost answer meets our own object.
            if self._read(path, deadline) != data:
                raise
        if self._read(path, deadline) != data:
            raise AlreadyExists(f"{self._name(path)} was created by another writer at the same time")

    def creates_exclusively(self, path: str) -> bool:
        """Whether the store refuses a second create; tried on an object of our own, named from ``path``."""
        path = f"{path}-{uuid.uuid4().hex}"
        try:
            for data in (b"first", b"second"):
                self._retried("create", path, partial(self._create, data))
        except AlreadyExists:  # the first too, met again after a lost answer, was refused by the store
            return True
        finally:
            self.delete(path)
        return False

    def _is_there(self, call: Call, at: str) -> bool:
        self._fs.invalidate_cache()
        return bool(call("exists", at))

    def _create(self, data: bytes, call: Call, at: str) -> None:
        with _MEMORY_LOCK if isinstance(self._fs, MemoryFileSystem) else contextlib.nullcontext():
            try:
                call("pipe_file", at, data, mode="create", **self._parts(len(data)))
            except TypeError:  # a filesystem without conditional writes
                call("pipe_file", at, data)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Spool to a local temporary file, then put it whole; an exception puts nothing."""
        what = f"write {self._name(path)} (temporary file in {tempfile.gettempdir()})"
        with contextlib.ExitStack() as stack:
            with mapped(what):
                spool = stack.enter_context(tempfile.NamedTemporaryFile(prefix="elastic-runner-"))
            stream = DigestWriter(cast(BinaryIO, WriteAll(spool.fileno())), what, self._moved)
            with stream.honest():
                yield stream
            self.put_file(path, Path(spool.name))

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """Put the local file that the bulk ends up as."""
        digest = Digest()
        for block in bulk.blocks():
            with digest.taking(block):
                pass
        self.put_file(path, bulk.path)
        return digest.written(path)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Ranges fetched beside each other, a window of them at a time."""
        if (size := self.size(path)) != len(buffer):
            raise Damaged(f"{self._name(path)} has {size} bytes instead of {len(buffer)}")
        digest = Digest()
        for start in range(0, size, _WINDOW):
            window = buffer[start : start + _WINDOW]
            self._retried("read", path, partial(fill, window, start, PART))
            with digest.taking(window):
                pass
        return digest.written(path)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """A download into a temporary file."""
        with tempfile.TemporaryDirectory(prefix="elastic-runner-") as directory:
            target = Path(directory) / "file"
            deadline = Deadline(self._seconds)
            self._retried(
                f"copy to {tempfile.gettempdir()}:",
                path,
                lambda call, at: call("get_file", at, str(target), callback=Progress(deadline, self._moved)),
                deadline,
            )
            yield target

    def append(self, path: str, data: bytes) -> bool:
        """Objects cannot be appended to."""
        return False

    def sync(self, path: str) -> None:
        """Nothing was appended."""

    def list(self, path: str) -> list[str]:
        """Names below a prefix, past any listing cache."""

        def names(call: Call, at: str) -> list[str]:
            self._fs.invalidate_cache()
            try:
                entries = call("ls", at, detail=False)
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

        def size(call: Call, at: str) -> int:
            self._fs.invalidate_cache()
            info = call("info", at)
            if info.get("type") == "directory":
                raise NotFound(f"{self._name(path)} is a directory")
            return int(info["size"])

        return self._retried("stat", path, size)

    def delete(self, path: str) -> None:
        """Delete an object, or all below a prefix."""

        def delete(call: Call, at: str) -> None:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                # ``rm`` would take it for a pattern, and runs/[1] would delete from runs/1.
                if not has_magic(at):
                    call("rm", at, recursive=True)
                    self._fs.invalidate_cache()
                for each in call("find", at):
                    call("rm_file", each)

        self._retried("delete", path, delete)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _name(self, path: str) -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{path}"

    def _parts(self, size: int) -> dict[str, int]:
        return {"chunksize": max(PART, -(-size // _MOST_PARTS))} if self._is_s3 else {}

    def _upload(
        self,
        verb: str,
        path: str,
        size: int,
        send: Callable[[Call, str, Callback], object],
        deadline: Deadline | None = None,
    ) -> None:
        """Send an object of ``size`` bytes; parts that a failed try leaves on the store are taken away."""
        deadline = deadline or Deadline(self._seconds)

        in_parts = self._is_s3 and size >= 2 * PART  # s3fs's own limit

        def attempt(call: Call, at: str) -> None:
            self._leftovers.clear(call)
            try:
                send(call, at, Progress(deadline, self._moved))
            except BaseException:
                if in_parts:
                    self._leftovers.add(at)
                raise

        try:
            self._retried(verb, path, attempt, deadline)
        finally:
            if in_parts:
                self._clean_up(path)

    def abort_old_uploads(self, seconds: float) -> None:
        """Those below the root that were begun so long ago."""

        def abort(call: Call, at: str) -> None:
            self._leftovers.abort_older(call, at, seconds)

        if self._is_s3:
            with contextlib.suppress(StorageError):
                self._retried("abort old uploads below", "", abort)

    def _clean_up(self, path: str) -> None:
        """Not for long: where the server is away, the next upload sees to what a failed one has left."""

        def look(call: Call, at: str) -> None:
            # Also after a success: where the answer to its beginning was lost, s3fs has begun another one.
            self._leftovers.abort(call, at)
            self._leftovers.clear(call)

        with contextlib.suppress(StorageError):
            self._retried("abort uploads of", path, look, Deadline(min(self._seconds / 3, 10)))

    def _retried(self, verb: str, path: str, action: Callable[[Call, str], T], deadline: Deadline | None = None) -> T:
        calls: list[Call] = []

        def attempt() -> T:
            calls.append(Call(self._fs))
            return action(calls[-1], self._at(path))

        done = retried(
            attempt,
            f"{verb} {self._name(path)}",
            deadline or Deadline(self._seconds),
            self._secrets,
            give_up=lambda: bool(calls) and calls[-1].give_up(),
        )
        self._moved()
        return done
