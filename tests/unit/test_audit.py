"""The audit: a good ledger is proven, and each kind of damage to it is named."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.cli.audit import audit as audit_verb
from elastic_runner.config import DataConfig
from elastic_runner.data.audit import Audit, audit
from elastic_runner.data.claims import TOLD, Finding
from elastic_runner.data.coverage import NAMED, describe
from elastic_runner.data.digest import Recomputed, batch_digest, shard_digest
from elastic_runner.data.ledger import Record, parse, read_records
from elastic_runner.data.order import samples_at
from elastic_runner.errors import NotFound
from elastic_runner.storage import open_storage
from tests.support.place import SoloPlace
from tests.support.simulated_run import Life, SimulatedRun, encoded

LENGTH, BATCH, SHARDS = 50, 12, 3
TAIL = LENGTH % BATCH


def run(url: str, **settings: Any) -> SimulatedRun:
    """Steps 1 to 12, over three epochs of four steps: attempt 2 resumes at 6, attempt 3, in memory, at 9."""
    config = DataConfig(global_batch=BATCH, shards=SHARDS, **settings)
    result = SimulatedRun(open_storage(url), config, length=LENGTH, seed=7)
    result.live(Life(world=2, steps=8, save_every=6))
    result.live(Life(world=3, steps=3, in_memory=True))
    result.live(Life(world=1, steps=3, save_every=1))
    return result


@pytest.fixture(scope="module")
def records() -> list[Record]:
    simulated = run(f"memory://audit-{uuid.uuid4().hex}")
    result = list(read_records(simulated.storage))
    simulated.storage.delete("")
    # Object stores lose what was not flushed; here that is lost which was on record.
    lost = [dict(record, attempt=1) for record in result if record.get("step") in (7, 8) and record["attempt"] == 2]
    at = next(i for i, record in enumerate(result) if record.get("attempt") == 2)
    return [*result[:at], *lost, *result[at:]]


def judge(records: list[Record]) -> Audit:
    return audit(lambda: iter(records))


def faults(found: Audit) -> dict[str, tuple[str, ...]]:
    return {finding.name: finding.faults for finding in found.findings if finding.count}


def of(found: Audit, name: str) -> Finding:
    return next(finding for finding in found.findings if finding.name == name)


def still_open(found: Audit) -> set[str]:
    return {finding.name for finding in found.findings if finding.verdict == "open"}


def where(records: list[Record], step: int) -> int:
    """The line of a step that led to the present state."""
    return max(i for i, record in enumerate(records) if record.get("step") == step)


def changed(records: list[Record], at_step: int, /, **changes: Any) -> list[Record]:
    at = where(records, at_step)
    return [*records[:at], {**records[at], **changes}, *records[at + 1 :]]


def starting(records: list[Record], attempt: int, **changes: Any) -> list[Record]:
    return [r | changes if r["event"] == "start" and r["attempt"] == attempt else r for r in records]


def test_a_good_ledger_is_proven(records: list[Record]) -> None:
    found = judge(records)
    assert faults(found) == {}
    assert (found.verdict, found.steps, found.lost) == ("proven", 12, 2)
    assert [(a.attempt, a.world, a.resumed_at, a.steps, a.lost) for a in found.attempts] == [
        (1, 2, 0, 6, 2),
        (2, 3, 6, 3, 0),
        (3, 1, 9, 3, 0),
    ]
    assert of(found, "steps").seen == "up to step 12"
    assert of(found, "resumes").seen == "2 resumes"
    assert of(found, "coverage").seen == f"3 whole epochs of {LENGTH} samples"
    assert of(found, "order").seen == "seed 7, 12 digests computed again"
    (dropped,) = found.portions
    assert (dropped.kind, dropped.first_epoch, dropped.last_epoch, dropped.count) == ("dropped", 0, 2, TAIL)
    assert dropped.positions == ((LENGTH - TAIL, LENGTH),)
    assert list(dropped.samples) == samples_at(range(LENGTH - TAIL, LENGTH), length=LENGTH, seed=7, epoch=0)
    assert describe(dropped) == (
        "2 samples dropped in each of epochs 0 to 2: positions 48 to 49 "
        f"(samples {dropped.samples[0]}, {dropped.samples[1]} in epoch 0)"
    )


def test_padding_is_told_and_is_no_fault() -> None:
    padded = judge(list(read_records(run(f"memory://audit-{uuid.uuid4().hex}", last_batch="pad").storage)))
    assert padded.verdict == "proven"
    assert [(p.kind, p.first_epoch, p.last_epoch, p.count) for p in padded.portions] == [("padded", 0, 1, BATCH - TAIL)]
    assert of(padded, "coverage").seen == f"2 whole epochs of {LENGTH} samples, 24 of the {LENGTH} samples of epoch 2"


# Each kind of damage, by what the audit says of it.


def without(records: list[Record], *steps: int) -> list[Record]:
    return [r for i, r in enumerate(records) if i not in {where(records, step) for step in steps}]


def doubled(records: list[Record]) -> list[Record]:
    at = where(records, 10)
    return [*records[: at + 1], records[at], *records[at + 1 :]]


def swapped(records: list[Record]) -> list[Record]:
    at = where(records, 10)
    return [*records[:at], records[at + 1], records[at], *records[at + 2 :]]


def digest_of(records: list[Record], step: int, *, seed: int) -> str:
    line = records[where(records, step)]
    place = {name: line[name] for name in ("epoch", "first")}
    return Recomputed(seed=seed, length=LENGTH).digest(**place, size=BATCH, shards=SHARDS)


Damage = Callable[[list[Record]], list[Record]]
KINDS: dict[str, tuple[Damage, dict[str, str]]] = {
    "line missing": (
        lambda r: without(r, 11),
        {"steps": "step 11 is not on record", "coverage": "12 samples skipped in epoch 2: positions 24 to 35 (samples"},
    ),
    "lines missing": (lambda r: without(r, 10, 11), {"steps": "steps 10 to 11 are not", "coverage": "24 samples"}),
    "first lines missing": (
        lambda r: without(r, 1, 2),
        {"steps": "steps 1 to 2 are not", "coverage": "positions 0 to"},
    ),
    "line doubled": (
        doubled,
        {"steps": "step 10 comes after step 10", "coverage": "12 samples repeated in epoch 2: positions 12 to 23 (sam"},
    ),
    "lines swapped": (swapped, {"steps": "step 10 is not on record"}),
    "digest of another seed": (
        lambda r: changed(r, 10, digest=digest_of(r, 10, seed=8)),
        {"order": "step 10 was given other samples than seed 7 has at positions 12 to 23 of epoch 2"},
    ),
    "digest of another step": (
        lambda r: changed(r, 10, digest=r[where(r, 9)]["digest"]),
        {"order": "step 10 was given other samples"},
    ),
    "digest in another order of shards": (lambda r: changed(r, 1, digest=exchanged()), {"order": "step 1 was given"}),
    "another seed": (lambda r: starting(r, 3, seed=8), {"order": "step 10: attempt 3 has seed 8, the steps before 7"}),
    "batch changed": (
        lambda r: changed(r, 12, last=LENGTH),
        {"batch": "step 12 (attempt 3) took 14 samples, the one before 12", "order": "step 12 was given other"},
    ),
    "batch other than configured": (
        lambda r: starting(r, 1, global_batch=24),
        {"batch": "step 1 (attempt 1) took 12 samples, data.global_batch was 24"},
    ),
    "resume beyond the record": (
        lambda r: without(starting(r, 3, resumed_at=10), 10),
        {"resumes": "attempt 3 resumed after step 10, but the record ends at step 9", "coverage": "12 samples skipped"},
    ),
    "resume at another place": (
        lambda r: changed(r, 10, first=24, last=36, digest=None),
        {
            "resumes": "attempt 3, step 10: takes its samples from position 24 of epoch 2, not 12",
            "coverage": "12 samples skipped in epoch 2: positions 12 to 23",
            "order": "step 11: takes its samples from position 24",
        },
    ),
    "step out of turn": (
        lambda r: changed(r, 12, first=24, last=36, digest=None),
        {"order": "step 12: takes its samples from position 24 of epoch 2, not 36", "coverage": "12 samples repeated"},
    ),
    "epoch passed over": (
        lambda r: [x | {"epoch": 3} if x.get("epoch") == 2 else x for x in r],
        {"order": "step 9: takes its samples from position 0 of epoch 3", "coverage": "50 samples skipped in epoch 2"},
    ),
    "epoch again": (
        lambda r: changed(r, 9, epoch=1),
        {
            "order": "step 9: takes its samples from position 0 of epoch 1",
            "resumes": "attempt 3, step 10: takes its samples from position 12 of epoch 2, not 12 of epoch 1",
            "coverage": "12 samples repeated in epoch 1: positions 0 to 11",
        },
    ),
    "attempt missing": (
        lambda r: [x for x in r if x["attempt"] != 2],
        {"resumes": "attempt 3 resumed after step 9, but the record ends at step 8", "coverage": "12 samples skipped"},
    ),
    "start missing": (
        lambda r: [x for x in r if not (x["event"] == "start" and x["attempt"] == 3)],
        {"resumes": "step 10 is of attempt 3, whose start is not on record"},
    ),
    "line of another attempt": (
        lambda r: changed(r, 11, attempt=2),
        {"steps": "step 11 is not on record", "coverage": "12 samples skipped in epoch 2: positions 24 to 35"},
    ),
    "attempts that fall": (
        lambda r: [x | {"attempt": 1} if x["attempt"] == 3 else x for x in r],
        {"resumes": "attempt 1 starts, after attempt 2"},
    ),
    "dataset changed": (
        lambda r: changed(r, 10, length=51),
        {"coverage": "step 10: the dataset has 51 samples, before"},
    ),
    "padded too early": (
        lambda r: changed(r, 10, last=23, padded=1),
        {"coverage": "step 10 takes positions 12 to 22 of epoch 2 and 1 from its start", "order": "step 11: takes"},
    ),
    "beyond the epoch": (
        lambda r: changed(r, 12, first=39, last=51, digest=None),
        {"coverage": "step 12 takes positions 39 to 50 of epoch 2", "order": "step 12: takes"},
    ),
    "no learning rate": (lambda r: changed(r, 4, lr=None), {"rates": "step 4 has no lr"}),
    "no scale": (
        lambda r: [{k: v for k, v in x.items() if k != "scale"} for x in r],
        {"rates": "step 1 has no"},
    ),
    "line without positions": (
        lambda r: [x if x is not r[where(r, 4)] else {"event": "step", "step": 4} for x in r],
        {"steps": "the line of step 4 lacks", "coverage": "12 samples skipped in epoch 0: positions 36 to 47"},
    ),
}


def exchanged() -> str:
    """Of the first batch, with two shards in each other's place."""
    samples = samples_at(range(BATCH), length=LENGTH, seed=7, epoch=0)
    return batch_digest([shard_digest(samples[at : at + 4]) for at in (4, 0, 8)])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage_is_named(records: list[Record], kind: str) -> None:
    damage, wanted = KINDS[kind]
    found = judge(damage(records))
    assert found.verdict == "refuted"
    told = faults(found)
    assert set(told) == set(wanted), told
    for name, words in wanted.items():
        assert any(words in fault for fault in told[name]), told


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_line_that_led_here_can_go_or_change_unseen(records: list[Record], data: st.DataObject) -> None:
    step = data.draw(st.integers(1, 11))
    assert judge(without(records, step)).verdict == "refuted"
    name = data.draw(st.sampled_from(["step", "epoch", "first", "last", "padded", "length", "digest"]))
    line = records[where(records, step)]
    value = data.draw(st.text("0123456789abcdef", min_size=16, max_size=16) if name == "digest" else st.integers(0, 99))
    if value != line[name]:
        assert judge(changed(records, step, **{name: value})).verdict == "refuted"


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_byte_that_changed_ends_in_an_error(records: list[Record], data: st.DataObject) -> None:
    lines = [encoded(record) for record in records]
    number = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[number]) - 2))
    digits = data.draw(st.sampled_from([b"0", b"9", b"e", b"99999999999", b"-", b""]))
    lines[number] = lines[number][:at] + digits + lines[number][at + 1 :]
    judge(list(parse(lines)))


