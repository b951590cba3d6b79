"""Every storage operation against a real S3 server, with each fault of server, network and disk in between.

What passes is cured within the deadline; what lasts is the right error; what failed leaves nothing behind.
"""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_runner.errors import AccessDenied, AlreadyExists, StorageError, StorageFull, StorageTimeout
from elastic_runner.storage import LocalStorage, open_storage
from elastic_runner.storage.protocol import digest_of
from elastic_runner.storage.remote import creates_exclusively
from tests.support.proxy import ALWAYS, DOWN, UP
from tests.support.s3 import S3
from tests.support.seaweed import ADMIN, READER, SeaweedFS
from tests.support.storage_bench import BIG, MB, OPERATIONS, SMALL, WRITES, Bench, copied, run, write
from tests.support.waiting import eventually

pytestmark = pytest.mark.s3

every_operation = pytest.mark.parametrize("name", OPERATIONS)


@every_operation
def test_slow_down_is_waited_out(name: str, bench: Bench) -> None:
    bench.proxy.answer(1)
    run(name, bench.storage(30), bench)


@every_operation
def test_refused_connections_are_tried_again(name: str, bench: Bench) -> None:
    bench.proxy.refuse(1)
    run(name, bench.storage(30), bench)


@every_operation
def test_a_reset_in_the_middle_is_cured(name: str, bench: Bench) -> None:
    middle = {"put": 50_000, "create": 50_000, "read": 50_000, "list": 100, "size": 100, "delete": 100}.get(
        name, 2 * MB
    )
    bench.proxy.reset(UP if name in WRITES else DOWN, middle)
    run(name, bench.storage(30), bench)


@pytest.mark.parametrize("name", [*WRITES, "delete"])
def test_a_lost_answer_is_cured(name: str, bench: Bench) -> None:
    """The server has done it, and is asked again; of an upload in parts it has begun two then."""
    bench.proxy.reset(DOWN, after=50)
    run(name, bench.storage(30), bench)


@pytest.mark.parametrize("name", ["put", "write", "read", "local_copy", "list"])
@pytest.mark.parametrize("way", [UP, DOWN])
def test_one_hung_connection_is_given_up_and_another_succeeds(
    name: str, way: str, bench: Bench, tmp_path: Path
) -> None:
    """A third of the deadline at most: with 100-continue outstanding, s3fs would wait for ever."""
    bench.proxy.stall(way, after=100, times=1)
    run(name, bench.storage(2.4), bench)


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_silent_network_is_a_timeout_that_names_the_operation(way: str, bench: Bench) -> None:
    seconds = 1.2
    storages = {name: bench.storage(seconds) for name in OPERATIONS}
    bench.proxy.stall(way)

    def attempt(name: str) -> tuple[BaseException | None, float]:
        start = time.monotonic()
        try:
            OPERATIONS[name][0](storages[name], bench)
        except StorageError as error:
            return error, time.monotonic() - start
        return None, time.monotonic() - start

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        found = dict(zip(OPERATIONS, pool.map(attempt, OPERATIONS), strict=True))
    for name, (error, took) in found.items():
        assert isinstance(error, StorageTimeout), (name, error)
        assert bench.url in str(error), name
        assert took < seconds + 2, name


def test_a_write_that_was_given_up_does_not_take_effect_later(bench: Bench) -> None:
    """The request used to go on in the background, and the object appeared after its failure had been reported."""
    bench.direct.put(bench.new, b"old")
    storage = bench.storage(1)
    bench.proxy.stall(UP, after=3 * MB)
    with pytest.raises(StorageTimeout):
        write(storage, bench.new, BIG)
    bench.proxy.ok()
    eventually(lambda: not any("storage write" in each.name for each in threading.enumerate()))
    assert bench.left() == b"old"
    storage.put(f"{bench.here}/next", b"x")  # and with the network back, it takes away what it could not then
    bench.leaves_no_upload()


@pytest.mark.parametrize("name", WRITES)
def test_a_failed_write_leaves_neither_object_nor_upload(name: str, bench: Bench) -> None:
    bench.proxy.reset(UP, after=50_000, times=ALWAYS)
    storage = bench.storage(0.8)
    start = time.monotonic()
    with pytest.raises(StorageError, match=bench.url):
        OPERATIONS[name][0](storage, bench)
    assert time.monotonic() - start < 4
    assert bench.left() is None
    bench.leaves_no_upload()


