"""Foreign errors become ours, what may pass is tried again, nothing is waited for without end, secrets stay secret."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    NotFound,
    StorageError,
    StorageFull,
    StorageTimeout,
)
from elastic_runner.storage import FsspecStorage, LocalStorage, open_storage
from elastic_runner.storage.faults import hide, map_error, mapped, retried


class BotoError(Exception):
    def __init__(self, status: int, message: str = "no") -> None:
        super().__init__(message)
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class ReadTimeoutError(Exception):
    pass


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(), NotFound),
        (NotADirectoryError(), NotFound),
        (BotoError(404), NotFound),
        (FileExistsError(), AlreadyExists),
        (BotoError(412), AlreadyExists),
        (OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold"), AlreadyExists),
        (PermissionError(), AccessDenied),
        (OSError(errno.EROFS, "read-only"), AccessDenied),
        (BotoError(403), AccessDenied),
        (NoCredentialsError(), AccessDenied),
        (OSError(errno.ENOSPC, "full"), StorageFull),
        (OSError(errno.EDQUOT, "quota"), StorageFull),
        (OSError(errno.EFBIG, "limit"), StorageFull),
        (TimeoutError(), StorageTimeout),
        (ReadTimeoutError(), StorageTimeout),
        (OSError(errno.EIO, "disk"), StorageError),
        (ValueError("odd"), StorageError),
    ],
)
def test_mapping(error: Exception, kind: type[StorageError]) -> None:
    ours = map_error(error, "read x")
    assert type(ours) is kind
    assert str(ours).startswith("read x: ")


def test_the_path_does_not_decide_the_kind() -> None:
    assert type(map_error(OSError(errno.EIO, "disk"), "read runs/PreconditionFailed/pre-condition")) is StorageError


def test_ours_pass_the_mapping_unchanged() -> None:
    error = NotFound("x")
    with pytest.raises(NotFound) as caught, mapped("read y"):
        raise error
    assert caught.value is error


class Failing:
    """Raises ``errors`` in turn, then returns 7."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(), BotoError(503), OSError(errno.EIO, "x")])
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    action = Failing(error)
    assert retried(action, "read x", 30) == 7
    assert action.calls == 2


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), PermissionError(), OSError(errno.ENOSPC, "x"), TypeError("argument"), BotoError(400)]
)
def test_what_cannot_pass_is_not_tried_again(error: Exception) -> None:
    action = Failing(error)
    with pytest.raises(StorageError):
        retried(action, "read x", 30)
    assert action.calls == 1


def test_tries_end_at_the_deadline_with_the_last_error() -> None:
    def action() -> None:
        raise ConnectionResetError("reset by peer")

    start = time.monotonic()
    with pytest.raises(StorageError, match="reset by peer"):
        retried(action, "read x", 0.5)
    assert time.monotonic() - start < 5


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets hung calls go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


class HangingFilesystem:
    """A server that takes the connection and never answers."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._release.wait()


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.read("x"),
        lambda s: s.read_range("x", 0, 1),
        lambda s: s.put("x", b""),
        lambda s: s.create("x", b""),
        lambda s: s.list("x"),
        lambda s: s.size("x"),
        lambda s: s.delete("x"),
        lambda s: s.local_copy("x").__enter__(),
        lambda s: s.writer("x").__enter__() and None,
    ],
    ids=["read", "read_range", "put", "create", "list", "size", "delete", "local_copy", "writer"],
)
def test_a_silent_server_is_a_timeout(call: Any, release: threading.Event, request: pytest.FixtureRequest) -> None:
    storage = FsspecStorage(HangingFilesystem(release), "root", url="hang://root", seconds=0.2)
    with pytest.raises(StorageTimeout, match=r"timeouts\.storage"):
        if "writer" in request.node.name:
            with storage.writer("x") as stream:
                stream.write(b"data")
        else:
            call(storage)


def test_a_path_below_a_regular_file_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "file" / "run")
    for write in (storage.put, storage.create, storage.append):
        with pytest.raises(AccessDenied, match="a file is in its place"):
            write("attempts/1", b"x")
    with pytest.raises(AccessDenied), storage.writer("a"):
        pass
    with pytest.raises(NotFound):
        storage.read("a")
    assert storage.list("a") == []


def test_a_read_only_place_is_denied() -> None:
    # root passes permission bits, but not this: /proc takes no directories.
    with pytest.raises((AccessDenied, NotFound), match="/proc/elastic"):
        LocalStorage("/proc/elastic").put("a", b"x")


def test_local_create_leaves_no_temporary_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    storage.put("a", b"2")
    with pytest.raises(AlreadyExists):
        storage.create("a", b"3")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_local_create_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    storage = LocalStorage(tmp_path)
    storage.create("a", b"1")
    with pytest.raises(AlreadyExists):
        storage.create("a", b"2")
    assert storage.read("a") == b"1"


_FILL = """
import resource, sys
import torch
from elastic_runner.errors import StorageFull
from elastic_runner.storage import open_storage

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
storage = open_storage(sys.argv[1])

def through_torch():
    with storage.writer("data/file") as stream:
        torch.save(torch.zeros(100_000), stream)

def in_pieces():
    with storage.writer("data/file") as stream:
        for _ in range(100):
            stream.write(bytes(100))

def append():
    storage.append("log", bytes(3000))
    storage.append("log", bytes(3000))

acts = [through_torch, in_pieces]
if sys.argv[1].startswith("/"):
    acts += [lambda: storage.put("a", bytes(9000)), lambda: storage.create("b", bytes(9000)), append]
for act in acts:
    try:
        act()
    except StorageFull as error:
        print("full:", error)
    else:
        sys.exit("no error")
"""


@pytest.mark.parametrize(("url", "times"), [("local", 5), ("memory://full/run", 2)])
def test_a_full_disk_is_storage_full(url: str, times: int, tmp_path: Path) -> None:
    # A file-size limit is the one full disk that a test can make for itself alone.
    place = str(tmp_path / "run") if url == "local" else url
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FILL), place], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("full: ") == times
    assert done.stdout.count("File too large") == times


def test_a_password_in_the_url_is_refused_unseen() -> None:
    with pytest.raises(ConfigError, match="storage_options") as caught:
        open_storage("ftp://me:hunter2@host/run")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_user_in_the_url_is_not_shown() -> None:
    assert hide("write sftp://me@host/run failed") == "write sftp://***@host/run failed"


def test_an_unknown_scheme_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        open_storage("nosuch://x")


class Telling:
    """A filesystem whose errors quote the credentials."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **kwargs: object) -> None:
            try:
                raise RuntimeError("signed with hunter2hunter2")
            except RuntimeError as error:
                raise PermissionError("token=abcdefgh") from error

        return call


def test_secrets_are_not_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **options: (Telling(), "bucket/run"))
    options = {"client_kwargs.aws_secret_access_key": "hunter2hunter2", "token": "abcdefgh", "region": "eu-west-1"}
    storage = open_storage("s3://bucket/run", options, seconds=1)
    with pytest.raises(AccessDenied) as caught:
        storage.read("x")
    text = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in text
    assert "abcdefgh" not in text
    assert "s3://bucket/run/x" in text