def test_a_rank_that_draws_other_samples_is_caught() -> None:
    """What each rank's loader has fetched is digested, not what it should have fetched."""

    class Astray(SimulatedRun):
        def place(self, rank: int, world: int) -> SoloPlace:
            return SoloPlace(seed=self.seed + (rank == 1), rank=rank, world_size=world)

    config = DataConfig(global_batch=BATCH, shards=SHARDS)
    simulated = Astray(open_storage(f"memory://audit-{uuid.uuid4().hex}"), config, length=LENGTH)
    simulated.live(Life(world=2, steps=2, save_every=1))
    found = audit(lambda: read_records(simulated.storage))
    simulated.storage.delete("")
    assert {name: len(words) for name, words in faults(found).items()} == {"order": 2}


def test_lines_that_were_lost_do_not_count(records: list[Record]) -> None:
    at = next(i for i, record in enumerate(records) if record.get("step") == 8)
    assert judge([*records[:at], {**records[at], "first": 0, "digest": "ff"}, *records[at + 1 :]]).verdict == "proven"


def test_many_faults_are_counted_and_some_told(records: list[Record]) -> None:
    many = [{**records[0], "resumed_at": 0}, *({**records[1], "step": step, "lr": None} for step in range(1, 101))]
    found = judge(many)
    assert (of(found, "rates").count, len(of(found, "rates").faults)) == (100, TOLD)
    repeated = next(portion for portion in found.portions if portion.kind == "repeated")
    assert (repeated.count, len(repeated.positions), len(repeated.samples)) == (99 * BATCH, NAMED, NAMED)


