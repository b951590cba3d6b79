"""How attempts ended, on record: by the first rank that had the error, whatever else lies there."""

from __future__ import annotations

import json
from pathlib import Path

from elastic_runner import paths
from elastic_runner.history import End, read_ends, write_end
from elastic_runner.storage import LocalStorage
from elastic_runner.worker.attempt import attempts, begin_attempt


def end(attempt: int, kind: str = "ValueError", rank: int = 0, message: str = "") -> End:
    return End(attempt=attempt, kind=kind, step=23, restored=paths.manifest(20, 1), rank=rank, message=message)


def test_the_first_rank_s_word_stands(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first = end(1, rank=1, message="rank 1: ValueError: bad")
    write_end(storage, first)
    write_end(storage, end(1, "KeyError", message="rank 0: KeyError: other"))
    assert read_ends(storage) == [first]


def test_ends_are_read_in_order_past_torn_and_foreign_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for number in (1, 2, 10):
        assert begin_attempt(storage, {}) <= number
        write_end(storage, end(number))
    for number, data in ((3, b"{"), (4, b"[]"), (5, b"{}"), (6, b"\xff")):
        storage.put(paths.attempt_end(number), data)
    storage.put(f"{paths.ATTEMPTS}/notes", b"x")
    assert read_ends(storage) == [end(1), end(2), end(10)]
    assert attempts(storage) == [1, 2, 3], "ends are no attempts"


def test_what_a_newer_version_adds_is_left_out(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write_end(storage, end(1))
    record = json.loads(storage.read(paths.attempt_end(1)))
    storage.put(paths.attempt_end(1), json.dumps({**record, "mood": "bad"}).encode())
    assert read_ends(storage) == [end(1)]


def test_only_the_latest_are_read(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for number in range(1, 101):
        write_end(storage, end(number))
    assert [e.attempt for e in read_ends(storage)] == list(range(37, 101))
