"""Choosing blocks by class and by size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elastic_runner.errors import ModelError
from elastic_runner.train.wrapping import modules_of_class, modules_of_size, recompute_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)  # 20 parameters
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.linear(x))


def model() -> nn.Sequential:
    return nn.Sequential(nn.ModuleList([Block(), Block()]), Block(), nn.Linear(4, 1))


def test_by_class_in_the_models_order() -> None:
    net = model()
    assert modules_of_class(net, ["Block"], "field") == [net[0][0], net[0][1], net[1]]


def test_by_class_names_field_absent_class_and_what_there_is() -> None:
    with pytest.raises(ModelError, match=r"a\.field.*Blok.*Block, Linear"):
        modules_of_class(model(), ["Block", "Blok"], "a.field")


def test_by_class_refuses_what_has_no_forward() -> None:
    with pytest.raises(ModelError, match="ModuleList has no forward"):
        modules_of_class(model(), ["ModuleList"], "field")


@pytest.mark.parametrize(
    ("least", "names"),
    [
        (1, ["0.0.linear", "0.1.linear", "1.linear", "2"]),
        (20, ["0.0.linear", "0.1.linear", "1.linear"]),
        (21, []),  # only the list would be large enough, and it has no forward
        (1000, []),
    ],
)
def test_by_size(least: int, names: list[str]) -> None:
    net = model()
    assert modules_of_size(net, least) == [net.get_submodule(name) for name in names]


def test_by_size_counts_what_inner_units_leave() -> None:
    outer = nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2), nn.Linear(2, 2))
    net = nn.Sequential(outer)
    assert modules_of_size(net, 12) == [outer, outer[0]]
    assert modules_of_size(net, 13) == [outer[0]]


def test_recomputing_runs_forward_again_and_keeps_names_and_gradients() -> None:
    plain = nn.Sequential(Block(), nn.Linear(4, 1))
    again = copy.deepcopy(plain)
    recompute_activations(again, ["Block"])
    x = torch.randn(3, 4)
    for net in (plain, again):
        net(x).sum().backward()
    assert (plain[0].calls, again[0].calls) == (1, 2)
    assert list(plain.state_dict()) == list(again.state_dict())
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_copy_of_a_recomputing_model_is_independent() -> None:
    """An EMA is made by deepcopy; its forward must not compute with the original's parameters."""
    net = nn.Sequential(Block())
    recompute_activations(net, ["Block"])
    ema = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert net(torch.ones(1, 4)).abs().sum() == 0
    assert ema[0].forward(torch.ones(1, 4)) is not None
    with torch.no_grad():
        ema[0].linear.bias.fill_(1)
        ema[0].linear.weight.zero_()
    assert torch.equal(ema(torch.ones(1, 4)), torch.ones(1, 4))
