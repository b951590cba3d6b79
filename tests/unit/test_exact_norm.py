"""The gradient norm as a sum of integers: no order, and as good as one in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.train.norm import exact_norm, squares


def gradient(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """With a spread of six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-3, 4, (count,), generator=generator).float()
    return torch.randn(count, generator=generator) * spread * scale


@given(count=st.integers(0, 3000), seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 3000), max_size=5))
@settings(max_examples=100, deadline=None)
def test_pieces_come_to_the_same(count: int, seed: int, cuts: list[int]) -> None:
    """As FSDP cuts a gradient, however many ranks there are."""
    values = gradient(count, seed, 2.0**-10)
    pieces = torch.tensor_split(values, sorted(cuts))
    assert sum(squares(piece, 5).double() @ torch.tensor([2.0**32, 1.0], dtype=torch.float64) for piece in pieces) == (
        squares(values, 5).double() @ torch.tensor([2.0**32, 1.0], dtype=torch.float64)
    )


def test_the_order_of_plain_sums_does_matter() -> None:
    """So that equality above means something."""
    values = gradient(3000, 0)
    sums = {float(sum((piece**2).sum() for piece in torch.tensor_split(values, count))) for count in range(1, 9)}
    assert len(sums) > 1


@pytest.mark.parametrize("scale", [1.0, 1e-44, 1e-20, 1e15, 1e-30])
@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_is_close_to_the_norm_in_double_precision(count: int, scale: float) -> None:
    values = [gradient(count, 1, scale), gradient(count, 2, scale).view(1, -1), torch.zeros(3), torch.zeros(0)]
    expected = math.sqrt(sum(float((v.double() ** 2).sum()) for v in values))
    assert float(exact_norm(values)) == pytest.approx(expected, rel=2e-7, abs=1e-45)


def test_one_large_value_does_not_hide_many_small_ones() -> None:
    values = torch.full((1 << 20,), 1e-4)
    values[0] = 1.0
    assert float(exact_norm([values])) == pytest.approx(math.sqrt(float((values.double() ** 2).sum())), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_is_infinite_for_what_is_not_finite(bad: float) -> None:
    values = gradient(10, 0)
    values[3] = bad
    assert float(exact_norm([torch.ones(3), values])) == math.inf


def test_of_nothing_is_zero() -> None:
    assert float(exact_norm([])) == 0
    assert float(exact_norm([torch.zeros(4), torch.zeros(0)])) == 0


def test_takes_every_floating_type() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert float(exact_norm([torch.tensor([3.0, -4.0], dtype=dtype)])) == 5
