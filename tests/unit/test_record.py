"""What the main rank writes down."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import OUTSIDE, effective
from elastic_runner.data.tally import tally
from elastic_runner.storage import LocalStorage, open_storage
from elastic_runner.train.record import MainRecord, RunRecord, read_summary


def line(step: int, **changes: Any) -> dict[str, Any]:
    first = (step - 1) * 4
    return {
        "step": step, "epoch": 0, "first": first, "last": first + 4, "padded": 0, "dropped": 0, "length": 100,
        "loss": 1.0 / step, **changes,
    }  # fmt: skip


def attempt(storage: Any, number: int, resumed_at: int, steps: range) -> MainRecord:
    record = MainRecord(storage, attempt=number, target_step=20, restarts=number - 1)
    record.start(resumed_at, {"world": 1})
    for step in steps:
        record.step(line(step))
    return record


def test_lost_steps_and_samples_over_three_attempts(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    attempt(storage, 1, 0, range(1, 8))
    attempt(storage, 2, 5, range(6, 12))
    attempt(storage, 3, 10, range(11, 21)).end("finished")
    summary = read_summary(storage)
    assert summary is not None
    assert (summary.status, summary.step, summary.restarts, summary.lost_steps) == ("finished", 20, 2, 3)
    assert (summary.samples_seen, summary.samples_repeated, summary.samples_skipped) == (80, 0, 0)
    assert summary.train_loss == 1 / 20


def test_another_global_batch_than_before_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The audit would say so a month later. Steps that are lost do not count."""
    storage = LocalStorage(tmp_path)

    def start(number: int, resumed_at: int, batch: int) -> list[str]:
        caplog.clear()
        record = MainRecord(storage, attempt=number, target_step=20, restarts=number - 1)
        record.restored(1, resumed_at)
        record.start(resumed_at, {"world": 1, "global_batch": batch})
        record.step(line(resumed_at + 1, last=4 * resumed_at + batch))
        return [text for text in caplog.messages if "global_batch" in text]

    assert start(1, 0, 4) == []
    assert start(2, 1, 4) == []
    (said,) = start(3, 1, 8)
    assert "data.global_batch is 8 from here on, and was 4" in said
    assert start(4, 1, 4) == []


def test_the_ledger_is_durable_before_a_checkpoint_is_written() -> None:
    """On an object store, a kill right after the commit must not leave a gap below the checkpoint."""
    storage = open_storage("memory://record")
    record = attempt(storage, 1, 0, range(1, 6))
    assert not any(r["event"] == "step" for r in read_records(storage))
    record.saving()
    # Killed here, after the commit of step 5; the next attempt resumes at it.
    attempt(storage, 2, 5, range(6, 8)).end("interrupted")
    counts = tally(effective(read_records(storage))[0])
    assert (counts.steps, counts.gaps, counts.skipped) == (7, 0, 0)
    storage.delete("")


def starts(storage: Any) -> list[tuple[int, int, int | None]]:
    """Attempt, step, and whose state that was."""
    return [(r["attempt"], r["resumed_at"], r["rests_on"]) for r in read_records(storage) if r["event"] == "start"]


