"""What a checkpoint holds: tensors by name, and plain data by name. Nothing in it knows a rank.

Keys: ``model.<name>``, ``optimizer.state.<parameter>.<field>``, ``state.<name>.<path>`` for tensors;
``model.aliases``, ``model.plain``, ``optimizer.param_groups``, ``optimizer.plain``, ``state.<name>`` for plain data.
A tensor inside plain data lies with the tensors and leaves a reference.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.names import aliases, clean_name, parameter_groups
from elastic_runner.errors import StateError

# Exactly these types: numpy.float64 is a float and an IntEnum is an int, but a weights-only load refuses both.
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_EXTRA_STATE = "_extra_state"
_TENSOR = "elastic_runner.tensor:"
# Pickle protocol 2 writes b"" as a call of bytes, which a weights-only load refuses.
_NO_BYTES = "elastic_runner.no_bytes:"


class Stateful(Protocol):
    """Anything with torch's state-dict protocol."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain data."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state over."""
        ...


class Parts(Protocol):
    """What can be checkpointed: see ``elastic_runner.TrainState``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int

    def others(self) -> dict[str, Stateful]:
        """Everything else by name, in a fixed order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A state, taken apart."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors (DTensors where sharded), not copied."""
    plain: dict[str, Any] = field(default_factory=dict)
    """Plain data that a weights-only load accepts."""
    trained: set[str] = field(default_factory=set)
    """Keys of parameters and of what the optimizer keeps of them: NaN or infinity there means that training is lost."""

    def only_shared(self) -> Captured:
        """What ranks other than 0 contribute: model, optimizer and shards. All else is rank 0's, never a mixture."""
        tensors = {k: t for k, t in self.tensors.items() if not k.startswith("state.") or isinstance(t, DTensor)}
        return Captured(tensors=tensors, trained=self.trained)

    def signature(self) -> tuple[Any, ...]:
        """What must be the same for a layout made for one save to fit the next."""
        return tuple((key, t.dtype, t.shape, _local(t).shape) for key, t in self.tensors.items())


def capture(parts: Parts) -> Captured:
    """Take the state of ``parts`` apart. Raises StateError naming what is not plain data."""
    result = Captured()
    _capture_model(parts.model, result)
    _capture_optimizer(parts.model, parts.optimizer, result)
    for name, part in parts.others().items():
        result.plain[f"state.{name}"] = pack(part.state_dict(), f"state.{name}", result.tensors)
    return result


def _capture_model(model: nn.Module, result: Captured) -> None:
    tied = aliases(parameter_groups(model))
    plain: dict[str, Any] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        name = clean_name(model, raw)
        if name in tied:
            continue
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            result.tensors[f"model.{name}"] = value.detach()
            if isinstance(value, nn.Parameter):
                result.trained.add(f"model.{name}")
        else:
            plain[name] = pack(value, f"model.{name}", result.tensors)
    result.plain["model.aliases"] = tied
    result.plain["model.plain"] = plain


def _capture_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, result: Captured) -> None:
    names = optimizer_names(model, optimizer)
    plain: dict[str, dict[str, Any]] = {}
    for parameter, fields in optimizer.state.items():
        name = names[parameter]
        for key, value in fields.items():
            if isinstance(value, torch.Tensor):
                result.tensors[f"optimizer.state.{name}.{key}"] = value.detach()
                result.trained.add(f"optimizer.state.{name}.{key}")
            else:
                plain.setdefault(name, {})[key] = pack(value, f"optimizer.state.{name}.{key}", result.tensors)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        entry: dict[str, Any] = {"params": [names[p] for p in group["params"]]}
        for key, value in group.items():
            if key != "params":  # a learning rate kept as a tensor is small, so it stays inline
                small: dict[str, torch.Tensor] = {}
                packed = pack(value, f"optimizer.param_groups.{number}.{key}", small)
                entry[key] = unpack(packed, {k: t.cpu().clone() for k, t in small.items()})
        groups.append(entry)
    result.plain["optimizer.param_groups"] = groups
    result.plain["optimizer.plain"] = plain


def is_extra_state(name: str) -> bool:
    """Whether a name in a model's state dict is what a module's ``get_extra_state`` gave, be it a tensor or not."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Clean name of each parameter the optimizer holds. Raises StateError for one that is not the model's."""
    by_id = {id(p): clean_name(model, raw) for raw, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    tied = aliases(parameter_groups(model))
    names: dict[torch.Tensor, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = by_id.get(id(parameter))
            if name is None:
                raise StateError(
                    f"parameter {position} of optimizer group {number} is not one of the model's: "
                    "build the optimizer from the model that worker.prepare returned"
                )
            names[parameter] = tied.get(name, name)
    return names


def pack(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as plain data; tensors in it go to ``tensors`` and leave a reference. Raises StateError."""
    if isinstance(value, torch.Tensor):
        while where in tensors:  # {"a.b": x, "a": {"b": y}} says the same place twice
            where += "'"
        tensors[where] = value.detach()
        return _TENSOR + where
    if type(value) in _LEAVES:
        if isinstance(value, str) and value.startswith((_TENSOR, _NO_BYTES)):
            raise StateError(f"{where} is a string that starts like a reference: {value[:30]!r}")
        return _NO_BYTES if value == b"" else value
    if isinstance(value, Mapping):
        items = {_plain_key(k, where): pack(v, f"{where}.{k}", tensors) for k, v in value.items()}
        return collections.Counter(items) if isinstance(value, collections.Counter) else items
    if isinstance(value, (list, tuple)):
        packed = [pack(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return tuple(packed) if isinstance(value, tuple) else packed
    if isinstance(value, (set, frozenset)) and not any(isinstance(item, torch.Tensor) for item in value):
        return {pack(item, where, tensors) for item in value}
    raise StateError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors and plain data "
        "only. Convert it in state_dict (torch.from_numpy, .item(), .tolist(), a dict)."
    )


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    if isinstance(value, str):
        return b"" if value == _NO_BYTES else value
    if isinstance(value, collections.Counter):
        return value
    if isinstance(value, set):
        return {unpack(item, tensors) for item in value}
    if isinstance(value, dict):
        return {k: unpack(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(unpack(item, tensors) for item in value)
    return value


def references(value: Any) -> list[str]:
    """Keys of the tensors that packed ``value`` refers to."""
    if isinstance(value, str):
        return [value.removeprefix(_TENSOR)] if value.startswith(_TENSOR) else []
    if isinstance(value, dict):
        return [key for item in value.values() for key in references(item)]
    if isinstance(value, (list, tuple)):
        return [key for item in value for key in references(item)]
    return []


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plain_key(key: Any, where: str) -> Any:
    if type(key) is tuple:
        return tuple(_plain_key(item, where) for item in key)
    if type(key) not in (str, int, float, bool, type(None)):
        kind = type(key)
        raise StateError(f"{where} has a key of type {kind.__module__}.{kind.__qualname__}; use strings or numbers")
    return key
