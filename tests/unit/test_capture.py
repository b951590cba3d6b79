"""Taking a state apart and putting it together again."""

from __future__ import annotations

import collections
import enum
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_runner.checkpoint.capture import capture, optimizer_names, pack, references, unpack
from elastic_runner.errors import StateError
from tests.support.checkpointing import Net, assert_same, make_state, train

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
    st.integers(0, 5).map(torch.arange),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@given(STATES)
def test_every_plain_state_survives_a_weights_only_file(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state, "state.x", tensors)
    assert sorted(references(packed)) == sorted(tensors)
    stream = io.BytesIO()
    torch.save(packed, stream)
    stream.seek(0)
    assert_same(state, unpack(torch.load(stream, weights_only=True), tensors))


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1), np.float32(1), np.int64(1), np.str_("x"), np.zeros(2), np.random.default_rng(),
        Color.RED, object(), len, bytearray(b"x"), range(3), {torch.zeros(1)}, {np.float64(1)}, slice(1),
        {np.int64(1): 1}, {(1, np.int64(1)): 1}, {Color.RED: 1}, {b"x": 1}, "elastic_runner.tensor:state.x",
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(StateError, match=r"state\.x\.deep\.1"):
        pack({"deep": [0, value]}, "state.x", {})


def test_a_refused_state_says_what_to_do() -> None:
    with pytest.raises(StateError, match=r"is a numpy\.float64; .*\.item\(\)"):
        pack(np.float64(1), "state.x", {})


def test_two_tensors_never_share_a_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: [torch.tensor(3)], "1.0": torch.tensor(4)},
        "s",
        tensors,
    )
    assert len(tensors) == 4
    assert [int(t) for t in (unpack(packed, tensors)["a.b"], unpack(packed, tensors)["a"]["b"])] == [1, 2]


def test_counters_and_ordered_dicts() -> None:
    packed = pack({"c": collections.Counter(a=2), "o": collections.OrderedDict(b=1, a=2)}, "s", {})
    assert type(packed["c"]) is collections.Counter
    assert (type(packed["o"]), list(packed["o"])) == (dict, ["b", "a"])


def test_nothing_captured_is_a_copy_or_needs_a_gradient() -> None:
    state = make_state()
    train(state)
    captured = capture(state)
    assert captured.tensors["model.hidden.weight"].data_ptr() == state.model.hidden.weight.data_ptr()  # type: ignore[operator,union-attr]
    assert not any(tensor.requires_grad for tensor in captured.tensors.values())


def test_tied_weights_are_captured_once_with_their_moments() -> None:
    state = make_state()
    train(state)
    captured = capture(state)
    assert captured.plain["model.aliases"] == {"head.weight": "embed.weight"}
    assert "model.head.weight" not in captured.tensors
    moments = [key for key in captured.tensors if key.startswith("optimizer.state.") and "weight.exp_avg" in key]
    assert "optimizer.state.embed.weight.exp_avg" in moments
    assert not any("head" in key for key in moments)


def test_frozen_and_untouched_parameters_have_no_moments() -> None:
    state = make_state()
    train(state)
    keys = capture(state).tensors
    assert "model.frozen.weight" in keys
    assert "model.untouched" in keys
    assert not any("frozen" in key or "untouched" in key for key in keys if key.startswith("optimizer."))
    assert any("untouched" in group["params"] for group in capture(state).plain["optimizer.param_groups"])


def test_a_parameter_of_another_model_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD([*model.hidden.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(StateError, match=r"parameter 2 of optimizer group 0 .* worker\.prepare"):
        optimizer_names(model, optimizer)