# What cannot be proven, and what is not over yet.


def test_old_ledgers_say_that_order_could_not_be_checked(records: list[Record]) -> None:
    new = {"digest", "seed", "shards", "last_batch"}
    found = judge([{name: value for name, value in record.items() if name not in new} for record in records])
    assert (found.verdict, faults(found)) == ("open", {})
    assert still_open(found) == {"order"}
    assert "no digest of samples on 12 steps" in of(found, "order").seen
    assert found.portions[0].samples == ()


def test_streams_are_open_where_the_record_does_not_say(records: list[Record]) -> None:
    found = judge([r | {"length": None, "digest": None} if r["event"] == "step" else r for r in records])
    assert found.verdict == "open"
    assert still_open(found) == {"coverage", "order"}


@pytest.mark.parametrize("count", range(3))
def test_a_run_without_a_step_is_open(records: list[Record], count: int) -> None:
    assert judge([r for r in records if r["event"] == "start" and not r["resumed_at"]] * count).verdict == "open"


def test_any_part_of_a_run_is_proven(records: list[Record]) -> None:
    """While it goes on, and before each restart."""
    for end in range(2, len(records)):
        assert judge(records[:end]).verdict == "proven", records[:end]


def test_attempts_that_begin_between_the_two_readings_wait_for_the_next_audit(records: list[Record]) -> None:
    readings = iter([records[:8], records])

    def read() -> Iterator[Record]:
        return iter(next(readings))

    found = audit(read)
    assert (found.verdict, found.steps, len(found.attempts)) == ("proven", 8, 1)


