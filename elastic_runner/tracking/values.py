"""Records as numbers with names, by the one unit that all have: the optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

Record = Mapping[str, Any]
"""A line of the ledger, of a step or an evaluation."""


def is_whole(record: Record) -> bool:
    """Whether it is of a step or an evaluation, with all that has to be in it."""
    if record.get("event") == "evaluation" and not isinstance(record.get("metrics"), Mapping):
        return False
    whole = all(isinstance(record.get(name), int) for name in ("step", "attempt"))
    return record.get("event") in ("step", "evaluation") and whole and isinstance(record.get("time"), int | float)


def values_of(record: Record) -> dict[str, float]:
    """What a tool is told of a step or an evaluation, by name. What is not finite, null on record, is left out."""
    if record["event"] == "evaluation":
        found = {f"validation/{name}": value for name, value in record["metrics"].items()}
    else:
        found = {f"train/{name}": value for name, value in record.get("metrics", {}).items()}
        found |= {f"train/{name}": record.get(name) for name in ("loss", "grad_norm", "lr", "epoch")}
        found |= {"run/attempt": record["attempt"], "run/world": record.get("world")}
    return {name: value for name, value in found.items() if value is not None}


def rows(records: Iterable[Record]) -> Iterator[dict[str, float]]:
    """One row a step, with what was evaluated after it; ``records``: in order, others are passed over."""
    for step, of_step in groupby(filter(is_whole, records), key=lambda record: record["step"]):
        row: dict[str, float] = {"step": step}
        for record in of_step:
            row |= values_of(record)
        yield row