def test_slow_down_without_end_is_an_error_at_the_deadline(bench: Bench) -> None:
    bench.proxy.answer(ALWAYS)
    start = time.monotonic()
    with pytest.raises(StorageError, match="read s3://"):
        bench.storage(1.2).read("shared/small")
    assert 0.6 < time.monotonic() - start < 4


@pytest.mark.parametrize("name", WRITES)
def test_bits_flipped_on_the_way_up_never_arrive(name: str, bench: Bench) -> None:
    bench.proxy.flip(UP, after=50_000)
    run(name, bench.storage(30), bench)


@pytest.mark.parametrize("code", ["BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody", "NoSuchUpload"])
def test_a_server_that_refuses_damaged_bytes_is_sent_them_again(code: str, bench: Bench) -> None:
    """As AWS answers; SeaweedFS closes the connection instead."""
    bench.proxy.answer(1, "404 Not Found" if code == "NoSuchUpload" else "400 Bad Request", code)
    run("put", bench.storage(30), bench)


def test_bits_flipped_on_the_way_down_are_seen_by_the_digest(bench: Bench) -> None:
    storage = bench.storage(30)
    written = write(storage, bench.new, BIG)
    bench.proxy.flip(DOWN, after=2 * MB, times=4)  # s3fs throws away the beginning of one answer
    with storage.local_copy(bench.new) as local:
        assert digest_of(local) != written.digest
    assert bench.proxy.fired
    with storage.local_copy(bench.new) as local:
        assert digest_of(local) == written.digest
    buffer = memoryview(bytearray(len(BIG)))
    bench.proxy.flip(DOWN, after=2 * MB, times=4)  # s3fs throws away the beginning of one answer
    assert storage.read_into(bench.new, buffer).digest != written.digest
    assert storage.read_into(bench.new, buffer).digest == written.digest


@every_operation
def test_wrong_credentials_are_denied_at_once(name: str, bench: Bench) -> None:
    bench.direct.put(bench.doomed, SMALL)
    storage = open_storage(bench.url, bench.seaweed.options(credentials=(ADMIN[0], "wrong-secret")), seconds=60)
    start = time.monotonic()
    with pytest.raises(AccessDenied):
        OPERATIONS[name][0](storage, bench)
    assert time.monotonic() - start < 10
    assert bench.left() is None
    assert bench.left("doomed") == SMALL


@pytest.mark.parametrize("name", [*WRITES, "delete"])
def test_who_may_only_read_is_denied_at_once(name: str, bench: Bench) -> None:
    bench.direct.put(bench.doomed, SMALL)
    storage = open_storage(bench.url, bench.seaweed.options(credentials=READER), seconds=60)
    assert storage.read("shared/small") == SMALL
    start = time.monotonic()
    with pytest.raises(AccessDenied):
        OPERATIONS[name][0](storage, bench)
    assert time.monotonic() - start < 10
    assert bench.left("doomed") == SMALL


@pytest.mark.parametrize("name", WRITES)
def test_a_full_server_is_storage_full_at_once(name: str, bench: Bench) -> None:
    bench.proxy.answer(ALWAYS, "507 Insufficient Storage", "InsufficientStorage")
    start = time.monotonic()
    with pytest.raises(StorageFull):
        OPERATIONS[name][0](bench.storage(60), bench)
    assert time.monotonic() - start < 10


def test_a_full_temporary_directory_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(bench.directory))
    storage = bench.storage(30)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MB, limits[1]))
    try:
        for act in (lambda: copied(storage, "shared/big"), lambda: write(storage, bench.new, BIG)):
            with pytest.raises(StorageFull, match=str(bench.directory)):
                act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert bench.left() is None


def test_a_local_file_below_a_file_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "data").write_bytes(b"y")
    with pytest.raises(AccessDenied):
        LocalStorage(tmp_path / "file" / "run").put_file("a", tmp_path / "data")


def test_a_slow_link_may_take_longer_than_the_deadline(bench: Bench) -> None:
    """The deadline is one of progress; without any it holds."""
    seconds = 3.0
    # Here kernel and proxy hold much of a part that s3fs takes for sent, so its time-out for the answer starts early.
    storage = bench.storage(seconds, max_concurrency="1", **{"config_kwargs.read_timeout": "10"})
    assert storage.list(bench.here) == []  # connected
    bench.proxy.limit(6.4 * MB)
    start = time.monotonic()
    write(storage, bench.new, BIG + BIG)
    assert time.monotonic() - start > seconds
    assert bench.left() == BIG + BIG


