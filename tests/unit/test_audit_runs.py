"""Whatever happens to a run, its ledger covers every epoch once, and the audit proves it."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.config import DataConfig
from elastic_runner.data.audit import Audit, audit
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.order import samples_at
from elastic_runner.data.tally import count
from elastic_runner.storage import open_storage
from tests.support.simulated_run import Life, SimulatedRun

LIFE = st.builds(
    Life,
    world=st.integers(1, 5),
    steps=st.integers(0, 12),
    save_every=st.integers(1, 6),
    in_memory=st.booleans(),
    torn=st.booleans(),
    passes_over=st.sampled_from([0, 0, 0, 1, 2, 5]),
)
LIVES = st.lists(LIFE, min_size=1, max_size=5)


def covered_once(run: SimulatedRun, found: Audit) -> None:
    """By what the loaders gave, not by what the audit says; then that the audit says the same."""
    whole = Counter(range(run.length))
    epochs = run.samples_of_epochs()
    for epoch, used in epochs.items():
        tail = run.length % run.config.global_batch
        if run.config.last_batch == "drop":
            assert max(used.values()) == 1
            dropped = tail if epoch < max(epochs) else run.length - used.total()
            assert used.total() == run.length - dropped
        elif epoch < max(epochs):
            assert whole <= used and used.total() % run.config.global_batch == 0
            assert used.total() - run.length < run.config.global_batch
    assert found.steps == len(run.taken)
    told = sum(p.in_all for p in found.portions if p.kind == "dropped")
    finished = [epoch for epoch, used in epochs.items() if run.length - used.total() <= tail]
    assert told == (tail * len(finished) if run.config.last_batch == "drop" else 0)


@given(
    length=st.integers(1, 60),
    shards=st.integers(1, 6),
    per_shard=st.integers(1, 4),
    pads=st.booleans(),
    lives=LIVES,
    seed=st.integers(0, 2**63),
    appends=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_schedule_of_worlds_and_kills_covers_every_epoch_once(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    shards: int,
    per_shard: int,
    pads: bool,
    lives: list[Life],
    seed: int,
    appends: bool,
) -> None:
    batch = shards * per_shard
    config = DataConfig(global_batch=batch, shards=shards, last_batch="pad" if pads else "drop")
    length = length if pads else length + batch
    url = str(tmp_path_factory.mktemp("run")) if appends else f"memory://audit-{uuid.uuid4().hex}"
    run = SimulatedRun(open_storage(url), config, length=length, seed=seed)
    for life in lives:
        run.live(Life(**{**life.__dict__, "world": min(life.world, shards)}))
    run.live(Life(world=1, steps=1, save_every=1))
    found = audit(lambda: read_records(run.storage))
    assert [finding for finding in found.findings if finding.verdict != "proven"] == []
    assert found.verdict == "proven"
    covered_once(run, found)
    led, lost = effective(read_records(run.storage))
    assert {r["step"]: r["attempt"] for r in led if r["event"] == "step"} == run.by
    counts, counted = count(lambda: read_records(run.storage))
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped) == (len(run.by), 0, 0, 0)
    assert found.lost == counted == lost
    run.storage.delete("")


@given(
    length=st.integers(1, 40),
    shards=st.integers(1, 3),
    per_shard=st.integers(1, 4),
    pads=st.booleans(),
    lives=st.lists(st.tuples(LIFE, st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_what_is_skipped_is_never_used_and_all_else_is(
    length: int, shards: int, per_shard: int, pads: bool, lives: list[tuple[Life, bool]]
) -> None:
    batch = shards * per_shard
    config = DataConfig(global_batch=batch, shards=shards, last_batch="pad" if pads else "drop")
    length = length if pads else length + batch
    run = SimulatedRun(open_storage(f"memory://audit-{uuid.uuid4().hex}"), config, length=length)
    for life, skips in lives:
        run.live(replace(life, world=min(life.world, shards), skips=skips))
    run.live(Life(world=1, steps=2, save_every=1))
    found = audit(lambda: read_records(run.storage))
    assert [finding for finding in found.findings if finding.verdict != "proven"] == []
    counts, _ = count(lambda: read_records(run.storage))
    run.storage.delete("")
    skips = [p for p in found.portions if p.kind == "skipped"]
    told = {(e, at) for p in skips for e in range(p.first_epoch, p.last_epoch + 1) for at in p.positions}
    assert told <= {(skip.epoch, (skip.first, skip.last)) for skip in run.skips}
    assert (counts.gaps, counts.skipped) == (0, sum(p.in_all for p in skips))
    used = run.samples_of_epochs()
    for epoch in range(max(used)):
        skipped = [
            s for e, (a, b) in told if e == epoch for s in samples_at(range(a, b), length=length, seed=0, epoch=epoch)
        ]
        once = Counter(skipped) + used.get(epoch, Counter())
        if pads:
            assert set(once) == set(range(length))
        else:
            assert max(once.values()) == 1 and once.total() == length - length % batch


@pytest.mark.parametrize("workers", [1, 2])
def test_what_loader_processes_had_prefetched_is_not_counted(tmp_path: Path, workers: int) -> None:
    config = DataConfig(global_batch=6, shards=3, loader_workers=workers)
    run = SimulatedRun(open_storage(str(tmp_path)), config, length=20)
    run.live(Life(world=2, steps=5, save_every=2))
    run.live(Life(world=1, steps=4, save_every=3))
    found = audit(lambda: read_records(run.storage))
    assert (found.verdict, found.steps, found.lost) == ("proven", 8, 1)
