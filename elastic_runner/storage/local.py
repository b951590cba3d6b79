"""Storage on a local or mounted directory: durable (file and directory fsync) and atomic (rename, link)."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from elastic_runner.errors import AccessDenied, Damaged, NotFound
from elastic_runner.storage.direct import DirectWriter, open_direct, read_direct, sync_path
from elastic_runner.storage.faults import mapped, repeated
from elastic_runner.storage.protocol import Bulk, Digest, DigestWriter, WriteAll, Written

T = TypeVar("T")

_TEMPORARY = ".tmp-"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class LocalStorage:
    """A directory, created when first written to.

    It may be a file server's, whose trouble may pass: within ``seconds``, what can be repeated is tried a few times.
    ``moved``: called as bytes move, and for every operation that is done.
    """

    takes_memory = True

    def __init__(self, root: str | Path, *, seconds: float = 300, moved: Callable[[], None] = lambda: None) -> None:
        with mapped(f"open {root}"):
            self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)
        self._seconds = seconds
        self._moved = moved

    def read(self, path: str) -> bytes:
        """The whole file."""
        return self._repeated("read", path, lambda target: _file(target).read_bytes())

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of the file."""

        def read(target: Path) -> bytes:
            with _file(target).open("rb") as file:
                file.seek(offset)
                return file.read(length)

        return self._repeated("read", path, read)

    def put(self, path: str, data: bytes) -> None:
        """Replace by rename."""

        def put(target: Path) -> None:
            with _temporary(target) as temporary:
                _write_durably(temporary, data)
                temporary.replace(target)
            sync_path(target.parent)

        self._repeated("write", path, put)

    def create(self, path: str, data: bytes) -> None:
        """Create by link, which fails when the target exists and never shows a part of the file."""
        tries = itertools.count()

        def create(target: Path) -> None:
            again = next(tries) > 0
            with _temporary(target) as temporary:
                _write_durably(temporary, data)
                try:
                    _link(temporary, target, data)
                except FileExistsError:
                    # A try before, or the file server's client, may have done it, and the answer was lost.
                    if not (again or temporary.stat().st_nlink > 1) or target.read_bytes() != data:
                        raise
            sync_path(target.parent)

        self._repeated("create", path, create)

    @contextmanager
    def writer(self, path: str) -> Iterator[DigestWriter]:
        """Stream to the file itself: it counts only once a manifest names it."""
        target = self._at(path)
        what = f"write {target}"
        handle = self._repeated("write", path, _open_new)
        try:
            stream = DigestWriter(cast(BinaryIO, DirectWriter(handle)), what, self._moved)
            with stream.honest():
                yield stream
            with mapped(what):
                os.fsync(handle)
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        with mapped(what):
            os.close(handle)
            sync_path(target.parent)

    def write_bulk(self, path: str, bulk: Bulk) -> Written:
        """Past the page cache where the file system can: its pages would be of no use to anybody."""
        with self.writer(path) as stream:
            for block in bulk.blocks():
                stream.write(block)
        return stream.written(path)

    def put_file(self, path: str, local: Path) -> None:
        """Copied by the kernel, then renamed."""

        def put(target: Path) -> None:
            with _temporary(target) as temporary:
                shutil.copyfile(local, temporary)
                sync_path(temporary)
                temporary.replace(target)
            sync_path(target.parent)

        self._repeated("write", path, put)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        """Past the page cache where the file system can."""
        digest, size = self._repeated("read", path, lambda target: _fill(_file(target), buffer, self._moved))
        if size != len(buffer):
            raise Damaged(f"{self._at(path)} has {size} bytes instead of {len(buffer)}")
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
        """File and directory fsync. What fails is not repeated: of bytes that are lost, the next fsync says nothing."""
        handles: list[int] = []

        def open_both(target: Path) -> None:
            handles.append(os.open(_file(target), os.O_RDONLY))
            handles.append(os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY))

        try:
            self._repeated("sync", path, open_both)
            with mapped(f"sync {self._at(path)}"):
                for handle in handles:
                    os.fsync(handle)
        finally:
            for handle in handles:
                with suppress(OSError):
                    os.close(handle)

    def list(self, path: str) -> list[str]:
        """Names below a directory; our own temporary files are left out."""

        def names(target: Path) -> list[str]:
            try:
                return sorted(each.name for each in target.iterdir() if not each.name.startswith(_TEMPORARY))
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._repeated("list", path, names)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._repeated("stat", path, lambda target: _file(target).stat().st_size)

    def delete(self, path: str) -> None:
        """Delete a file or tree."""
        self._repeated("delete", path, _delete)

    def _at(self, path: str) -> Path:
        return self.root / path if path else self.root

    def _repeated(self, verb: str, path: str, action: Callable[[Path], T]) -> T:
        target = self._at(path)
        done = repeated(lambda: action(target), f"{verb} {target}", self._seconds)
        self._moved()
        return done


def _file(target: Path) -> Path:
    if target.is_dir():
        raise NotFound(f"{target} is a directory")
    return target


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    _make_directory(target.parent)
    temporary = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        with suppress(OSError):  # renamed; or left, and seen by nobody
            temporary.unlink()


def _open_new(target: Path) -> int:
    _make_directory(target.parent)
    return open_direct(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def _fill(target: Path, buffer: memoryview, moved: Callable[[], None]) -> tuple[Digest, int]:
    """Read a file of the buffer's size; the digest, and the size it has."""
    digest = Digest()
    handle = open_direct(target, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        if size == len(buffer):
            blocks = read_direct(handle, buffer)
            block = next(blocks, None)
            while block is not None:
                moved()
                with digest.taking(block):  # while the next one comes in
                    block = next(blocks, None)
            size = digest.size  # the file may have been cut meanwhile
    finally:
        os.close(handle)
    return digest, size


def _delete(target: Path) -> None:
    # Another pruner may be at the same tree: start over until it is gone.
    while _is_there(target):
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()


def _is_there(target: Path) -> bool:
    try:
        target.lstat()  # os.path.lexists says no to whatever goes wrong
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _make_directory(directory: Path) -> None:
    """Make it and its parents, each on record in the one above. Raises AccessDenied where a file is in the way."""
    if directory.is_dir():
        return
    try:
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_path(directory.parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise AccessDenied(f"cannot make directory {directory}: a file is in its place") from error


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _link(temporary: Path, target: Path, data: bytes) -> None:
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _create_exclusively(target, data)


def _create_exclusively(target: Path, data: bytes) -> None:
    """For file systems without hard links (FUSE mounts of buckets): a reader may see a part of the file."""
    with target.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                target.unlink()
            raise