@pytest.fixture
def restored(seaweed: SeaweedFS) -> Iterator[None]:
    """The server of the session runs again afterwards, whatever a test did."""
    yield
    if not seaweed.running:
        seaweed.start()


def test_a_killed_server_has_the_old_object_whole_and_all_it_acknowledged(
    bench: Bench, restored: None, seaweed: SeaweedFS
) -> None:
    bench.direct.put(f"{bench.here}/old", b"old")
    acknowledged = {f"{bench.here}/acknowledged-{number}": os.urandom(10_000) for number in range(20)}
    for name, data in acknowledged.items():
        bench.direct.put(name, data)
    storage = bench.storage(2)

    def attempt(name: str) -> None:
        with pytest.raises(StorageError, match=f"write {bench.url}/{bench.here}/{name}"):
            write(storage, f"{bench.here}/{name}", BIG)

    bench.proxy.limit(10 * MB)
    reached = bench.proxy.when(UP, 10 * MB)
    with ThreadPoolExecutor(2) as pool:
        attempts = [pool.submit(attempt, name) for name in ("old", "new")]
        assert reached.wait(30)
        seaweed.kill()
    seaweed.start()
    for each in attempts:
        each.result()
    bench.proxy.ok()
    assert bench.left("old") == b"old"
    assert bench.left("new") is None
    assert {name: bench.direct.read(name) for name in acknowledged} == acknowledged
    assert write(storage, bench.new, BIG).size == len(BIG)
    assert bench.left() == BIG
    bench.leaves_no_upload()


def test_a_write_goes_on_through_a_restart_of_the_server(bench: Bench, restored: None, seaweed: SeaweedFS) -> None:
    reached = bench.proxy.when(UP, 7 * MB)

    def replace_server() -> None:
        if reached.wait(30):
            seaweed.kill()
            seaweed.start()

    replacer = threading.Thread(target=replace_server)
    replacer.start()
    write(bench.storage(60), bench.new, BIG)
    replacer.join()
    assert reached.is_set()
    assert bench.left() == BIG
    bench.leaves_no_upload()


def test_a_frozen_server_is_a_timeout_and_then_serves_again(bench: Bench, seaweed: SeaweedFS) -> None:
    storage = bench.storage(1)
    assert storage.read("shared/small") == SMALL
    seaweed.freeze()
    try:
        for act in (lambda: storage.read("shared/small"), lambda: write(storage, bench.new, BIG)):
            start = time.monotonic()
            with pytest.raises(StorageTimeout):
                act()
            assert time.monotonic() - start < 4
    finally:
        seaweed.thaw()
    assert bench.storage(30).read("shared/small") == SMALL
    assert bench.left() is None


def test_one_of_eight_racing_creators_wins(bench: Bench) -> None:
    storages = [bench.storage(30) for _ in range(8)]
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        try:
            storages[number].create(bench.new, b"%d" % number)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert bench.left() == b"%d" % won.index(True)


def test_a_lost_answer_to_a_create_is_no_lost_race(bench: Bench) -> None:
    storage = bench.storage(30)
    assert storage.list("shared") == ["big", "small"]  # connected: the next answers are those to the create
    bench.proxy.reset(DOWN, after=700)
    storage.create(bench.new, SMALL)
    assert bench.proxy.fired
    assert bench.left() == SMALL


def test_a_store_is_asked_whether_it_creates_exclusively(
    bench: Bench, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.direct.list(bench.here)
    places = [
        bench.direct,
        open_storage(s3.url, s3.options),
        open_storage("memory://probe/run"),
        LocalStorage(tmp_path),
    ]
    assert [creates_exclusively(place, f"{bench.here}/probe") for place in places] == [True] * 4
    assert bench.direct.list(bench.here) == before
    overwriting = open_storage("memory://probe/run")
    pipe_file = overwriting._fs.pipe_file  # type: ignore[attr-defined]
    monkeypatch.setattr(overwriting._fs, "pipe_file", lambda at, data, mode="overwrite": pipe_file(at, data))  # type: ignore[attr-defined]
    assert not creates_exclusively(overwriting, "probe")
    assert overwriting.list("") == []