def test_a_start_says_what_it_rests_on(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = attempt(storage, 1, 0, range(1, 4))
    record.start(3, {})  # another loop over the same state
    record.start(2, {})  # from a file of the program's own
    record.restored(1, 1)
    record.start(1, {})
    again = MainRecord(storage, attempt=2, target_step=20, restarts=1)
    again.restored(1, 3)
    again.start(3, {})
    MainRecord(storage, attempt=3, target_step=20, restarts=2).start(0, {})
    assert starts(storage) == [(1, 0, 0), (1, 3, 1), (1, 2, None), (1, 1, 1), (2, 3, 1), (3, 0, 0)]


def test_an_attempt_that_takes_up_what_was_passed_over_counts_what_led_there(tmp_path: Path) -> None:
    """The checkpoint of step 10 could not be read once."""
    storage = LocalStorage(tmp_path)
    attempt(storage, 1, 0, range(1, 13)).evaluation(9, {"accuracy": 0.5})
    passing = MainRecord(storage, attempt=2, target_step=20, restarts=1)
    passing.restored(1, 5)
    passing.start(5, {"world": 1})
    for step in (6, 7):
        passing.step(line(step))
    passing.evaluation(7, {"accuracy": 0.1})
    again = MainRecord(storage, attempt=3, target_step=20, restarts=2)
    again.restored(1, 10)
    again.start(10, {"world": 1})
    summary = read_summary(storage)
    assert summary is not None and (summary.step, summary.samples_seen, summary.lost_steps) == (10, 40, 2 + 2)
    assert (summary.validation, summary.validation_step, summary.train_loss) == ({"accuracy": 0.5}, 9, 1 / 10)


def test_an_imported_state_has_skipped_nothing(tmp_path: Path) -> None:
    record = MainRecord(LocalStorage(tmp_path), attempt=1, target_step=20, restarts=0)
    record.restored(OUTSIDE, 10)
    record.start(10, {"world": 1})
    record.step(line(11))
    record.end("interrupted")
    summary = read_summary(LocalStorage(tmp_path))
    assert summary is not None and (summary.samples_seen, summary.samples_skipped) == (4, 0)


def test_a_start_reads_the_ledger_twice_and_keeps_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a run of 300,000 steps held 800 MB until it had restored. On an object store each read is a request."""
    storage = open_storage("memory://record-reads")
    attempt(storage, 1, 0, range(1, 9)).saving()
    read: list[str] = []
    whole = storage.read_range
    monkeypatch.setattr(storage, "read_range", lambda path, *span: (read.append(path), whole(path, *span))[1])
    record = MainRecord(storage, attempt=2, target_step=20, restarts=1)
    assert record.skips() == []
    record.restored(1, 7)
    record.recover(b"")
    record.start(7, {})
    assert read == [f"{paths.LEDGER}/{name}" for name in storage.list(paths.LEDGER) if name < "000002"] * 2
    assert not any(isinstance(held, list) and held for held in vars(record).values())
    storage.delete("")


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = attempt(storage, 1, 0, range(1, 2))
    record.step(line(2, loss=math.nan, grad_norm=math.inf))
    record.evaluation(2, {"accuracy": math.nan})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for name in (paths.SUMMARY, paths.ledger_segment(1, 0)):
        for text in storage.read(name).decode().split("\n{"):
            json.loads(text if text.startswith("{") else "{" + text, parse_constant=refuse)
    last = [r for r in read_records(storage) if r["event"] == "step"][-1]
    assert (last["loss"], last["grad_norm"]) == (None, None)


def test_the_last_evaluation_survives_a_restart(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    attempt(storage, 1, 0, range(1, 6)).evaluation(5, {"accuracy": 0.5})
    attempt(storage, 2, 5, range(6, 7)).end("interrupted")
    summary = read_summary(storage)
    assert summary is not None and (summary.validation, summary.validation_step) == ({"accuracy": 0.5}, 5)


def test_an_attempt_that_dies_before_it_restores_leaves_what_the_run_stood_at(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    attempt(storage, 1, 0, range(1, 11)).end("interrupted")
    MainRecord(storage, attempt=2, target_step=20, restarts=1).fail("ValueError: bad", consequence=False)
    summary = read_summary(storage)
    assert summary is not None
    assert (summary.status, summary.step, summary.samples_seen, summary.attempt) == ("failed", 10, 40, 2)


def test_the_first_cause_is_kept_whoever_writes_first(tmp_path: Path) -> None:
    for order in ("cause first", "consequence first"):
        storage = LocalStorage(tmp_path / order)
        main, peer = attempt(storage, 1, 0, range(1, 3)), RunRecord(storage, attempt=1)
        deaths = [(peer, "cause", False), (main, "lost a peer", True)]
        for record, message, consequence in deaths if order == "cause first" else reversed(deaths):
            record.fail(message, consequence=consequence)
        summary = read_summary(storage)
        assert summary is not None and (summary.status, summary.message) == ("failed", "cause")


def test_a_peer_of_an_old_attempt_writes_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    attempt(storage, 2, 0, range(1, 3))
    RunRecord(storage, attempt=1).fail("late", consequence=False)
    summary = read_summary(storage)
    assert summary is not None and summary.status == "running"


def test_a_newer_attempt_s_summary_stands(tmp_path: Path) -> None:
    """A process that was stopped wakes up after another attempt has finished the run."""
    storage = LocalStorage(tmp_path)
    old = attempt(storage, 1, 0, range(1, 3))
    attempt(storage, 2, 0, range(1, 21)).end("finished")
    old.step(line(3))
    old.fail("PeerLost: late", consequence=True)
    summary = read_summary(storage)
    assert summary is not None and (summary.status, summary.step, summary.attempt) == ("finished", 20, 2)


def test_something_else_in_the_place_of_the_summary_is_no_summary(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for text in (b"[]", b"{}", b'{"status": ', b"\xff"):
        storage.put(paths.SUMMARY, text)
        assert read_summary(storage) is None


class Hung(LocalStorage):
    """Answers nothing from when ``hung`` is set until ``gate`` is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.hung, self.reached, self.gate = False, threading.Event(), threading.Event()

    def sync(self, path: str) -> None:
        self._pass()
        super().sync(path)

    def read(self, path: str) -> bytes:
        self._pass()
        return super().read(path)

    def put(self, path: str, data: bytes) -> None:
        self._pass()
        super().put(path, data)

    def _pass(self) -> None:
        if self.hung:
            self.reached.set()
            assert self.gate.wait(30)


def held_up(root: Path) -> tuple[Hung, MainRecord, threading.Thread]:
    """After two steps, a save beside them that is held up by the storage while it is put on record."""
    storage = Hung(root)
    record = attempt(storage, 1, 0, range(1, 3))
    storage.hung = True
    saving = threading.Thread(target=record.committed, args=(2,))
    saving.start()
    assert storage.reached.wait(30)
    return storage, record, saving


def test_a_save_that_failed_is_counted_without_the_storage(tmp_path: Path) -> None:
    """All ranks wait for whoever tells it."""
    storage = Hung(tmp_path)
    record = attempt(storage, 1, 0, range(1, 3))
    storage.hung = True
    record.not_saved(skipped=True)
    record.not_saved(skipped=False)
    record.not_saved(skipped=False)
    assert not storage.reached.is_set()
    storage.hung = False
    assert (told := read_summary(storage)) is not None and (told.saves_skipped, told.saves_failed) == (0, 0)
    record.committed(2)
    assert (told := read_summary(storage)) is not None and (told.saves_skipped, told.saves_failed) == (1, 2)


def test_steps_go_on_while_a_save_beside_them_is_put_on_record(tmp_path: Path) -> None:
    storage, record, saving = held_up(tmp_path)
    for step in range(3, 6):
        record.step(line(step))
        record.not_saved(skipped=True)
    storage.gate.set()
    saving.join(30)
    summary = read_summary(storage)
    assert summary is not None and (summary.step, summary.samples_seen, summary.saves_skipped) == (5, 20, 3)


def test_an_older_summary_is_never_written_over_a_newer_one(tmp_path: Path) -> None:
    storage, record, saving = held_up(tmp_path)
    record.step(line(3))
    ending = threading.Thread(target=record.end, args=("finished",))
    ending.start()
    storage.gate.set()
    saving.join(30)
    ending.join(30)
    summary = read_summary(storage)
    assert summary is not None and (summary.status, summary.step) == ("finished", 3)


def test_counts_of_threads_do_not_get_lost(tmp_path: Path) -> None:
    record = attempt(LocalStorage(tmp_path), 1, 0, range(0))
    over = threading.Event()

    def publish() -> None:
        while not over.is_set():
            record.committed(1)

    saving = threading.Thread(target=publish)
    saving.start()
    for step in range(1, 201):
        record.step(line(step, epoch=0, length=1000))
        record.not_saved(skipped=True)
    over.set()
    saving.join(30)
    record.end("finished")
    summary = read_summary(LocalStorage(tmp_path))
    assert summary is not None and (summary.step, summary.samples_seen, summary.saves_skipped) == (200, 800, 200)
