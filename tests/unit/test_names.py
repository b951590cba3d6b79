"""Names that no wrapper changes, and ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from elastic_runner.checkpoint.names import aliases, clean_name, parameter_groups, unwrap, wrapped_attribute


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.ModuleDict({"module": nn.Linear(2, 2)})


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


NAMES = [f"{place}.{leaf}" for place in ("module", "_orig_mod.module") for leaf in ("weight", "bias")]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        compiled,
        checkpoint_wrapper,
        lambda model: compiled(nn.DataParallel(model)),
        lambda model: nn.DataParallel(compiled(model)),
        lambda model: checkpoint_wrapper(compiled(checkpoint_wrapper(model))),
    ],
)
def test_wrappers_at_the_top_leave_no_trace(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inner = Inner()
    model = wrap(inner)
    assert [clean_name(model, raw) for raw in model.state_dict()] == NAMES
    assert [clean_name(model, raw) for raw, _ in model.named_parameters()] == NAMES
    assert unwrap(model) is inner


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper, lambda block: checkpoint_wrapper(compiled(block))])
def test_wrappers_inside_leave_no_trace(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(wrap(Inner()), nn.Linear(2, 2))
    wanted = [*(f"0.{name}" for name in NAMES), "1.weight", "1.bias"]
    assert [clean_name(model, raw) for raw in model.state_dict()] == wanted


def test_a_users_class_called_like_a_wrapper_is_none() -> None:
    class OptimizedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)

    assert wrapped_attribute(OptimizedModule()) is None
    assert clean_name(OptimizedModule(), "_orig_mod.weight") == "_orig_mod.weight"


def test_a_name_that_is_no_module_stays() -> None:
    assert clean_name(nn.Linear(2, 2), "weight.deeper.module") == "weight.deeper.module"


def test_ties_are_found_through_wrappers_and_two_equal_tensors_are_no_tie() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    with torch.no_grad():
        model["c"].weight.copy_(model["a"].weight)  # type: ignore[operator]
    for wrapped in (model, compiled(model)):
        groups = parameter_groups(wrapped)
        assert [names for _, names in groups] == [
            ["a.weight", "b.weight"],
            ["a.bias"],
            ["b.bias"],
            ["c.weight"],
            ["c.bias"],
        ]
        assert aliases(groups) == {"b.weight": "a.weight"}


def test_one_storage_under_two_parameters_is_a_tie() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)  # type: ignore[arg-type]
    assert aliases(parameter_groups(model)) == {"b.weight": "a.weight"}


def test_parts_of_one_storage_and_empty_parameters_are_no_tie() -> None:
    whole = torch.zeros(4, 2)
    model = nn.ParameterDict(
        {
            "w": nn.Parameter(whole),
            "h": nn.Parameter(whole[:2]),
            "e": nn.Parameter(torch.empty(0)),
            "f": nn.Parameter(torch.empty(0)),
        }
    )
    assert aliases(parameter_groups(model)) == {}
