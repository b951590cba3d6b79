"""The order of an epoch: a permutation, and nothing but (seed, epoch) decides it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.data.order import key_of, samples_at
from elastic_runner.data.random import kept, seed_all, seed_cpu

LENGTHS = st.integers(1, 3000)
SEEDS = st.integers(-(2**63), 2**64 - 1)
EPOCHS = st.integers(0, 2**40)


def epoch_order(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return samples_at(range(length), length=length, seed=seed, epoch=epoch)


@given(length=LENGTHS, seed=SEEDS, epoch=EPOCHS)
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(length, seed, epoch)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4096, 4097])
def test_permutation_at_the_edges_of_the_feistel_domain(length: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_order(length, 1, epoch)) == list(range(length))


@given(data=st.data(), length=st.integers(2, 500), seed=SEEDS, epoch=EPOCHS)
@settings(max_examples=40, deadline=None)
def test_a_position_has_the_same_sample_whoever_asks_for_whichever_part(
    data: st.DataObject, length: int, seed: int, epoch: int
) -> None:
    whole = epoch_order(length, seed, epoch)
    asked = data.draw(st.lists(st.integers(0, length - 1), max_size=30))
    assert samples_at(asked, length=length, seed=seed, epoch=epoch) == [whole[position] for position in asked]


def test_global_generators_neither_decide_the_order_nor_move() -> None:
    with kept():
        seed_all("one")
        before = epoch_order(100)
        expected = torch.rand(3)
        seed_all("one")
        epoch_order(100)
        assert torch.equal(torch.rand(3), expected)
        seed_all("other")
        assert epoch_order(100) == before


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(200, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_shuffled_well() -> None:
    order = np.asarray(epoch_order(10_000, 3))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_huge_dataset_takes_no_memory() -> None:
    length = 10**12
    samples = samples_at([0, 1, length - 1], length=length, seed=0, epoch=0)
    assert len(set(samples)) == 3
    assert all(0 <= sample < length for sample in samples)


def test_pinned_order_never_changes_between_versions() -> None:
    """A run that resumes under a newer version must go on in the order it began with."""
    assert epoch_order(10) == [3, 7, 5, 9, 4, 6, 1, 2, 8, 0]
    assert samples_at([0, 1, 2, 999_999], length=1_000_000, seed=7, epoch=3) == [593225, 360647, 971032, 516173]
    assert key_of(-1, "compute", 3) == 12883853740375492668


def test_positions_outside_of_the_epoch_are_refused() -> None:
    for bad in ([-1], [10], [0, 10]):
        with pytest.raises(ValueError, match="10 samples"):
            samples_at(bad, length=10, seed=0, epoch=0)
    with pytest.raises(ValueError, match="positive"):
        samples_at([], length=0, seed=0, epoch=0)
    assert samples_at([], length=10, seed=0, epoch=0) == []


def test_keys_tell_their_parts_apart() -> None:
    keys = {key_of(0, "data", 1, 2), key_of(0, "data", 2, 1), key_of(0, "compute", 1, 2), key_of(1, "data", 1, 2)}
    assert len(keys) == 4


def test_any_integer_is_a_seed() -> None:
    assert key_of(2**64 - 1) != key_of(2**63)
    assert sorted(epoch_order(20, seed=2**64 - 1)) == list(range(20))


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_kept_puts_all_cpu_generators_back_also_after_an_error() -> None:
    with kept():
        seed_all(0, "x")
        expected = draws()
        seed_all(0, "x")
        with pytest.raises(KeyError), kept():
            seed_cpu(0, "y")
            inside = draws()
            raise KeyError
        assert draws() == expected
        seed_all(0, "y")
        assert draws() == inside, "seed_cpu and seed_all give the CPU the same numbers"
