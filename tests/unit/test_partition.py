"""Which samples form a step and who runs them: every sample once, at every world size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.data.partition import Cursor, GlobalBatch, LastBatch, next_batch, shard_positions, shards_of
from elastic_runner.errors import ConfigError

POLICIES: st.SearchStrategy[LastBatch] = st.sampled_from(["drop", "pad"])


def batches_of_epoch(length: int, size: int, policy: LastBatch, epoch: int = 0) -> list[GlobalBatch]:
    batches, cursor = [], Cursor(epoch=epoch)
    while cursor.epoch == epoch:
        batches.append(next_batch(cursor, length=length, size=size, policy=policy))
        cursor = batches[-1].after
    assert cursor == Cursor(epoch=epoch + 1)
    return batches


@given(shards=st.integers(1, 64), data=st.data())
def test_shards_of_covers_each_shard_once_in_even_contiguous_runs(shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, shards))
    runs = [shards_of(rank, world_size=world_size, shards=shards) for rank in range(world_size)]
    assert [shard for run in runs for shard in run] == list(range(shards))
    sizes = {len(run) for run in runs}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(
    length=st.integers(1, 300),
    per_shard=st.integers(1, 9),
    shards=st.integers(1, 8),
    policy=POLICIES,
    worlds=st.lists(st.integers(1, 8), min_size=1, max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_epoch_covers_every_sample_once_whatever_the_worlds(
    length: int, per_shard: int, shards: int, policy: LastBatch, worlds: list[int]
) -> None:
    """c14, c49: another world size at every step; what is dropped or padded is counted, and nothing else is missing."""
    size = per_shard * shards
    if policy == "drop" and length < size:
        with pytest.raises(ConfigError, match=r"data\.global_batch"):
            next_batch(Cursor(), length=length, size=size, policy=policy)
        return
    used: Counter[int] = Counter()
    padded = dropped = 0
    for number, batch in enumerate(batches_of_epoch(length, size, policy)):
        world = min(shards, worlds[number % len(worlds)])
        in_step: list[int] = []
        for rank in range(world):
            for shard in shards_of(rank, world_size=world, shards=shards):
                positions = shard_positions(batch, shard, shards=shards, length=length)
                assert len(positions) == per_shard
                in_step += positions
        assert in_step[: batch.last - batch.first] == list(range(batch.first, batch.last))
        assert len(in_step) - (batch.last - batch.first) == batch.padded
        used.update(in_step)
        padded += batch.padded
        dropped += batch.dropped
    assert set(used) == set(range(length - dropped))
    assert used.total() == length - dropped + padded
    if policy == "drop":
        assert padded == 0
        assert dropped == length % size
        assert set(used.values()) == {1}
    else:
        assert dropped == 0
        assert padded == -length % size


@given(length=st.integers(1, 200), size=st.integers(1, 50), policy=POLICIES, data=st.data())
def test_another_batch_size_in_the_middle_of_an_epoch_loses_and_repeats_nothing(
    length: int, size: int, policy: LastBatch, data: st.DataObject
) -> None:
    """c49, c57: the position counts samples, and holds for any later batch size; a tail that no longer fits counts."""
    position = data.draw(st.integers(0, length - 1))
    if policy == "drop" and length < size:
        return
    batch = next_batch(Cursor(epoch=4, position=position), length=length, size=size, policy=policy)
    if policy == "drop" and length - position < size:
        assert (batch.epoch, batch.first) == (5, 0)
        own_tail = length - batch.last if length - batch.last < size else 0
        assert batch.dropped == own_tail + length - position
    else:
        assert (batch.epoch, batch.first) == (4, position)


def test_finished_epoch_position_goes_on_with_the_next_epoch() -> None:
    batch = next_batch(Cursor(epoch=1, position=12), length=12, size=4, policy="pad")
    assert (batch.epoch, batch.first, batch.last, batch.dropped) == (2, 0, 4, 0)


def test_padding_wraps_as_often_as_a_tiny_dataset_needs() -> None:
    batch = next_batch(Cursor(), length=3, size=8, policy="pad")
    assert (batch.padded, batch.after) == (5, Cursor(epoch=1))
    positions = [p for shard in range(4) for p in shard_positions(batch, shard, shards=4, length=3)]
    assert positions == [0, 1, 2, 0, 1, 2, 0, 1]


def test_errors_name_the_field_to_change() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch=8 .*data\.last_batch='pad'"):
        next_batch(Cursor(), length=7, size=8, policy="drop")
    with pytest.raises(ConfigError, match=r"5 ranks but data\.shards=4"):
        shards_of(0, world_size=5, shards=4)
    with pytest.raises(ConfigError, match="empty"):
        next_batch(Cursor(), length=0, size=8, policy="pad")
