"""Direct I/O: any memory, any length, any mood of the kernel; the bytes arrive."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.checkpoint.image import SharedBuffer
from elastic_runner.errors import Damaged, StorageError, StorageFull
from elastic_runner.storage import LocalStorage, direct
from elastic_runner.storage.direct import ALIGNMENT, DirectWriter, open_direct, read_direct
from elastic_runner.storage.protocol import digest_of

SIZES = [0, 1, 511, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, 5 * ALIGNMENT + 7]
WRITE, PREADV = os.write, os.preadv


def memory(size: int, shift: int = 0) -> memoryview:
    """Random bytes that begin ``shift`` bytes after a page."""
    view = SharedBuffer(size + shift + 1).view[shift : shift + size]
    view[:] = random.Random(size).randbytes(size)
    return view


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Kernels before 6.6 refuse O_DIRECT on a tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    place = Path("/dev/shm") / f"elastic_runner-{os.getpid()}-{tmp_path.name}"
    place.mkdir()
    yield place
    for file in place.iterdir():
        file.unlink()
    place.rmdir()


def written(file: Path, blocks: list[memoryview]) -> bytes:
    handle = open_direct(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        writer = DirectWriter(handle)
        for block in blocks:
            assert writer.write(block) == len(block)
    finally:
        os.close(handle)
    return file.read_bytes()


def read(file: Path, buffer: memoryview) -> bytes:
    handle = open_direct(file, os.O_RDONLY)
    try:
        return b"".join(bytes(block) for block in read_direct(handle, buffer))
    finally:
        os.close(handle)


@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("size", SIZES)
def test_any_length_from_any_memory(size: int, shift: int, directory: Path) -> None:
    block = memory(size, shift)
    assert written(directory / "f", [block]) == bytes(block)
    assert read(directory / "f", memory(size, shift)) == bytes(block)


def test_blocks_of_every_kind_after_each_other(directory: Path) -> None:
    draw = random.Random(5)
    for _ in range(20):
        blocks = [memory(draw.choice(SIZES), draw.choice([0, 0, 0, 1, 512])) for _ in range(draw.randint(1, 5))]
        assert written(directory / "f", blocks) == b"".join(bytes(block) for block in blocks)


@pytest.mark.parametrize("most", [1, 100, ALIGNMENT, ALIGNMENT + 1, 2 * ALIGNMENT])
def test_short_reads_and_writes_are_gone_on_with(most: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = memory(3 * ALIGNMENT + 5)
    monkeypatch.setattr(os, "write", lambda handle, data: WRITE(handle, data[:most]))
    assert written(directory / "f", [block]) == bytes(block)
    monkeypatch.setattr(os, "preadv", lambda handle, parts, offset: PREADV(handle, [parts[0][:most]], offset))
    assert read(directory / "f", memory(len(block))) == bytes(block)


def refusing(call: Callable[..., Any], allowed: int) -> Callable[..., Any]:
    """EINVAL for direct I/O after ``allowed`` calls, as from a file system with other ideas of alignment."""
    calls = 0

    def refused(handle: int, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > allowed and direct._is_direct(handle):
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(handle, *arguments)

    return refused


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_refusal_in_the_middle_is_answered_by_buffered_io(
    allowed: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [memory(2 * ALIGNMENT) for _ in range(3)]
    monkeypatch.setattr(os, "write", refusing(WRITE, allowed))
    assert written(directory / "f", blocks) == b"".join(bytes(block) for block in blocks)
    monkeypatch.setattr(os, "preadv", refusing(PREADV, allowed))
    monkeypatch.setattr(direct, "BLOCK_BYTES", 2 * ALIGNMENT)
    assert read(directory / "f", memory(6 * ALIGNMENT)) == b"".join(bytes(block) for block in blocks)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def without(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & direct._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", without)
    block = memory(3 * ALIGNMENT + 5)
    assert written(tmp_path / "f", [block]) == bytes(block)
    assert read(tmp_path / "f", memory(len(block))) == bytes(block)


def failing(code: int) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        open_direct(tmp_path / "nothing", os.O_RDONLY)
    (tmp_path / "f").write_bytes(bytes(ALIGNMENT))
    monkeypatch.setattr(os, "write", failing(errno.EIO))
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        written(tmp_path / "g", [memory(ALIGNMENT)])
    with pytest.raises(OSError, match="Input/output"):
        read(tmp_path / "f", memory(ALIGNMENT))


@pytest.mark.parametrize("size", [10, 2 * ALIGNMENT])
def test_an_einval_of_buffered_io_is_an_error(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not tried for ever."""
    monkeypatch.setattr(os, "write", failing(errno.EINVAL))
    with pytest.raises(OSError, match="Invalid argument"):
        written(tmp_path / "f", [memory(size)])


class InMemory:
    """A Bulk of given blocks."""

    def __init__(self, *blocks: memoryview) -> None:
        self.given = blocks

    @property
    def path(self) -> Path:
        raise NotImplementedError

    def blocks(self) -> Iterator[memoryview]:
        yield from self.given


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageError)])
@pytest.mark.parametrize("size", [100, 3 << 20], ids=["small", "hashed beside"])
def test_a_full_disk_is_told_as_such(
    size: int, code: int, kind: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    calls = 0

    def fill(handle: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        return WRITE(handle, data) if calls == 1 else failing(code)()

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(kind, match=os.strerror(code)):
        storage.write_bulk("f", InMemory(memory(size), memory(size, 1)))


@pytest.mark.parametrize("sizes", [(0,), (5,), (1 << 20, 3), (1 << 20, (1 << 20) - 1, 3 << 20), (100, 5 << 20)])
def test_the_digest_is_that_of_the_bytes(sizes: tuple[int, ...], tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    blocks = [memory(size, index % 2) for index, size in enumerate(sizes)]
    told = storage.write_bulk("d/f", InMemory(*blocks))
    assert (told.path, told.size, told.digest) == ("d/f", sum(sizes), digest_of(tmp_path / "d/f"))
    assert (tmp_path / "d/f").read_bytes() == b"".join(bytes(block) for block in blocks)
    buffer = SharedBuffer(sum(sizes) or 1).view[: sum(sizes)]
    assert storage.read_into("d/f", buffer) == told


def test_the_digest_counts_what_was_written_when_it_was_written(tmp_path: Path) -> None:
    """A buffer that is filled anew after ``write`` has returned must not matter."""
    storage = LocalStorage(tmp_path)
    block = memory(2 << 20)
    first = bytes(block)
    with storage.writer("f") as stream:
        stream.write(block)
        block[:] = bytes(len(block))
        stream.write(block[:7])
    assert (tmp_path / "f").read_bytes() == first + bytes(7)
    assert stream.written("f").digest == digest_of(tmp_path / "f")


def test_a_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(Damaged, match="has 100 bytes instead of 99"):
        LocalStorage(tmp_path).read_into("f", memory(99))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(2 * ALIGNMENT))
    monkeypatch.setattr(os, "preadv", lambda handle, parts, offset: 0 if offset else PREADV(handle, [parts[0][:50]], 0))
    with pytest.raises(Damaged, match="50 bytes instead of 8192"):
        LocalStorage(tmp_path).read_into("f", memory(2 * ALIGNMENT))
