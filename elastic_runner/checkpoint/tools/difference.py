"""What two states differ in, a few rows of each in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from elastic_runner.checkpoint.tools.contents import Contents, Entry, bands
from elastic_runner.checkpoint.tools.plain_json import to_json
from elastic_runner.checkpoint.tools.written import Tick, raw

_BAND_BYTES = 4 << 20  # a number takes up to 16 bytes while it is compared


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that is in both and not the same."""

    key: str
    """Its key."""
    what: str
    """shape, dtype or values."""
    a: str
    """Type and shape in the one."""
    b: str
    """And in the other."""
    elements: int = 0
    """Elements whose bytes differ."""
    of: int = 0
    """Elements in all."""
    max_abs: float | None = None
    """Largest absolute difference among elements that are numbers in both; None where there is none."""
    max_rel: float | None = None
    """Largest difference relative to the larger of the two."""
    nan_a: int = 0
    """NaNs in the one."""
    nan_b: int = 0
    """And in the other."""


@dataclass(frozen=True, kw_only=True)
class PlainDifference:
    """Plain data that is not the same."""

    path: str
    """Where."""
    a: Any
    """There in the one, as JSON; absent: ABSENT."""
    b: Any
    """And in the other."""


ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """All that two states differ in."""

    only_a: tuple[str, ...]
    """Tensors only the one has."""
    only_b: tuple[str, ...]
    """Tensors only the other has."""
    tensors: tuple[TensorDifference, ...]
    """Tensors in both that differ."""
    plain: tuple[PlainDifference, ...]
    """Plain data."""
    equal: int
    """Tensors that are the same to the last bit."""

    @property
    def same(self) -> bool:
        """Whether there is none."""
        return not (self.only_a or self.only_b or self.tensors or self.plain)


def compare(a: Contents, b: Contents, tick: Tick = lambda more: None) -> Difference:
    """Compare two states to the last bit, whatever their formats and the worlds that wrote them."""
    both = [key for key in a.tensors if key in b.tensors]
    found = []
    for key in both:
        if difference := _compare_tensor(key, a, b, tick):
            found.append(difference)
    plain = {
        key: list(_compare_plain(key, a.plain.get(key, _MISSING), b.plain.get(key, _MISSING)))
        for key in {**a.plain, **b.plain}
    }
    return Difference(
        only_a=tuple(key for key in a.tensors if key not in b.tensors),
        only_b=tuple(key for key in b.tensors if key not in a.tensors),
        tensors=tuple(found),
        plain=tuple(each for differences in plain.values() for each in differences),
        equal=len(both) - len(found),
    )


def described(entry: Entry) -> str:
    """Type and shape in words."""
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _compare_tensor(key: str, a: Contents, b: Contents, tick: Tick) -> TensorDifference | None:
    one, other = a.tensors[key], b.tensors[key]
    says: dict[str, Any] = {"key": key, "a": described(one), "b": described(other), "of": one.numel}
    if one.shape != other.shape or one.dtype != other.dtype:
        tick(one.nbytes)
        return TensorDifference(what="shape" if one.shape != other.shape else "dtype", **says)
    tally = _Tally()
    for start, stop in bands(one, other, limit=_BAND_BYTES):
        x, y = a.rows(key, start, stop), b.rows(key, start, stop)
        tick(x.nbytes)
        tally.add(x, y)
    if not tally.elements:
        return None
    return TensorDifference(
        what="values",
        elements=tally.elements,
        max_abs=tally.max_abs,
        max_rel=tally.max_rel,
        nan_a=tally.nans[0],
        nan_b=tally.nans[1],
        **says,
    )


class _Tally:
    """What differs in the bands of one tensor."""

    def __init__(self) -> None:
        self.elements = 0
        self.max_abs: float | None = None
        self.max_rel: float | None = None
        self.nans = [0, 0]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One band of each."""
        one, other = np.frombuffer(raw(x), np.uint8), np.frombuffer(raw(y), np.uint8)
        numbers = [_numbers(x), _numbers(y)]
        for side, values in enumerate(numbers):
            self.nans[side] += int(np.isnan(values).sum())
        if np.array_equal(one, other):
            return
        width = x.dtype.itemsize
        self.elements += int((one.reshape(-1, width) != other.reshape(-1, width)).any(axis=1).sum())
        with np.errstate(all="ignore"):
            apart = np.abs(numbers[0] - numbers[1])
            apart[numbers[0] == numbers[1]] = 0  # infinities of one sign
            largest = np.maximum(np.abs(numbers[0]), np.abs(numbers[1]))
            relative = np.where(apart == 0, 0, np.where(np.isinf(largest), 1, apart / largest))
        valid = ~np.isnan(apart)
        if valid.any():
            self.max_abs = max(self.max_abs or 0.0, float(apart[valid].max()))
            self.max_rel = max(self.max_rel or 0.0, float(relative[valid].max()))


def _numbers(tensor: torch.Tensor) -> Any:
    """The values in a type that holds each of them exactly."""
    flat = tensor.reshape(-1)
    if tensor.is_complex():
        return flat.to(torch.complex128).numpy()
    if tensor.is_floating_point():
        return flat.to(torch.float64).numpy()
    if tensor.dtype in (torch.int64, torch.uint64):
        return flat.numpy().astype(np.longdouble)
    return flat.numpy().astype(np.float64)


_MISSING = object()


def _compare_plain(path: str, a: Any, b: Any) -> Iterator[PlainDifference]:
    if type(a) is dict and type(b) is dict:
        for key in {**a, **b}:
            yield from _compare_plain(f"{path}.{key}", a.get(key, _MISSING), b.get(key, _MISSING))
        return
    if type(a) is type(b) and type(a) in (list, tuple) and len(a) == len(b):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _compare_plain(f"{path}.{number}", x, y)
        return
    one, other = (ABSENT if value is _MISSING else _ordered(to_json(value)) for value in (a, b))
    if repr(one) != repr(other):  # 1 is not 1.0 here
        yield PlainDifference(path=path, a=one, b=other)


def _ordered(value: Any) -> Any:
    """Sets have no order of their own."""
    if isinstance(value, dict) and value.get("$") == "set":
        return {**value, "v": sorted(value["v"], key=repr)}
    return value


def as_json(found: Difference) -> dict[str, Any]:
    """For machines. A largest difference that is infinite is the text "inf", since JSON has no such number."""
    told = asdict(found)
    for each in told["tensors"]:
        for name in ("max_abs", "max_rel"):
            if each[name] is not None and math.isinf(each[name]):
                each[name] = "inf"
    return {"same": found.same, **told}
