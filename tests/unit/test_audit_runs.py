"""Whatever happens to a run, its ledger covers every epoch once, and the audit proves it."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.config import DataConfig
from elastic_runner.data.audit import Audit, audit
from elastic_runner.data.ledger import read_records
from elastic_runner.storage import open_storage
from tests.support.simulated_run import Life, SimulatedRun

LIVES = st.lists(
    st.builds(
        Life,
        world=st.integers(1, 5),
        steps=st.integers(0, 12),
        save_every=st.integers(1, 6),
        in_memory=st.booleans(),
        torn=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


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
    told = sum(p.count * (p.last_epoch - p.first_epoch + 1) for p in found.portions if p.kind == "dropped")
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
    run.storage.delete("")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_loader_processes_had_prefetched_is_not_counted(tmp_path: Path, workers: int) -> None:
    config = DataConfig(global_batch=6, shards=3, loader_workers=workers)
    run = SimulatedRun(open_storage(str(tmp_path)), config, length=20)
    run.live(Life(world=2, steps=5, save_every=2))
    run.live(Life(world=1, steps=4, save_every=3))
    found = audit(lambda: read_records(run.storage))
    assert (found.verdict, found.steps, found.lost) == ("proven", 8, 1)
