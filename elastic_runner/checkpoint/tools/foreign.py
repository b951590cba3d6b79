"""Weights that other programs have saved: which part of a file they are, and their names without wrappers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_runner.checkpoint.capture import is_extra_state, pack
from elastic_runner.checkpoint.tools.contents import ALIASES, EXTRA_STATE, MODEL, Contents, Entry, whole_entry
from elastic_runner.checkpoint.tools.stored import RangeFile, is_outline, storage_offset, with_data
from elastic_runner.errors import ConfigError, Damaged

_NESTED = ("model", "state_dict", "model_state_dict", "module")
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def foreign_torch(file: RangeFile, tree: Any) -> tuple[Contents, list[str]]:
    """The weights in a foreign torch.save file, and what people should know about them.

    Raises ConfigError when there are none, StateError for tensors that are not dense.
    """
    weights, place = _weights(tree, file.path)
    notes = [f"the weights are the entry {place!r} of {file.path}; the others are left out"] if place else []
    tensors: dict[str, Entry] = {}
    extra: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in weights.items():
        if is_extra_state(name):
            inside: dict[str, torch.Tensor] = {}
            extra[name] = pack(with_data(value, file, name), MODEL + name, inside)
            tensors.update({key: whole_entry(file, tensor, key) for key, tensor in inside.items()})
        elif not isinstance(value, torch.Tensor):
            notes.append(f"{name} is a {type(value).__name__}, not a tensor, and is left out")
        elif (known := first.setdefault(_identity(value), name)) != name:
            aliases[name] = known
        else:
            tensors[MODEL + name] = whole_entry(file, value, name)
    return Contents(tensors=tensors, plain={ALIASES: aliases, EXTRA_STATE: extra}), notes


def _weights(tree: Any, where: str) -> tuple[Mapping[str, Any], str]:
    if isinstance(tree, Mapping):
        if any(isinstance(value, torch.Tensor) for value in tree.values()):
            return {str(name): value for name, value in tree.items()}, ""
        for name in _NESTED:
            below = tree.get(name)
            if isinstance(below, Mapping) and any(isinstance(value, torch.Tensor) for value in below.values()):
                return {str(key): value for key, value in below.items()}, name
        raise ConfigError(
            f"{where} holds no state dict of a model: its entries are {', '.join(map(str, list(tree)[:8])) or 'none'}"
        )
    raise ConfigError(f"{where} holds a {type(tree).__name__} instead of a state dict")


def _identity(value: torch.Tensor) -> Any:
    """Equal for tensors that are one in the file."""
    if value.layout != torch.strided or value.numel() == 0:
        return id(value)
    place = storage_offset(value) if is_outline(value) else value.data_ptr()
    return id(value) if place is None else (place, value.storage_offset(), value.shape, value.stride(), value.dtype)


def foreign_dcp(contents: Contents) -> tuple[Contents, list[str]]:
    """The weights in a stock DCP checkpoint: below ``model.``, or all tensors where nothing is. Raises ConfigError."""
    below = {key: entry for key, entry in contents.tensors.items() if key.startswith(MODEL)}
    chosen = below or {MODEL + key: entry for key, entry in contents.tensors.items()}
    if not chosen:
        raise ConfigError("the DCP checkpoint holds no tensor")
    left = len(contents.tensors) + len(contents.plain) - len(chosen)
    notes = [f"{left} entries that are not the model's are left out"] if left else []
    return Contents(tensors=chosen, plain={ALIASES: {}, EXTRA_STATE: {}}), notes


def without_wrappers(contents: Contents) -> tuple[Contents, list[str]]:
    """Names as the bare model has them, and what was done. Raises Damaged when two become one."""
    names = [key.removeprefix(MODEL) for key in contents.tensors]
    names += [*contents.plain[ALIASES], *contents.plain[EXTRA_STATE]]
    outer = 0  # DDP's own, which is only known for one where every name has it
    while names and all(name.split(".")[outer] == "module" and name.count(".") > outer for name in names):
        outer += 1

    def clean(name: str) -> str:
        return ".".join(segment for segment in name.split(".")[outer:] if segment not in _WRAPPERS)

    renamed = {name: clean(name) for name in names}
    changed = sum(old != new for old, new in renamed.items())
    if not changed:
        return contents, []
    if len(set(renamed.values())) != len(set(renamed)):
        raise Damaged("without the prefixes of wrappers, two of the names are the same; --keep-names keeps them")
    plain = {
        ALIASES: {clean(alias): clean(name) for alias, name in contents.plain[ALIASES].items()},
        EXTRA_STATE: {clean(name): value for name, value in contents.plain[EXTRA_STATE].items()},
    }
    inside = contents.inside  # their keys are only referred to
    tensors = {
        key if key in inside else MODEL + clean(key.removeprefix(MODEL)): entry
        for key, entry in contents.tensors.items()
    }
    return Contents(tensors=tensors, plain=plain), [f"wrappers' prefixes were taken out of {changed} names"]
