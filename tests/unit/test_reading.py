"""Files that come in ahead of their use, in a few buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastic_runner.checkpoint.reading import BUFFERS, HUGE_PAGE, READERS, Reading
from elastic_runner.errors import StorageError

NAMES = tuple("abcdefgh")
SIZES = dict.fromkeys(NAMES, 3)
LONG = 30


class Disk:
    """Fills the memory with the file's name."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.bad: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, name: str, view: memoryview) -> None:
        self.read.append(name)
        assert self.go_on.wait(LONG)
        if name in self.bad:
            raise StorageError(f"read {name}")
        view[:] = name.encode() * len(view)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def reading(disk: Disk) -> Iterator[Reading]:
    found = Reading(disk, 3)
    yield found
    disk.go_on.set()
    found.close()


def test_files_come_in_order_each_as_long_as_it_is_used(reading: Reading) -> None:
    reading.take_over(NAMES, SIZES)
    for name in NAMES:
        assert bytes(reading.wait(name)) == name.encode() * 3
        reading.done(name)


def test_no_buffer_is_read_into_before_its_file_is_done(disk: Disk, reading: Reading) -> None:
    reading.take_over(NAMES, SIZES)
    views = [reading.wait(name) for name in NAMES[:BUFFERS]]
    assert sorted(disk.read) == sorted(NAMES[:BUFFERS])
    with pytest.raises(KeyError):
        reading.wait(NAMES[BUFFERS])
    reading.done(NAMES[1])
    assert bytes(reading.wait(NAMES[BUFFERS])) == NAMES[BUFFERS].encode() * 3
    assert [bytes(view[:1]).decode() for view in views] == [NAMES[0], NAMES[BUFFERS], *NAMES[2:BUFFERS]]


def test_what_was_begun_is_gone_on_with_and_what_is_not_wanted_makes_room(disk: Disk, reading: Reading) -> None:
    for name in NAMES[:BUFFERS]:
        reading.begin(name, 3)
    assert reading.begun == NAMES[:BUFFERS]
    reading.take_over(NAMES[1:], SIZES)
    assert reading.begun == NAMES[1:]
    for name in NAMES[1:]:
        assert bytes(reading.wait(name)) == name.encode() * 3
        reading.done(name)
    assert sorted(disk.read) == list(NAMES)


def test_an_error_is_raised_where_the_file_is_wanted_and_only_there(disk: Disk, reading: Reading) -> None:
    disk.bad = {"a", "c"}
    reading.begin("a", 3)
    reading.take_over(("b", "c"), SIZES)
    assert bytes(reading.wait("b")) == b"bbb"
    with pytest.raises(StorageError, match="read c"):
        reading.wait("c")


def test_closing_waits_for_reads_in_progress_and_begins_no_other(disk: Disk, reading: Reading) -> None:
    disk.go_on.clear()
    reading.take_over(NAMES, SIZES)
    closing = threading.Thread(target=reading.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    disk.go_on.set()
    closing.join(LONG)
    assert not closing.is_alive() and len(disk.read) <= READERS


def test_no_room_is_needed_for_empty_files(disk: Disk) -> None:
    reading = Reading(disk, 0)
    reading.take_over(("a",), {"a": 0})
    assert bytes(reading.wait("a")) == b""
    reading.close()
    assert HUGE_PAGE % 4096 == 0
