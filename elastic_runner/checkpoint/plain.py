"""Plain data as a checkpoint keeps it: packed into one file of the sharded format, checked once it is read."""

from __future__ import annotations

import io
from collections.abc import Container, Mapping
from typing import Any

import torch

from elastic_runner.checkpoint.capture import references
from elastic_runner.errors import Damaged


def plain_file(plain: Mapping[str, Any], name: str) -> tuple[bytes, dict[str, tuple[str, int, int]]]:
    """The bytes of file ``name``, which holds ``plain``; file, offset and length of each piece by key."""
    data, where = bytearray(), {}
    for key, value in plain.items():
        archive = io.BytesIO()
        torch.save(value, archive)
        where[key] = (name, len(data), archive.tell())
        data += archive.getbuffer()
    return bytes(data), where


def check_plain(plain: Mapping[str, Any], tensors: Container[str], where: str) -> None:
    """Raise Damaged unless this is what ``capture`` makes, next to tensors of these keys."""
    _check_parts(plain, where)
    try:
        missing = [key for key in references(dict(plain)) if key not in tensors]
    except RecursionError:
        raise Damaged(f"{where}: its plain data are nested too deeply") from None
    if missing:
        raise Damaged(f"{where}: its plain data ask for {missing[0]}, which is not there")


def _check_parts(plain: Mapping[str, Any], where: str) -> None:
    groups = plain.get("optimizer.param_groups", [])
    right = (
        _is_table(plain.get("model.aliases"), str)
        and _is_table(plain.get("model.plain"), object)
        and isinstance(groups, list)
        and all(_is_table(group, object) and _is_names(group.get("params")) for group in groups)
        and ("optimizer.param_groups" not in plain or _is_table(plain.get("optimizer.plain"), dict))
    )
    if not right:
        raise Damaged(f"{where}: its plain data are not those of a training state")


def check_tree(tree: Any, where: str) -> None:
    """Raise Damaged unless this is laid out as the full format."""
    if not isinstance(tree, dict) or not all(_is_table(tree.get(part), object) for part in ("model", "plain")):
        raise Damaged(f"{where} is not a full checkpoint: it has no tables 'model' and 'plain'")
    if not _is_table(tree.get("tensors"), torch.Tensor):
        raise Damaged(f"{where} is not a full checkpoint: it has no table 'tensors' of tensors")
    _check_parts(tree["plain"], where)
    elsewhere = {*tree["plain"]["model.aliases"], *tree["plain"]["model.plain"]}
    for name, value in tree["model"].items():
        if not isinstance(value, torch.Tensor) and name not in elsewhere:
            raise Damaged(f"{where} is not a full checkpoint: {name} is a {type(value).__name__} instead of a tensor")


def _is_table(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(type(k) is str and isinstance(v, kind) for k, v in value.items())


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(type(name) is str for name in value)