def test_an_attempt_whose_steps_were_all_lost_is_no_gap(records: list[Record]) -> None:
    """A resume from memory at 9, of which nothing is left, and the next one from the checkpoint of step 6."""
    start = next(record for record in records if record["event"] == "start" and record["attempt"] == 2)
    at = records.index(start)
    assert judge([*records[:at], start | {"resumed_at": 8, "attempt": 1}, *records[at:]]).verdict == "proven"


def imported(records: list[Record], step: int) -> list[Record]:
    """A run that began with what another one had come to."""
    at = next(i for i, r in enumerate(records) if r["event"] == "start" and r["resumed_at"] == step)
    return [records[at] | {"rests_on": 0}, *records[at + 1 :]]


def test_of_an_imported_state_all_is_proven_but_what_came_before(records: list[Record]) -> None:
    found = judge(imported(records, 9))
    assert (found.verdict, faults(found), found.steps, found.portions[0].first_epoch) == ("open", {}, 3, 2)
    assert still_open(found) == {"steps", "resumes", "coverage"}
    assert of(found, "steps").seen == "up to step 12, but for those up to step 9: imported"
    assert of(found, "resumes").seen == "1 resume, the first of an imported state"
    assert of(found, "coverage").seen == "what was used before position 12 of epoch 2 is not on record"
    assert of(found, "order").seen == "seed 7, 3 digests computed again"


def test_what_is_wrong_after_an_import_is_found(records: list[Record]) -> None:
    ours = imported(records, 6)
    assert still_open(judge(ours)) == {"steps", "resumes", "coverage"}
    assert set(faults(judge(without(ours, 10)))) == {"steps", "coverage"}
    assert set(faults(judge(without(ours, 7)))) == {"steps"}, "where its data stood is not known"
    assert set(faults(judge(changed(ours, 12, first=24, last=36)))) == {"coverage", "order"}
    assert set(faults(judge(starting(ours, 2, resumed_at=5)))) == {"steps"}


def test_whole_epochs_after_an_import_are_proven(records: list[Record]) -> None:
    """The batches of an epoch end at position 48: step 9 is the first of epoch 2."""
    begun = imported([r | {"resumed_at": 8} if r.get("resumed_at") == 9 else r for r in records], 8)
    assert "what was used before position 12" in of(judge(begun), "coverage").seen
    whole = imported(records[:-2], 6)
    assert of(judge(whole), "coverage").seen.startswith(f"24 of the {LENGTH} samples of epoch 2, ")


# The verb.


def verb(url: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = audit_verb([url, *flags])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_the_verb_says_it_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path) if kind == "directory" else f"memory://audit-{uuid.uuid4().hex}"
    good = run(url)
    code, told = verb(url, capsys)
    assert code == 0 and told.startswith("proven: ")
    good.storage.put("ledger/000003-000001.jsonl", encoded({"event": "step", "step": 99}))
    code, told = verb(url, capsys)
    assert code == 1 and told.startswith("WRONG: ")
    assert "the line of step 99 lacks" in told
    good.storage.delete("")


def test_the_verb_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(tmp_path))
    code, told = verb(str(tmp_path), capsys, "--json")
    found = json.loads(told)
    assert (code, found["verdict"], found["steps"]) == (0, "proven", 12)
    assert [finding["verdict"] for finding in found["findings"]] == ["proven"] * 6


def test_the_verb_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no run"):
        audit_verb([str(tmp_path)])
