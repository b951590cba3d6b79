"""Which samples of an epoch were used, and which not once: the part of an audit that counts positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Literal

from elastic_runner.data.order import samples_at
from elastic_runner.data.runs import Run, Runs, total
from elastic_runner.data.skips import Skip

Kind = Literal["dropped", "padded", "skipped", "repeated"]

NAMED = 8
"""Samples, and runs of positions, that are named one by one; of more than that the count is told."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Samples that an epoch, or each of several in a row, did not use exactly once."""

    kind: Kind
    """dropped, padded: the tail of an epoch that fills no batch, by data.last_batch. skipped: a fault unless there is
    a reason on record. repeated: a fault."""
    first_epoch: int
    """0-based."""
    last_epoch: int
    """The last one in which these positions met with the same."""
    count: int
    """Samples in each of these epochs; one that was used three times counts as two."""
    positions: tuple[Run, ...]
    """First position and one past the last, of each run; at most NAMED."""
    samples: tuple[int, ...]
    """What is there in the first of these epochs, at most NAMED; empty where the order is not known."""
    reason: str = ""
    """skipped: why, where the run has put that on record (training.skip_failing)."""

    @property
    def in_all(self) -> int:
        """Samples in all of these epochs."""
        return self.count * (self.last_epoch - self.first_epoch + 1)

    @property
    def is_fault(self) -> bool:
        """Whether nobody has asked for it."""
        return self.kind == "repeated" or (self.kind == "skipped" and not self.reason)


@dataclass(kw_only=True)
class EpochUse:
    """Positions that steps of one epoch took."""

    used: Runs = field(default_factory=Runs)
    """Each once."""
    repeated: list[Run] = field(default_factory=list)
    """Those that were taken again."""
    padded: int = 0
    """Samples from the start of the epoch that filled up its last batch."""
    skips: list[Skip] = field(default_factory=list)
    """On record, and passed."""

    def take(self, first: int, last: int, padded: int) -> None:
        """A step took these."""
        self.repeated += self.used.add(first, last)
        self.padded += padded


def portions(
    epochs: Mapping[int, EpochUse], *, length: int, batch: int, pads: bool, seed: int | None, begins: int = 0
) -> Iterator[Portion]:
    """What was not used once, by epoch; of the newest epoch, only what was passed over so far.

    ``batch``: the largest global batch; ``pads``: no tail is ever dropped; ``seed``: None where it is not known;
    ``begins``: the first epoch of which anything is known.
    """

    def portion(kind: Kind, runs: list[Run], *span: int, count: int | None = None, reason: str = "") -> Portion:
        positions = list(islice((p for a, b in runs for p in range(a, min(b, length))), NAMED))
        samples = () if seed is None else samples_at(positions, length=length, seed=seed, epoch=span[0])
        return Portion(
            kind=kind,
            first_epoch=span[0],
            last_epoch=span[-1],
            count=total(runs) if count is None else count,
            positions=tuple(runs[:NAMED]),
            samples=tuple(samples),
            reason=reason,
        )

    numbers = sorted(epochs)
    for before, epoch in pairwise([begins - 1, *numbers]):
        if epoch > before + 1:
            yield portion("skipped", [(0, length)], before + 1, epoch - 1)
        use = epochs[epoch]
        known = deepcopy(use.used)
        for skip in use.skips:
            if left := _add(known, skip):
                yield portion("skipped", left, epoch, reason=skip.reason)
        skipped, end = known.holes(known.end), known.end
        tail = 0 if pads else max(0, length - end) % batch
        if tail and (end + tail == length or epoch != numbers[-1]):
            yield portion("dropped", [(length - tail, length)], epoch)
        if end < length - tail and epoch != numbers[-1]:
            skipped.append((end, length - tail))
        if use.padded:
            yield portion("padded", [(0, min(use.padded, length))], epoch, count=use.padded)
        if skipped:
            yield portion("skipped", skipped, epoch)
        if use.repeated:
            yield portion("repeated", use.repeated, epoch)


def _add(known: Runs, skip: Skip) -> list[Run]:
    """What of a skip was not known."""
    left = [(max(a, skip.first), b) for a, b in known.holes(skip.last) if b > skip.first]
    known.add(skip.first, skip.last)
    return left


def joined(portions: Iterable[Portion]) -> list[Portion]:
    """Told once where epochs in a row have the same positions."""
    result: list[Portion] = []
    place: dict[tuple[str, str], int] = {}
    for each in portions:
        at = place.get((each.kind, each.reason))
        if at is not None and _goes_on(result[at], each):
            result[at] = replace(result[at], last_epoch=each.last_epoch)
        else:
            place[each.kind, each.reason] = len(result)
            result.append(each)
    return result


def _goes_on(before: Portion, after: Portion) -> bool:
    same = (before.positions, before.count) == (after.positions, after.count)
    return same and before.last_epoch + 1 == after.first_epoch


def describe(portion: Portion) -> str:
    """In one line."""
    first, last, count = portion.first_epoch, portion.last_epoch, portion.count
    where = f"epoch {first}" if first == last else f"each of epochs {first} to {last}"
    runs = [f"{a} to {b - 1}" if b - a > 1 else str(a) for a, b in portion.positions]
    told = f"{count:,} sample{'s' * (count != 1)} {portion.kind} in {where}: position{'s' * (count != 1)} "
    told += ", ".join(runs) + (", ..." if total(list(portion.positions)) < count else "")
    why = f": {portion.reason}" if portion.reason else ""
    if not portion.samples:
        return told + why
    samples = ", ".join(map(str, portion.samples)) + (", ..." if len(portion.samples) < count else "")
    return f"{told} (sample{'s' * (count != 1)} {samples}{f' in epoch {first}' if first != last else ''}){why}"
