"""When a step's line goes on record, and that it goes there once whatever is killed when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.checkpoint.snapshot_plan import Memory
from elastic_runner.checkpoint.snapshots import Report, Snapshots
from elastic_runner.config import SnapshotConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import tally
from elastic_runner.storage import LocalStorage, Storage, open_storage
from elastic_runner.train.lines import CARRIED, StepLines, missing
from elastic_runner.train.record import MainRecord, RunRecord
from tests.unit.test_record import line


class Written:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines = StepLines(lambda record: self.steps.append(record["step"]), attempt=3)

    def add(self, *steps: int) -> None:
        for step in steps:
            self.lines.add({"event": "step", "step": step})


def test_without_snapshots_lines_are_there_at_once() -> None:
    written = Written()
    written.add(1, 2)
    assert written.steps == [1, 2] and written.lines.recent() == b""


def test_lines_wait_until_they_are_released() -> None:
    written = Written()
    written.lines.hold(True)
    written.add(1, 2, 3)
    assert written.steps == []
    written.lines.release(2)
    assert written.steps == [1, 2]
    written.lines.release(2)
    written.lines.hold(False)
    assert written.steps == [1, 2, 3]


def test_a_snapshot_carries_what_no_checkpoint_covers() -> None:
    written = Written()
    written.lines.hold(True)
    written.add(1, 2, 3)
    written.lines.release(3)
    written.lines.saved(1)
    carried = [json.loads(text) for text in written.lines.recent().splitlines()]
    assert [(one["step"], one["attempt"]) for one in carried] == [(2, 3), (3, 3)]
    assert [one["step"] for one in missing(written.lines.recent(), 2, 3)] == [3]
    assert list(missing(written.lines.recent(), 0, 1)) == []


def test_what_a_snapshot_carries_has_an_end() -> None:
    """Where no checkpoint is ever made; lines that wait are never left out."""
    written = Written()
    written.lines.hold(True)
    written.add(*range(1, 3 * CARRIED))
    assert len(written.lines.recent().splitlines()) == 3 * CARRIED - 1
    written.lines.release(3 * CARRIED)
    written.add(3 * CARRIED)
    carried = [json.loads(text)["step"] for text in written.lines.recent().splitlines()]
    assert carried == list(range(2 * CARRIED, 3 * CARRIED + 1))


# The rule of checkpoint/snapshots.py, without a state.


class Told:
    def __init__(self) -> None:
        self.holding: list[bool] = []
        self.released: list[int] = []

    def hold(self, on: bool) -> None:
        self.holding.append(on)

    def release(self, step: int) -> None:
        self.released.append(step)

    def recent(self) -> bytes:
        return b""


def snapshots(told: Told, **settings: Any) -> Snapshots:
    memory = Memory(files=(("/nowhere/a", "/nowhere/b"),))
    return Snapshots(SnapshotConfig(**settings), memory, told, Coordinator(), run="r", attempt=1)


def report(held: int, *, able: bool = True, misfit: bool = False, every: int = 1) -> Report:
    return Report(able=able, held=held, misfit=misfit, every=every)


def test_a_line_waits_for_the_slowest_rank() -> None:
    told = Told()
    mine = snapshots(told)
    for step, held in enumerate([(-1, -1), (1, 1), (2, 1)]):
        mine._due = step + 1
        mine.hear([report(one) for one in held], step)
    assert told.released == [-1, 1, 1] and all(told.holding)


def test_one_rank_without_memory_and_nobody_waits() -> None:
    told = Told()
    mine = snapshots(told)
    mine.hear([report(-1), report(-1, able=False)], 0)
    assert told.holding == [False]


def test_a_loop_that_never_asks_does_not_keep_its_lines_waiting() -> None:
    """maybe_save is not called: nothing would ever be held."""
    told = Told()
    mine = snapshots(told)
    for step in range(4):
        mine.hear([report(-1), report(-1)], step)
    assert told.released == [-1, 1, 2, 3]


def test_lines_wait_for_the_next_snapshot_where_not_every_step_has_one() -> None:
    told = Told()
    mine = snapshots(told)
    mine.hear([report(-1, every=1)], 0)
    mine._held, mine._due = 1, 2  # taken
    mine.hear([report(1, every=4)], 1)
    for step in (2, 3, 4):
        mine.hear([report(1, every=4)], step)
    assert mine._due == 5
    mine._held, mine._due = 5, 9
    mine.hear([report(5, every=4)], 5)
    assert told.released == [-1, 1, 1, 1, 1, 5]


def test_a_rank_whose_state_has_another_shape_makes_all_lay_out_anew() -> None:
    told = Told()
    mine = snapshots(told)
    mine._lay_out_next, mine._held, mine._due = False, 3, 4
    mine.hear([report(3), report(2, misfit=True)], 3)
    assert mine._lay_out_next and mine._due == 4 and told.released == [2]


# On record.


@pytest.fixture(params=["files", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "files":
        return LocalStorage(tmp_path)
    return open_storage(f"memory://lines-{tmp_path.name}")


def main_record(storage: Storage, number: int) -> MainRecord:
    record = MainRecord(storage, attempt=number, target_step=20, restarts=number - 1)
    record.start(0, {}) if number == 1 else None
    record.lines.hold(True)
    return record


@pytest.mark.parametrize("released", [0, 2, 5, 6])
@pytest.mark.parametrize("held", [5, 6])
def test_each_step_is_on_record_once_whatever_was_released(storage: Storage, released: int, held: int) -> None:
    """Rank 0 was killed at any place after step 6; all ranks hold ``held``."""
    first, peer = main_record(storage, 1), RunRecord(storage, attempt=1)
    peer.lines.hold(True)
    for step in range(1, held + 1):
        first.step(line(step))
        peer.step(line(step))
    first.lines.release(min(released, held))
    for carried in (first.lines.recent(), peer.lines.recent()):
        assert len(carried.splitlines()) == held
        second = main_record(storage, 2)  # the second time it was killed before its own first line
        second.restored(1, held)
        second.recover(carried)
    second.start(held, {})
    for step in range(held + 1, 9):
        second.step(line(step))
    second.end("finished")
    records, lost = effective(read_records(storage))
    counts = tally(records)
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped, lost) == (8, 0, 0, 0, 0)


def test_a_failure_puts_no_waiting_line_on_record(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = main_record(storage, 1)
    record.step(line(1))
    record.fail("a peer is gone", consequence=True)
    assert not [r for r in read_records(storage) if r["event"] == "step"]


def test_a_program_that_goes_back_on_its_own_has_lost_what_it_did(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = main_record(storage, 1)
    for step in (1, 2, 3):
        record.step(line(step))
    record.start(1, {})
    record.lines.hold(True)
    for step in (2, 3):
        record.step(line(step))
    record.end("finished")
    records, lost = effective(read_records(storage))
    assert [r["step"] for r in records if r["event"] == "step"] == [1, 2, 3] and lost == 2


def test_an_evaluation_comes_after_its_step(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    record = main_record(storage, 1)
    record.step(line(1))
    record.evaluation(1, {"accuracy": 0.5})
    record.lines.release(1)
    assert [r["event"] for r in read_records(storage)] == ["start", "step", "evaluation"]
