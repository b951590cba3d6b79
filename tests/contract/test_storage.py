"""What every Storage promises, on each kind of storage."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_runner.errors import AlreadyExists, NotFound
from elastic_runner.storage import LocalStorage, Storage, open_storage
from elastic_runner.storage.protocol import digest_of
from tests.support.s3 import S3

KINDS = ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """URL and options of an empty place."""
    if request.param == "s3":
        server: S3 = request.getfixturevalue("s3")
        return server.url, server.options
    return (str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"), {}


@pytest.fixture
def storage(place: tuple[str, dict[str, str]]) -> Storage:
    url, options = place
    return open_storage(url, options, seconds=30)


@pytest.fixture
def other(place: tuple[str, dict[str, str]]) -> Storage:
    """The same place, opened a second time, as another process would."""
    url, options = place
    return open_storage(url, options, seconds=30)


def test_url_keeps_its_scheme(storage: Storage, place: tuple[str, dict[str, str]]) -> None:
    """Case c34."""
    assert storage.url == place[0]


def test_put_then_read(storage: Storage) -> None:
    storage.put("a/b", b"12345")
    assert storage.read("a/b") == b"12345"
    assert storage.size("a/b") == 5


def test_put_replaces(storage: Storage) -> None:
    storage.put("a", b"a long first version")
    storage.put("a", b"short")
    assert storage.read("a") == b"short"


def test_empty_file(storage: Storage) -> None:
    storage.put("a", b"")
    assert (storage.read("a"), storage.size("a"), storage.list("")) == (b"", 0, ["a"])


@pytest.mark.parametrize(("offset", "length", "found"), [(0, 2, b"01"), (3, 4, b"3456"), (8, 5, b"89"), (0, 0, b"")])
def test_read_range(storage: Storage, offset: int, length: int, found: bytes) -> None:
    storage.put("a", b"0123456789")
    assert storage.read_range("a", offset, length) == found


def test_it_tells_of_bytes_that_move(place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Case c17: also of the pieces of a file, where it sees them, and not of what fails."""
    told: list[None] = []
    storage = open_storage(*place, seconds=60, moved=lambda: told.append(None))

    def told_of(action: Callable[[], object]) -> int:
        told.clear()
        action()
        return len(told)

    def write() -> None:
        with storage.writer("written") as stream:
            stream.write(bytes(17 << 20))

    def fail() -> None:
        with pytest.raises(NotFound):
            storage.read("absent")

    (tmp_path / "local").write_bytes(bytes(17 << 20))
    in_pieces = isinstance(storage, LocalStorage)
    assert told_of(write) >= 3
    assert told_of(lambda: storage.put_file("put", tmp_path / "local")) >= (1 if in_pieces else 2)
    assert told_of(lambda: storage.read_into("written", memoryview(bytearray(17 << 20)))) >= (3 if in_pieces else 1)
    assert told_of(lambda: storage.put("small", b"x")) >= 1
    assert told_of(fail) == 0


def test_missing_file(storage: Storage) -> None:
    storage.put("there", b"x")
    with pytest.raises(NotFound):
        storage.read("absent")
    with pytest.raises(NotFound):
        storage.read_range("absent", 0, 1)
    with pytest.raises(NotFound):
        storage.size("absent")
    with pytest.raises(NotFound), storage.local_copy("absent"):
        pass


def test_a_directory_is_no_file(storage: Storage) -> None:
    storage.put("directory/file", b"x")
    with pytest.raises(NotFound):
        storage.read("directory")
    with pytest.raises(NotFound):
        storage.size("directory")


def test_create_is_exclusive(storage: Storage) -> None:
    storage.create("a/b", b"first")
    with pytest.raises(AlreadyExists):
        storage.create("a/b", b"second")
    assert storage.read("a/b") == b"first"


def test_one_of_two_racing_creators_wins(storage: Storage, other: Storage) -> None:
    for number in range(5):
        start, won, lost = threading.Barrier(2), [], []

        def race(
            mine: Storage,
            data: bytes,
            number: int = number,
            start: threading.Barrier = start,
            won: list[bytes] = won,
            lost: list[bytes] = lost,
        ) -> None:
            start.wait()
            try:
                mine.create(f"race/{number}", data)
                won.append(data)
            except AlreadyExists:
                lost.append(data)

        threads = [threading.Thread(target=race, args=pair) for pair in [(storage, b"one"), (other, b"two")]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 1)
        assert storage.read(f"race/{number}") == won[0]


def test_writer_streams_and_digests(storage: Storage) -> None:
    with storage.writer("d/file") as stream:
        stream.write(b"hello ")
        assert stream.tell() == 6
        stream.write(memoryview(bytearray(b"world")))
    written = stream.written("d/file")
    assert storage.read("d/file") == b"hello world"
    assert written.size == 11
    with storage.local_copy("d/file") as local:
        assert digest_of(local) == written.digest


def test_an_exception_in_the_writer_passes_and_nothing_is_published(storage: Storage, other: Storage) -> None:
    """Case c34."""
    storage.put("file", b"before")
    with pytest.raises(ZeroDivisionError), storage.writer("file") as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    if not Path(storage.url).is_absolute():  # object stores; a local file counts only once a manifest names it
        assert other.read("file") == b"before"


def test_local_copy_goes_away_with_its_context(storage: Storage) -> None:
    storage.put("a", b"12345")
    with storage.local_copy("a") as local:
        assert local.read_bytes() == b"12345"
    assert local.exists() == Path(storage.url).is_absolute()


def test_append_or_decline(storage: Storage) -> None:
    done = [storage.append("log/lines", b"one\n"), storage.append("log/lines", b"two\n")]
    assert done in ([True, True], [False, False])
    assert storage.list("log") == (["lines"] if done[0] else [])
    if done[0]:
        assert storage.read("log/lines") == b"one\ntwo\n"


def test_list_is_sorted_shallow_and_fresh(storage: Storage, other: Storage) -> None:
    assert storage.list("") == []
    assert storage.list("absent/deep") == []
    for name in ("d/b", "d/a", "d/sub/deep", "top"):
        storage.put(name, b"x")
    assert storage.list("") == ["d", "top"]
    assert storage.list("d") == ["a", "b", "sub"]
    other.put("d/c", b"x")
    assert storage.list("d") == ["a", "b", "c", "sub"]
    other.delete("d/a")
    assert storage.list("d") == ["b", "c", "sub"]


def test_listing_a_file_is_empty(storage: Storage) -> None:
    storage.put("file", b"x")
    assert storage.list("file") == []
    assert storage.list("file/below") == []


def test_delete_file_tree_and_nothing(storage: Storage) -> None:
    for name in ("step-5/a", "step-5/deep/b", "step-50/a", "file"):
        storage.put(name, b"x")
    storage.delete("step-5")
    storage.delete("file")
    storage.delete("absent")
    assert storage.list("") == ["step-50"]
    assert storage.list("step-50") == ["a"]


def test_names_with_odd_characters(storage: Storage) -> None:
    name = "d/with space+plus=#%41ü[x]*?"
    storage.put(name, b"x")
    assert storage.list("d") == [name.removeprefix("d/")]
    assert storage.read(name) == b"x"
    storage.delete(name)
    assert storage.list("d") == []


def test_delete_takes_no_name_for_a_pattern(storage: Storage) -> None:
    for name in ("run[12]/a", "run[12]/deep/b", "run1/a", "run2/a"):
        storage.put(name, b"x")
    storage.delete("run[12]")
    assert storage.list("") == ["run1", "run2"]
