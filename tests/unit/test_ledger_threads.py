"""The ledger between two threads: steps append while a save beside training flushes."""

from __future__ import annotations

import errno
import os
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.data import ledger
from elastic_runner.data.ledger import LedgerWriter, read_records
from elastic_runner.errors import StorageError
from elastic_runner.storage import Storage, open_storage


class Stubborn:
    """An object store whose ``put`` fails when told so, having written or not, and can be held up."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.fails: list[str] = []
        """One word for each put to come: "" (fine), "before" or "after" it was written."""
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, path: str, data: bytes) -> None:
        self.reached.set()
        assert self.gate.wait(60)
        how = self.fails.pop(0) if self.fails else ""
        if how == "before":
            raise StorageError("nothing was written")
        self.inner.put(path, data)
        if how == "after":
            raise StorageError("the answer was lost")


@pytest.fixture
def store() -> Iterator[Stubborn]:
    opened = Stubborn(open_storage(f"memory://ledger-{uuid.uuid4().hex}"))
    yield opened
    opened.delete("")


def line(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number}


def lines(storage: Any) -> list[int]:
    return [record["step"] for record in read_records(storage)]


def append_while_flushing(writer: LedgerWriter, count: int) -> None:
    """``count`` lines, and flushes beside them all the time, whose errors do not matter."""
    over = threading.Event()

    def flush() -> None:
        while not over.is_set():
            try:
                writer.flush()
            except StorageError:
                continue

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        for number in range(count):
            writer.append(line(number))
    finally:
        over.set()
        thread.join()


def test_no_line_is_lost_or_doubled_and_the_order_stays(store: Stubborn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_SEGMENT_LINES", 16)
    writer = LedgerWriter(store, 1)  # type: ignore[arg-type]
    append_while_flushing(writer, 2000)
    writer.flush()
    assert lines(store) == list(range(2000))


@pytest.mark.parametrize("how", ["before", "after"])
def test_also_where_puts_fail_now_and_then(how: str, store: Stubborn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_SEGMENT_LINES", 16)
    store.fails = ["", how, "", "", how, how, ""] * 20
    writer = LedgerWriter(store, 1)  # type: ignore[arg-type]
    append_while_flushing(writer, 2000)
    store.fails = [how]
    writer.append(line(2000))
    with pytest.raises(StorageError):
        writer.flush()
    writer.append(line(2001))
    writer.flush()
    assert lines(store) == list(range(2002))


def test_a_step_does_not_wait_for_a_flush(store: Stubborn) -> None:
    writer = LedgerWriter(store, 1)  # type: ignore[arg-type]
    writer.append(line(0))
    store.gate.clear()
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    assert store.reached.wait(60)
    writer.append(line(1))
    store.gate.set()
    flushing.join()
    assert lines(store) == [0]
    writer.flush()
    assert lines(store) == [0, 1]


def test_a_full_segment_that_cannot_be_written_does_not_end_a_step(
    store: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again one segment later; a save says it."""
    monkeypatch.setattr(ledger, "_SEGMENT_LINES", 16)
    store.fails = ["before"] * 3
    writer = LedgerWriter(store, 1)  # type: ignore[arg-type]
    for number in range(40):
        writer.append(line(number))
    assert len(store.fails) == 1, "not at every line"
    with pytest.raises(StorageError):
        writer.flush()
    writer.flush()
    assert lines(store) == list(range(40))
    assert store.list(paths.LEDGER) == ["000001-000000.jsonl"]


def test_a_local_sync_that_fails_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    writer = LedgerWriter(storage, 1)
    synced: list[str] = []
    monkeypatch.setattr(storage, "sync", synced.append)
    writer.append(line(0))

    def refuse(path: str) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(storage, "sync", refuse)
        writer.flush()
    assert not synced
    writer.flush()
    writer.flush()
    assert synced == [paths.ledger_segment(1, 0)]


@pytest.mark.parametrize("seed", range(8))
def test_a_disk_that_is_full_now_and_then(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write takes some bytes before it fails, and what waited is written later: nothing twice, nothing glued."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    write = os.write

    def filling(handle: int, data: memoryview) -> int:
        if draw.random() < 0.3:
            write(handle, data[: draw.randrange(len(data))])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    storage = open_storage(str(tmp_path))
    writer = LedgerWriter(storage, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        for number in range(100):
            writer.append(line(number))
            if draw.random() < 0.3:
                with suppress(StorageError):
                    writer.flush()
    writer.append(line(100))
    writer.flush()
    assert lines(storage) == list(range(101))


def test_a_local_ledger_under_two_threads(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    append_while_flushing(LedgerWriter(storage, 1), 300)
    assert lines(storage) == list(range(300))
