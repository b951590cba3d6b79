"""What a state consists of, for people: names, shapes, settings, positions; no tensor is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic_runner.checkpoint.load import OPTIMIZER_GROUPS, OPTIMIZER_STATE
from elastic_runner.checkpoint.tools.contents import ALIASES, EXTRA_STATE, Contents, Entry
from elastic_runner.checkpoint.tools.opening import Opened
from elastic_runner.checkpoint.tools.overview import damage
from elastic_runner.checkpoint.tools.plain_json import to_json

Part = Literal["model", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("model", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class TensorLine:
    """One tensor."""

    key: str
    """Its key."""
    part: Part
    """What it belongs to."""
    shape: tuple[int, ...]
    """Of the whole."""
    dtype: str
    """Its type."""
    numel: int
    """Elements."""
    nbytes: int
    """Bytes."""
    chunks: int
    """Pieces that it lies in."""
    files: tuple[str, ...]
    """Files that they are in."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """What several tensors come to."""

    tensors: int
    """How many."""
    numel: int
    """Elements."""
    nbytes: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A state."""

    where: str
    """What was asked for."""
    kind: str
    """sharded, full, safetensors, torch or dcp."""
    step: int | None
    """Its step, where known."""
    attempt: int | None
    """The attempt that wrote it; 0: imported."""
    world_size: int | None
    """Ranks that wrote it."""
    created: float | None
    """When, seconds since the epoch."""
    versions: dict[str, str]
    """Versions of the packages that wrote it."""
    size: int | None
    """Bytes of all data files."""
    files: int | None
    """How many."""
    tensors: tuple[TensorLine, ...]
    """All of them."""
    totals: dict[Part, Total]
    """By part."""
    aliases: dict[str, str]
    """Further names of tied parameters."""
    optimizer: list[dict[str, Any]] | None
    """Settings of each group with the number of its parameters; None: weights only."""
    states: dict[str, Any]
    """Plain data by key; tensors in it are named ``elastic_runner.tensor:KEY``."""
    notes: tuple[str, ...]
    """What people should know."""


def describe(opened: Opened) -> Description:
    """Everything that can be said without reading a tensor."""
    contents, manifest = opened.contents, opened.manifest
    wrong = damage(opened.storage, manifest, digests=False) if manifest else ""
    lines = tuple(_line(key, entry) for key, entry in contents.tensors.items())
    return Description(
        where=opened.where,
        kind=opened.kind,
        step=opened.step,
        attempt=manifest.attempt if manifest else None,
        world_size=manifest.world_size if manifest else None,
        created=manifest.created if manifest else None,
        versions=dict(manifest.versions) if manifest else {},
        size=manifest.size if manifest else None,
        files=len(manifest.files) if manifest else None,
        tensors=lines,
        totals={part: _total([line for line in lines if line.part == part]) for part in PARTS},
        aliases=dict(contents.plain.get(ALIASES, {})),
        optimizer=_groups(contents),
        states=_states(contents),
        notes=(*opened.notes, *([f"cannot be used: {wrong}"] if wrong else [])),
    )


def _line(key: str, entry: Entry) -> TensorLine:
    part: Part = "model" if key.startswith("model.") else "optimizer" if key.startswith("optimizer.") else "other"
    return TensorLine(
        key=key,
        part=part,
        shape=entry.shape,
        dtype=str(entry.dtype).removeprefix("torch."),
        numel=entry.numel,
        nbytes=entry.nbytes,
        chunks=len(entry.boxes),
        files=tuple(dict.fromkeys(box.file.rpartition("/")[2] for box in entry.boxes)),
    )


def _total(lines: list[TensorLine]) -> Total:
    return Total(tensors=len(lines), numel=sum(e.numel for e in lines), nbytes=sum(e.nbytes for e in lines))


def _groups(contents: Contents) -> list[dict[str, Any]] | None:
    groups = contents.plain.get(OPTIMIZER_GROUPS)
    if groups is None:
        return None
    return [{**group, "params": len(group["params"])} for group in groups]


def _states(contents: Contents) -> dict[str, Any]:
    shown = {key: value for key, value in contents.plain.items() if key not in (ALIASES, OPTIMIZER_GROUPS)}
    return {key: value for key, value in shown.items() if value or key not in (EXTRA_STATE, "optimizer.plain")}


def as_json(description: Description) -> dict[str, Any]:
    """For machines; what JSON has no place for as in plain_json."""
    facts = {name: value for name, value in vars(description).items() if name not in ("optimizer", "states")}
    lists = {
        "tensors": [asdict(line) for line in description.tensors],
        "totals": {part: asdict(total) for part, total in description.totals.items()},
    }
    return {**facts, **lists, "optimizer": to_json(description.optimizer), "states": to_json(description.states)}


@dataclass(frozen=True, kw_only=True)
class FieldLine:
    """What the optimizer keeps under one name for all its parameters."""

    field: str
    """Such as exp_avg."""
    dtypes: str
    """Its types."""
    total: Total
    """What it comes to."""


def by_field(lines: tuple[TensorLine, ...]) -> list[FieldLine]:
    """The optimizer's tensors by what they are, not by parameter."""
    fields: dict[str, list[TensorLine]] = {}
    for line in lines:
        if line.key.startswith(OPTIMIZER_STATE):
            fields.setdefault(line.key.rpartition(".")[2], []).append(line)
    return [
        FieldLine(field=name, dtypes=", ".join(Counter(line.dtype for line in each)), total=_total(each))
        for name, each in fields.items()
    ]
