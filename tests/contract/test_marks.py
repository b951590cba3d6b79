"""Marks are found by the listing alone, belong to one manifest, and change nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Listing, list_checkpoints
from elastic_runner.checkpoint.marks import Marks, mark_suspect, pin, read_marks, reading, reasons, unpin
from elastic_runner.errors import AccessDenied, NotFound, StorageError
from elastic_runner.storage import LocalStorage, Storage
from tests.support.checkpointing import CheckpointingPlace, storage_of
from tests.support.committed import commit


@pytest.fixture
def storage(place: CheckpointingPlace) -> Storage:
    return storage_of(place)


def marks(storage: Storage) -> dict[tuple[int, int], Marks]:
    listing: Listing = list_checkpoints(storage)
    return {(c.manifest.step, c.manifest.attempt): c.marks for c in listing.checkpoints}


def test_pinned_and_unpinned(storage: Storage) -> None:
    one, other = commit(storage, 5, 1), commit(storage, 5, 2)
    pin(storage, one)
    pin(storage, one)
    assert {key: m.pinned for key, m in marks(storage).items()} == {(5, 2): False, (5, 1): True}
    unpin(storage, other)
    assert marks(storage)[5, 1].pinned
    unpin(storage, one)
    unpin(storage, one)
    assert marks(storage) == {(5, 2): Marks(), (5, 1): Marks()}


def test_suspicions_of_several_attempts_add_up(storage: Storage) -> None:
    one, other = commit(storage, 5), commit(storage, 6)
    for attempt, reason in ((2, "first"), (2, "second"), (3, "third")):
        mark_suspect(storage, one, reason, attempt)
    found = marks(storage)
    assert found[5, 1].suspect and not found[6, 1].suspect
    assert reasons(storage, found[5, 1]) == ["first", "third"]
    record = json.loads(storage.read(found[5, 1].suspicions[0]))
    assert record["attempt"] == 2 and abs(record["when"] - time.time()) < 60 and ":" in record["who"]
    assert reasons(storage, read_marks(storage, other)) == []


def test_a_lease_lasts_as_long_as_the_reading(storage: Storage) -> None:
    one = commit(storage, 5)
    with pytest.raises(KeyError), reading(storage, one), reading(storage, one):
        found = marks(storage)[5, 1]
        assert len(found.readers) == 2 and found.being_read(time.time())
        raise KeyError("of the reader")
    assert marks(storage)[5, 1] == Marks()


def test_what_was_deleted_before_is_neither_read_nor_pinned(storage: Storage) -> None:
    one = commit(storage, 5)
    storage.delete(paths.step_directory(5))
    with pytest.raises(NotFound, match="manifest-000001"), reading(storage, one):
        pytest.fail("it is gone")
    with pytest.raises(NotFound, match="manifest-000001"):
        pin(storage, one)
    assert storage.list("") == [] or storage.list(paths.step_directory(5)) == []


class Refusing(LocalStorage):
    """Takes and deletes no marks."""

    refused: StorageError = AccessDenied("read-only")

    def put(self, path: str, data: bytes) -> None:
        raise self.refused

    create = put

    def delete(self, path: str) -> None:
        raise self.refused


def test_a_storage_that_cannot_be_written_to_can_be_read(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = commit(LocalStorage(tmp_path), 5)
    storage = Refusing(tmp_path)
    with reading(storage, one):
        assert marks(storage)[5, 1].readers == ()
    mark_suspect(storage, one, "whatever", 2)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "step 5 is read without a lease",
        "step 5 could not be marked suspect",
    ]
    with pytest.raises(AccessDenied):
        pin(storage, one)


def test_a_lease_that_cannot_be_removed_hides_no_error(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = commit(LocalStorage(tmp_path), 5)

    class Keeping(LocalStorage):
        def delete(self, path: str) -> None:
            raise StorageError("not now")

    with pytest.raises(KeyError), reading(Keeping(tmp_path), one):
        raise KeyError("of the reader")
    assert "could not be removed: not now" in caplog.text


def test_names_of_marks_say_what_they_are() -> None:
    assert paths.mark(paths.pin(5, 7).rpartition("/")[2]) == ("pinned", 7, 0)
    assert paths.mark(paths.suspicion(5, 7, 9).rpartition("/")[2]) == ("suspect", 7, 9)
    assert paths.mark(paths.lease(5, 7, 1.8e9 + 0.5, "ab12").rpartition("/")[2]) == ("reading", 7, 1_800_000_000)
    for foreign in ("pinned-7.json", "pinned-000007-1.json", "suspect-000007.json", "reading-000007.json", "notes"):
        assert paths.mark(foreign) is None
    assert paths.committed(paths.manifest(5, 7)) == (5, 7)
    assert paths.committed("step-0000000005/data-000007") is None


def test_marks_need_no_read(tmp_path: Any) -> None:
    one = commit(LocalStorage(tmp_path), 5)
    pin(LocalStorage(tmp_path), one)
    mark_suspect(LocalStorage(tmp_path), one, "whatever", 2)
    read: list[str] = []

    class Counting(LocalStorage):
        def read(self, path: str) -> bytes:
            read.append(path)
            return super().read(path)

    assert marks(Counting(tmp_path))[5, 1].pinned
    assert read == [one.path]
