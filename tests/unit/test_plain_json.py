"""Plain data goes through JSON and comes back as it was."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.checkpoint.tools.plain_json import from_json, to_json
from elastic_runner.errors import Damaged, StateError
from tests.support.exporting import bits, plain

keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.tuples(st.text())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.text(), max_size=3)
        | st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
    ),
    max_leaves=8,
)


@given(values)
def test_anything_comes_back(value: Any) -> None:
    assert bits(from_json(json.loads(json.dumps(to_json(value))))) == bits(value)


def test_every_type_comes_back() -> None:
    value = plain()
    text = json.dumps(to_json(value), allow_nan=False)  # what any JSON reader takes
    assert bits(from_json(json.loads(text))) == bits(value)


def test_what_json_has_stays_readable() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": -3}}
    assert to_json(value) == value


@pytest.mark.parametrize("value", [object(), {"a": print}, [__import__("numpy").float64(1)]])
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match="not plain data"):
        to_json(value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "os.system", "v": "true"},
        {"$": "dtype", "v": "load"},
        {"$": "tensor", "v": ["float32", [2], "AAAA"]},
        {"$": "int"},
        {"$": "bytes", "v": "*"},
        {"$": ["list"], "v": 1},
        {"$": "set", "v": [[1]]},
        {"$": "size", "v": ["a"]},
    ],
)
def test_what_nobody_wrote_is_damage(value: Any) -> None:
    with pytest.raises(Damaged):
        from_json(value)


def test_tensors_keep_dtype_and_shape() -> None:
    value = torch.empty(2, 0, dtype=torch.float8_e5m2)
    assert bits(from_json(to_json(value))) == bits(value)
