"""A mounted directory: every error is one of ours, what may pass is tried again, and nothing is done twice by that."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_runner.errors import AccessDenied, AlreadyExists, NotFound, StorageError, StorageTimeout
from elastic_runner.storage import LocalStorage, open_storage
from elastic_runner.storage.faults import LOCAL_TRIES

LONG = "a" * 300


def write(storage: LocalStorage, name: str) -> None:
    with storage.writer(name) as stream:
        stream.write(b"x")


OPERATIONS: dict[str, Callable[[LocalStorage, str], Any]] = {
    "read": lambda s, name: s.read(name),
    "read_range": lambda s, name: s.read_range(name, 0, 1),
    "read_into": lambda s, name: s.read_into(name, memoryview(bytearray(1))),
    "local_copy": lambda s, name: s.local_copy(name).__enter__(),
    "size": lambda s, name: s.size(name),
    "list": lambda s, name: s.list(name),
    "put": lambda s, name: s.put(name, b"y"),
    "put_file": lambda s, name: s.put_file(name, Path(__file__)),
    "create": lambda s, name: s.create(f"new-{name}", b"y"),
    "sync": lambda s, name: s.sync(name),
    "delete": lambda s, name: s.delete(name),
    "append": lambda s, name: s.append(name, b"y"),
    "writer": write,
}
REPEATED = [name for name in OPERATIONS if name != "append"]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path, seconds=30)
    storage.put("d/file", b"x")
    storage.put("file", b"x")
    return storage


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=lambda seconds: None))


class Failing:
    """Stands before functions: the next ``times`` calls of any raise ``error``, after their work if it is ``late``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, *names: str, times: int = 1) -> None:
        self.error, self.times, self.late = errno.ESTALE, times, False
        for name in names:
            real = getattr(place, name)
            monkeypatch.setattr(place, name, lambda *args, real=real, **keywords: self._call(real, *args, **keywords))

    def _call(self, real: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if not self.times:
            return real(*args, **keywords)
        self.times -= 1
        if self.late:
            real(*args, **keywords)
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name: str, storage: LocalStorage) -> None:
    with pytest.raises(StorageError, match="too long"):
        OPERATIONS[name](storage, LONG)


@pytest.mark.parametrize("error", ["ESTALE", "EIO", "EREMOTEIO", "ETIMEDOUT", "EAGAIN"])
@pytest.mark.parametrize("name", REPEATED)
def test_what_may_pass_is_tried_again(
    name: str, error: str, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, Path, "is_dir", "lstat", "iterdir", times=2)
    failing.error = getattr(errno, error)
    OPERATIONS[name](storage, "d" if name == "list" else "file")
    assert failing.times == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_does_not_pass_is_an_error_of_ours_after_a_few_tries(
    name: str, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, Path, "is_dir", "lstat", "iterdir", times=1000)
    with pytest.raises(StorageError, match="Stale file handle"):
        OPERATIONS[name](storage, "file")
    assert 1000 - failing.times == (LOCAL_TRIES if name in REPEATED else 1)


def test_tries_end_at_the_deadline(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may take a minute on a file server that does not answer."""
    short = open_storage(storage.url, seconds=0.3)
    times = 0

    def slow(path: Path) -> bool:
        nonlocal times
        times += 1
        time.sleep(0.2)
        raise OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(Path, "is_dir", slow)
    with pytest.raises(StorageTimeout):
        short.read("file")
    assert times == 2


def test_a_lasting_error_is_not_tried_again(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, Path, "is_dir", times=5)
    failing.error = errno.EACCES
    with pytest.raises(AccessDenied):
        storage.read("file")
    assert failing.times == 4


@pytest.mark.parametrize("late", ["link", "fsync"])
def test_a_create_that_was_done_is_no_lost_race(
    late: str, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the answer to the link was lost, or what comes after it has failed."""
    failing = Failing(monkeypatch, os, late)
    failing.late = True
    storage.create("new", b"mine")
    assert (failing.times, storage.read("new")) == (0, b"mine")
    assert storage.list("") == ["d", "file", "new"]
    with pytest.raises(AlreadyExists):
        storage.create("new", b"mine")


def test_a_file_server_s_client_that_asked_twice_has_not_lost_a_race(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, os, "link")
    failing.late, failing.error = True, errno.EEXIST
    storage.create("new", b"mine")
    assert storage.read("new") == b"mine"


def test_another_s_file_is_a_lost_race_on_every_try(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, os, "fsync")
    with pytest.raises(AlreadyExists):
        storage.create("file", b"mine")
    assert storage.read("file") == b"x"


def test_a_create_without_links_that_fails_leaves_nothing_to_lose_against(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_links = Failing(monkeypatch, os, "link", times=1000)
    no_links.error = errno.EPERM
    synced: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 2:  # the first one is of the temporary file
            raise OSError(errno.EIO, "I/O error")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    storage.create("new", b"mine")
    assert storage.read("new") == b"mine"


def test_a_failed_sync_is_not_repeated(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of lost bytes once, and the next fsync is fine."""
    storage.append("log", b"line")
    failing = Failing(monkeypatch, os, "fsync")
    failing.error = errno.EIO
    with pytest.raises(StorageError, match="sync"):
        storage.sync("log")
    assert failing.times == 0


@pytest.mark.parametrize("function", ["fsync", "close"])
def test_a_stream_is_not_repeated_and_its_end_is_an_error_of_ours(
    function: str, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, os, function)
    failing.late, failing.error = True, errno.EIO
    with pytest.raises(StorageError, match="write"), storage.writer("new") as stream:
        stream.write(b"x")


def test_what_a_program_raises_in_a_stream_passes_though_closing_fails(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, os, "close")
    failing.late = True
    with pytest.raises(ZeroDivisionError), storage.writer("new"):
        raise ZeroDivisionError
    assert failing.times == 0


def test_a_home_that_nobody_has_is_an_error_of_ours() -> None:
    with pytest.raises(StorageError, match="nobody-of-this-name"):
        LocalStorage("~nobody-of-this-name/run")


def test_a_delete_that_cannot_look_does_not_say_that_it_is_done(storage: LocalStorage) -> None:
    with pytest.raises(StorageError):
        storage.delete(LONG)
    storage.delete("file/below")
    with pytest.raises(NotFound):
        storage.read("absent")
