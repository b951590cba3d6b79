"""What every saver looks at before it writes."""

from __future__ import annotations

import pytest
import torch

from elastic_runner.checkpoint.saver import is_finite, non_finite

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
WITH_INFINITY = [torch.float8_e5m2]
WITH_NAN = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


def with_one(bad: float | complex, dtype: torch.dtype) -> torch.Tensor:
    values = torch.ones(4, 3, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    values[2, 1] = bad
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX, *WITH_NAN], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (4, 3)], ids=str)
def test_what_is_finite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert is_finite(torch.ones(shape).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert is_finite(torch.tensor([limits.max, limits.min, limits.tiny], dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        *[(dtype, bad) for dtype in [*FLOATS, *WITH_INFINITY] for bad in (NAN, INF, -INF)],
        *[(dtype, NAN) for dtype in WITH_NAN],
        *[(dtype, complex(*bad)) for dtype in COMPLEX for bad in ((NAN, 1), (1, NAN), (INF, 1), (1, -INF))],
    ],
    ids=str,
)
def test_one_element_is_enough(dtype: torch.dtype, bad: float | complex) -> None:
    assert not is_finite(with_one(bad, dtype))
    assert not is_finite(with_one(bad, dtype).t()), "whatever the strides"


def test_a_scale_of_powers_of_two_has_a_nan_too() -> None:
    bytes_ = torch.tensor([127, 128, 255], dtype=torch.uint8)
    assert is_finite(bytes_[:2].view(torch.float8_e8m0fnu))
    assert not is_finite(bytes_.view(torch.float8_e8m0fnu))


def test_only_what_is_trained_counts_and_each_key_once() -> None:
    bad, good = torch.tensor([NAN]), torch.ones(2)
    found = non_finite([("b", bad), ("a", good), ("b", bad), ("mask", bad), ("c", bad)], {"a", "b", "c"})
    assert found == ("b", "c")
