"""Storage on a local or mounted directory: durable (file and directory fsync) and atomic (rename, link)."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from elastic_runner.errors import AccessDenied, Damaged, NotFound
from elastic_runner.storage.direct import DirectWriter, open_direct, read_direct
from elastic_runner.storage.faults import mapped
from elastic_runner.storage.protocol import Bulk, Digest, DigestWriter, WriteAll, Written

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class LocalStorage:
    """A directory, created when first written to."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)

    def read(self, path: str) -> bytes:
        """The whole file."""
        target = self._file(path)
        with mapped(f"read {target}"):
            return target.read_bytes()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of the file."""
        target = self._file(path)
        with mapped(f"read {target}"), target.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def put(self, path: str, data: bytes) -> None:
        """Replace by rename."""
        target = self._at(path)
        with mapped(f"write {target}"):
            with self._temporary(target) as temporary:
                _write_durably(temporary, data)
                temporary.replace(target)
            _sync_directory(target.parent)

    def create(self, path: str, data: bytes) -> None:
        """Create by link, which fails when the target exists and never shows a part of the file."""
        target = self._at(path)
        with mapped(f"create {target}"):
            with self._temporary(target) as temporary:
                _write_durably(temporary, data)
                try:
                    os.link(temporary, target)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    _create_exclusively(target, data)
            _sync_directory(target.parent)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Stream to the file itself: it counts only once a manifest names it."""
        target = self._at(path)
        what = f"write {target}"
        with mapped(what):
            _make_directory(target.parent)
            handle = open_direct(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            stream = DigestWriter(cast(BinaryIO, DirectWriter(handle)), what)
            with stream.honest():
                yield stream
            with mapped(what):
                os.fsync(handle)
        finally:
            os.close(handle)
        with mapped(what):
            _sync_directory(target.parent)

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """Past the page cache where the file system can: its pages would be of no use to anybody."""
        with self.writer(path) as stream:
            for block in bulk.blocks():
                stream.write(block)
        return stream.written(path)

    def put_file(self, path: str, local: Path) -> None:
        """Copied by the kernel, then renamed."""
        target = self._at(path)
        with mapped(f"write {target}"):
            with self._temporary(target) as temporary:
                shutil.copyfile(local, temporary)
                _sync_file(temporary)
                temporary.replace(target)
            _sync_directory(target.parent)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Past the page cache where the file system can."""
        target = self._file(path)
        digest = Digest()
        with mapped(f"read {target}"):
            handle = open_direct(target, os.O_RDONLY)
            try:
                if (size := os.fstat(handle).st_size) == len(buffer):
                    blocks = read_direct(handle, buffer)
                    block = next(blocks, None)
                    while block is not None:
                        with digest.taking(block):  # while the next one comes in
                            block = next(blocks, None)
                    size = digest.size  # the file may have been cut meanwhile
            finally:
                os.close(handle)
        if size != len(buffer):
            raise Damaged(f"{target} has {size} bytes instead of {len(buffer)}")
        return digest.written(path)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """The file itself."""
        self.size(path)
        yield self._at(path)

    def append(self, path: str, data: bytes) -> bool:
        """One write call, so that a kill tears at most the last line."""
        target = self._at(path)
        with mapped(f"append to {target}"):
            _make_directory(target.parent)
            handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                # A short write is how a disk says that it is filling up; the next call raises.
                WriteAll(handle).write(memoryview(data))
            finally:
                os.close(handle)
        return True

    def sync(self, path: str) -> None:
        """File and directory fsync."""
        target = self._file(path)
        with mapped(f"sync {target}"):
            _sync_file(target)
            _sync_directory(target.parent)

    def list(self, path: str) -> list[str]:
        """Names below a directory; our own temporary files are left out."""
        with mapped(f"list {self._at(path)}"):
            try:
                return sorted(p.name for p in self._at(path).iterdir() if not p.name.startswith(".tmp-"))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, path: str) -> int:
        """Bytes of a file."""
        target = self._file(path)
        with mapped(f"stat {target}"):
            return target.stat().st_size

    def delete(self, path: str) -> None:
        """Delete a file or tree."""
        target = self._at(path)
        with mapped(f"delete {target}"):
            # Another pruner may be at the same tree: start over until it is gone.
            while os.path.lexists(target):
                with suppress(FileNotFoundError):
                    if target.is_dir() and not target.is_symlink():
                        shutil.rmtree(target)
                    else:
                        target.unlink()

    def _at(self, path: str) -> Path:
        return self.root / path if path else self.root

    def _file(self, path: str) -> Path:
        target = self._at(path)
        if target.is_dir():
            raise NotFound(f"{target} is a directory")
        return target

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[Path]:
        _make_directory(target.parent)
        temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _make_directory(directory: Path) -> None:
    """Make it and its parents, each on record in the one above. Raises AccessDenied where a file is in the way."""
    if directory.is_dir():
        return
    try:
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise AccessDenied(f"cannot make directory {directory}: a file is in its place") from error


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _create_exclusively(target: Path, data: bytes) -> None:
    """For file systems without hard links (FUSE mounts of buckets): a reader may see a part of the file."""
    with target.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
