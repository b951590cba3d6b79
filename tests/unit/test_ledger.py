"""The ledger: what was written is read, in order, whatever was torn."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_runner import paths
from elastic_runner.data import ledger
from elastic_runner.data.ledger import LedgerWriter, read_records
from elastic_runner.errors import StorageError
from elastic_runner.storage import LocalStorage, Storage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = str(tmp_path) if request.param == "local" else f"memory://ledger-{uuid.uuid4().hex}"
    opened = open_storage(url)
    yield opened
    opened.delete("")


def test_what_is_appended_and_flushed_is_read_in_order(storage: Storage) -> None:
    written = [{"event": "step", "step": step} for step in range(1, 601)]
    for attempt, part in ((1, written[:300]), (2, written[300:])):
        writer = LedgerWriter(storage, attempt)
        for record in part:
            writer.append(record)
        writer.flush()
        writer.flush()  # nothing is pending: nothing is written twice
    assert list(read_records(storage)) == written


def test_local_lines_are_there_without_a_flush(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    LedgerWriter(storage, 1).append({"event": "start", "resumed_at": 0})
    assert list(read_records(storage)) == [{"event": "start", "resumed_at": 0}]


def test_object_stores_get_a_segment_when_it_is_full() -> None:
    storage = open_storage(f"memory://ledger-{uuid.uuid4().hex}")
    writer = LedgerWriter(storage, 3)
    for number in range(257):
        writer.append({"event": "step", "step": number})
    assert storage.list(paths.LEDGER) == ["000003-000000.jsonl"]
    assert len(list(read_records(storage))) == 256
    writer.flush()
    assert len(list(read_records(storage))) == 257
    storage.delete("")


def test_failed_flush_keeps_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://ledger-{uuid.uuid4().hex}")
    writer = LedgerWriter(storage, 1)
    writer.append({"event": "step", "step": 1})

    def refuse(path: str, data: bytes) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(storage, "put", refuse)
        writer.flush()
    writer.append({"event": "step", "step": 2})
    writer.flush()
    assert [record["step"] for record in read_records(storage)] == [1, 2]
    storage.delete("")


@pytest.mark.parametrize("torn", [b'{"event":"step","st', b'{"event":"step","step":3}', b"\xff\xfe", b'{"a\n', b"7\n"])
def test_torn_tail_of_one_attempt_is_left_out_and_the_next_is_read(storage: Storage, torn: bytes) -> None:
    whole = json.dumps({"event": "step", "step": 1}).encode() + b"\n"
    storage.put(paths.ledger_segment(1, 0), whole + torn)
    storage.put(paths.ledger_segment(2, 0), whole.replace(b"1", b"2"))
    assert [record["step"] for record in read_records(storage)] == [1, 2]


@pytest.mark.parametrize("written", [0, 9, -1, None], ids=["nothing", "a part", "all but its end", "all"])
def test_a_line_whose_append_failed_is_there_once_whatever_was_written(written: int | None, tmp_path: Path) -> None:
    """NFS may say that a write has failed after its server has done it; an audit would find the step twice."""

    class Trouble(LocalStorage):
        fails = False

        def append(self, path: str, data: bytes) -> bool:
            done = super().append(path, data[:written] if self.fails else data)
            if self.fails:
                raise StorageError("the answer was lost")
            return done

    storage = Trouble(tmp_path)
    writer = LedgerWriter(storage, 1)
    for step in range(1, 7):
        storage.fails = step in (1, 3, 4)
        writer.append({"event": "step", "step": step})
    assert [record["step"] for record in read_records(storage)] == [1, 2, 3, 4, 5, 6]


def test_no_ledger_is_an_empty_one(storage: Storage) -> None:
    assert list(read_records(storage)) == []


@pytest.mark.parametrize("block", [1, 7, 60, 61, 1000])
def test_a_ledger_is_read_in_blocks_of_any_size(block: int, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_BLOCK", block)
    written = [{"event": "step", "step": step, "words": "é\r " * step} for step in range(9)]
    storage.put(paths.ledger_segment(1, 0), b"".join(json.dumps(r).encode() + b"\n" for r in written) + b'{"torn')
    assert list(read_records(storage)) == written


def test_no_file_of_a_ledger_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    """Rank 0 of a run of 300,000 steps needed 1 GB at each start."""

    class Blocks(LocalStorage):
        def read(self, path: str) -> bytes:
            raise AssertionError("the whole file is read")

    LedgerWriter(LocalStorage(tmp_path), 1).append({"event": "step", "step": 1})
    assert len(list(read_records(Blocks(tmp_path)))) == 1
