"""Uploads in parts that failed: taken away where the server lets us, and no trouble where it does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import s3fs
from botocore.exceptions import ClientError

from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.pruning import prune
from elastic_runner.checkpoint.retention import Newest, Retention
from elastic_runner.errors import StorageError
from elastic_runner.storage import FsspecStorage, Storage, abort_old_uploads, open_storage
from elastic_runner.storage.remote import PART
from tests.support.committed import commit
from tests.support.s3 import S3

pytestmark = pytest.mark.s3

IN_PARTS = bytes(2 * PART + 1)
LOOK = "list_multipart_uploads"


class Server:
    """Notes the calls of s3fs, and answers some with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        real = s3fs.S3FileSystem._call_s3

        async def call(fs: Any, method: str, *args: Any, **keywords: Any) -> Any:
            self.calls.append(method)
            if method in self.failing:
                raise self.failing[method]
            return await real(fs, method, *args, **keywords)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def answer(status: int, code: str) -> Exception:
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "ListMultipartUploads",
    )


@pytest.mark.parametrize("error", [PermissionError("AccessDenied"), answer(501, "NotImplemented")])
def test_who_may_not_look_for_leftovers_is_told_once_and_looks_no_more(
    error: Exception, s3: S3, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(s3.url, s3.options, seconds=30)
    server.failing[LOOK] = error
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            storage.put(f"f{number}", IN_PARTS)
    assert server.calls.count(LOOK) == 1
    assert [each.getMessage() for each in caplog.records if "unfinished uploads" in each.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_server_too_busy_to_look_is_asked_once_an_upload(s3: S3, server: Server) -> None:
    storage = open_storage(s3.url, s3.options, seconds=30)
    server.failing[LOOK] = answer(503, "SlowDown")
    for number in range(4):
        storage.put(f"f{number}", IN_PARTS)
    assert server.calls.count(LOOK) == 4


def test_what_could_not_be_taken_away_at_once_is_later(s3: S3, server: Server) -> None:
    storage = open_storage(s3.url, s3.options, seconds=30)
    server.failing = {
        "complete_multipart_upload": answer(400, "EntityTooLarge"),
        "abort_multipart_upload": answer(400, "EntityTooLarge"),
        LOOK: answer(503, "SlowDown"),
    }
    with pytest.raises(StorageError, match="EntityTooLarge"):
        storage.put("f", IN_PARTS)
    server.failing.clear()
    server.calls.clear()
    storage.put("small", b"x")
    assert "abort_multipart_upload" in server.calls
    server.calls.clear()
    storage.put("small", b"x")
    assert LOOK not in server.calls


def test_a_small_file_leaves_nothing_to_look_for(s3: S3, server: Server) -> None:
    open_storage(s3.url, s3.options, seconds=30).put("small", b"x")
    assert LOOK not in server.calls


def begin(s3: S3, key: str) -> None:
    """As a process that is killed then; moto dates it back to 2010."""
    fs = s3fs.S3FileSystem(
        key=s3.options["key"],
        secret=s3.options["secret"],
        client_kwargs={"endpoint_url": s3.options["client_kwargs.endpoint_url"]},
    )
    bucket, prefix, _ = fs.split_path(s3.url)
    fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}{key}")


def uploads(storage: Storage) -> list[str]:
    assert isinstance(storage, FsspecStorage)
    fs = storage._fs
    found = fs.call_s3("list_multipart_uploads", Bucket=fs.split_path(storage.url)[0])
    return sorted(each["Key"] for each in found.get("Uploads", []))


def test_uploads_of_killed_processes_are_taken_away_when_they_are_old(s3: S3) -> None:
    for key in ("/step-1/a", "/step-1/a", "/b", "-other/a"):
        begin(s3, key)
    storage = open_storage(s3.url, s3.options, seconds=30)
    abort_old_uploads(storage, seconds=1e9)
    assert len(uploads(storage)) == 4
    abort_old_uploads(storage)
    assert uploads(storage) == ["run-other/a"]
    abort_old_uploads(open_storage("memory://leftovers"))


def test_pruning_looks_for_them_once(s3: S3, server: Server) -> None:
    storage = open_storage(s3.url, s3.options, seconds=30)
    begin(s3, "/step-0000000001/data-000001/a")
    keep_one = Retention(policies=(Newest(1),), unhealthy=1)
    catalogue = Catalogue(storage)
    for step in (1, 2):
        prune(storage, keep_one, commit(storage, step), 1, catalogue=catalogue)
    assert server.calls.count(LOOK) == 1
    assert uploads(storage) == []
