"""The storage operations on a real S3 server behind the proxy, each with what shows that it did its work."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_runner.storage import Storage, open_storage, remote
from elastic_runner.storage.protocol import Written
from tests.support.proxy import Proxy
from tests.support.seaweed import SeaweedFS

MB = 1 << 20
SMALL = os.urandom(100_000)
PART = 5 * MB
"""The least that S3 allows; what is sent and fetched in a test is time."""
BIG = os.urandom(2 * PART + 1)
"""Three parts."""


class Bench:
    """A place behind the proxy with ``shared/small`` and ``shared/big``; each test writes to a directory of its own."""

    def __init__(self, seaweed: SeaweedFS, proxy: Proxy, url: str, directory: Path) -> None:
        self.seaweed, self.proxy, self.url, self.directory = seaweed, proxy, url, directory
        self.direct = open_storage(url, seaweed.options(), seconds=60)
        self.here = uuid.uuid4().hex
        self.new, self.doomed = f"{self.here}/new", f"{self.here}/doomed"

    def storage(self, seconds: float, **options: str) -> Storage:
        return open_storage(self.url, {**self.seaweed.options(self.proxy.endpoint), **options}, seconds=seconds)

    def left(self, name: str = "new") -> bytes | None:
        """What lies under ``name`` in the directory of this test."""
        return self.direct.read(f"{self.here}/{name}") if name in self.direct.list(self.here) else None

    def leaves_no_upload(self) -> None:
        assert self.seaweed.uploads(f"{self.url}/{self.here}") == []


@pytest.fixture(scope="module")
def shared(seaweed: SeaweedFS) -> str:
    place = seaweed.place()
    storage = open_storage(place.url, place.options, seconds=60)
    storage.put("shared/small", SMALL)
    storage.put("shared/big", BIG)
    return place.url


@pytest.fixture
def bench(seaweed: SeaweedFS, proxy: Proxy, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    # botocore's own back-off, of up to some seconds, without its length.
    monkeypatch.setattr("botocore.retryhandler.random", SimpleNamespace(random=lambda: 0.02))
    monkeypatch.setattr(remote, "PART", PART)
    return Bench(seaweed, proxy, shared, tmp_path)


def write(storage: Storage, name: str, data: bytes) -> Written:
    with storage.writer(name) as stream:
        stream.write(data)
    return stream.written(name)


def copied(storage: Storage, name: str) -> bytes:
    with storage.local_copy(name) as local:
        return local.read_bytes()


def put_file(storage: Storage, bench: Bench) -> None:
    local = bench.directory / "local"
    local.write_bytes(BIG)
    storage.put_file(bench.new, local)


def read_into(storage: Storage) -> bytes:
    buffer = bytearray(len(BIG))
    storage.read_into("shared/big", memoryview(buffer))
    return bytes(buffer)


# Each operation, and what shows afterwards that it did its work.
Operation = tuple[Callable[[Storage, Bench], Any], Callable[[Any, Bench], bool]]
OPERATIONS: dict[str, Operation] = {
    "put": (lambda s, b: s.put(b.new, SMALL), lambda _, b: b.left() == SMALL),
    "put_big": (lambda s, b: s.put(b.new, BIG), lambda _, b: b.left() == BIG),
    "create": (lambda s, b: s.create(b.new, SMALL), lambda _, b: b.left() == SMALL),
    "write": (lambda s, b: write(s, b.new, BIG), lambda _, b: b.left() == BIG),
    "put_file": (put_file, lambda _, b: b.left() == BIG),
    "read": (lambda s, _: s.read("shared/small"), lambda found, _: found == SMALL),
    "read_big": (lambda s, _: s.read("shared/big"), lambda found, _: found == BIG),
    "read_range": (lambda s, _: s.read_range("shared/big", MB, 5 * MB), lambda found, _: found == BIG[MB : 6 * MB]),
    "read_into": (lambda s, _: read_into(s), lambda found, _: found == BIG),
    "local_copy": (lambda s, _: copied(s, "shared/big"), lambda found, _: found == BIG),
    "list": (lambda s, _: s.list("shared"), lambda found, _: found == ["big", "small"]),
    "size": (lambda s, _: s.size("shared/big"), lambda found, _: found == len(BIG)),
    "delete": (lambda s, b: s.delete(b.doomed), lambda _, b: b.left("doomed") is None),
}
WRITES = ("put", "put_big", "create", "write", "put_file")


def run(name: str, storage: Storage, bench: Bench) -> None:
    """Do it and see that it is done."""
    act, done = OPERATIONS[name]
    if name == "delete":
        bench.direct.put(bench.doomed, SMALL)
    result = act(storage, bench)
    assert bench.proxy.fired, "the fault has not struck"
    assert done(result, bench)
    bench.leaves_no_upload()
