"""The order in which logical shards are added: one sum at every world size, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.data.partition import shards_of
from elastic_runner.errors import LoopError
from elastic_runner.train.placement import Placement
from elastic_runner.train.tree import Node, TreeSum, are_halves, cover

Array = np.ndarray


def recursive(leaves: Sequence[Array]) -> Array:
    """The sum as it is defined."""
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return recursive(leaves[:middle]) + recursive(leaves[middle:])


def partial_sums(leaves: Sequence[Array], run: range) -> list[tuple[Node, Array]]:
    """What a rank has after its microbatches."""
    total: TreeSum[Array] = TreeSum(len(leaves), np.add)
    for shard in run:
        total.push(Node(shard, shard + 1), leaves[shard])
    return total.take()


def over_ranks(leaves: Sequence[Array], world_size: int) -> Array:
    """The sum that the ranks come to together."""
    total: TreeSum[Array] = TreeSum(len(leaves), np.add)
    for rank in range(world_size):
        for node, value in partial_sums(leaves, shards_of(rank, world_size=world_size, shards=len(leaves))):
            total.push(node, value)
    [(_, whole)] = total.take()
    return whole


def random_leaves(shards: int, seed: int) -> list[Array]:
    """Values over many magnitudes, whose sums are rounded."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(5) * 10.0 ** rng.integers(-6, 7, 5)).astype(np.float32) for _ in range(shards)]


worlds = st.integers(1, 80).flatmap(lambda shards: st.tuples(st.just(shards), st.integers(1, shards)))


@given(world=worlds, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_every_world_comes_to_the_same_bits(world: tuple[int, int], seed: int) -> None:
    shards, world_size = world
    leaves = random_leaves(shards, seed)
    assert over_ranks(leaves, world_size).tobytes() == recursive(leaves).tobytes()


def test_adding_as_they_come_depends_on_the_world() -> None:
    """So that equality above means something."""
    leaves = random_leaves(12, 0)

    def plain(world_size: int) -> bytes:
        runs = [shards_of(rank, world_size=world_size, shards=12) for rank in range(world_size)]
        return np.sum([np.sum([leaves[s] for s in run], axis=0) for run in runs], axis=0).tobytes()

    assert len({plain(world_size) for world_size in range(1, 7)}) > 1


@given(world=worlds)
def test_a_rank_has_few_sums_and_they_are_its_cover(world: tuple[int, int]) -> None:
    shards, world_size = world
    leaves = [np.zeros(1, np.float32)] * shards
    for rank in range(world_size):
        run = shards_of(rank, world_size=world_size, shards=shards)
        nodes = cover(run, shards=shards)
        assert [node for node, _ in partial_sums(leaves, run)] == nodes
        assert [shard for node in nodes for shard in range(*node)] == list(run)
        assert len(nodes) <= 2 * math.log2(shards) + 1


@given(shards=st.integers(1, 300))
def test_a_rank_holds_few_sums_meanwhile(shards: int) -> None:
    total: TreeSum[int] = TreeSum(shards, lambda left, right: left + right)
    most = 0
    for shard in range(shards):
        total.push(Node(shard, shard + 1), 1)
        held = total.take()
        most = max(most, len(held))
        for node, value in held:
            total.push(node, value)
    assert most <= math.ceil(math.log2(shards)) + 1
    assert total.take() == [(Node(0, shards), shards)]


@pytest.mark.parametrize(("shards", "world_size"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 2), (12, 4), (7, 2), (96, 16)])
def test_aligned_worlds_have_one_sum_a_rank(shards: int, world_size: int) -> None:
    """Then as many bytes move as in a ring's all-reduce."""
    assert [len(nodes) for nodes in Placement(rank=0, world_size=world_size, shards=shards).covers()] == [
        1
    ] * world_size


def test_only_two_halves_of_one_subtree_are_added() -> None:
    assert are_halves(Node(0, 3), Node(3, 6), shards=12)
    assert are_halves(Node(3, 4), Node(4, 6), shards=12)
    assert not are_halves(Node(3, 6), Node(6, 9), shards=12)
    assert not are_halves(Node(4, 5), Node(3, 4), shards=12)
    assert not are_halves(Node(0, 1), Node(0, 1), shards=1)


def test_other_runs_than_the_ranks_own_are_refused() -> None:
    placement = Placement(rank=1, world_size=2, shards=4)
    placement.check([Node(2, 4)])
    with pytest.raises(LoopError, match="needs 2 to 3"):
        placement.check([Node(0, 2)])
