"""What an audit has to prove, claim by claim; a judge hears of all starts and steps that led to the present state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from elastic_runner.data.coverage import EpochUse, Portion, describe, joined, portions
from elastic_runner.data.digest import Recomputed
from elastic_runner.data.ledger import Record
from elastic_runner.data.skips import Skip

Verdict = Literal["proven", "open", "refuted"]
"""open: nothing speaks against it, and the record is not enough to prove it."""

TOLD = 10
"""Faults of one claim that are told; of more than that the count is."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the record says of one claim."""

    name: str
    """Of the claim: steps, resumes, batch, coverage, order, rates."""
    claim: str
    """In words."""
    verdict: Verdict
    """What comes out."""
    seen: str
    """What was looked at, in words."""
    count: int
    """Faults."""
    faults: tuple[str, ...]
    """The first TOLD of them, in words."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step line with all that has to be in one."""

    step: int
    """From 1."""
    epoch: int
    """0-based."""
    first: int
    """First position in the epoch's order."""
    last: int
    """One past the last position."""
    padded: int
    """Samples from the start of the epoch that fill up the batch."""
    attempt: int
    """The attempt that computed it."""
    length: int | None
    """Samples in the epoch; None for streams."""

    @property
    def size(self) -> int:
        """Samples in the global batch."""
        return self.last - self.first + self.padded

    def __str__(self) -> str:
        more = f" and {self.padded} from its start" if self.padded else ""
        return f"positions {self.first} to {self.last - 1} of epoch {self.epoch}{more}"

    @classmethod
    def of(cls, record: Record) -> Line | None:
        """None where something is missing or impossible."""
        values = {name: record.get(name) for name in ("step", "epoch", "first", "last", "padded", "attempt")}
        counts = {name: value for name, value in values.items() if type(value) is int and value >= 0}
        length = record.get("length")
        known = length is None or (type(length) is int and length > 0)
        whole = known and len(counts) == len(values) and counts["first"] < counts["last"]
        return cls(**counts, length=length) if whole else None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step line in its place."""

    line: Line
    """What it says of its samples."""
    record: Record
    """All that it says."""
    before: Line | None
    """The step before."""
    start: Record
    """What the start of its attempt says; empty where that is not on record."""
    resumed: bool
    """Whether it is the first one after a start."""
    continues: bool
    """Whether it takes its samples from where the record had come to, so far as that is known."""


class Judge(ABC):
    """Of one claim; its docstring says when that holds."""

    name: str
    claim: str

    def __init__(self) -> None:
        self._faults: list[str] = []
        self._count = 0

    def start(self, attempt: int, resumed_at: int, *, imported: bool) -> None:  # noqa: B027 - most judges pass over it
        """An attempt went on after step ``resumed_at``; ``imported``: with a state of which the record has nothing."""

    @abstractmethod
    def step(self, step: Step) -> None:
        """A step was committed."""

    def finding(self) -> Finding:
        """After all of them."""
        seen, proven = self._seen()
        verdict: Verdict = "refuted" if self._count else "proven" if proven else "open"
        return Finding(
            name=self.name,
            claim=self.claim,
            verdict=verdict,
            seen=seen,
            count=self._count,
            faults=tuple(self._faults),
        )

    @abstractmethod
    def _seen(self) -> tuple[str, bool]:
        """What was looked at, in words, and whether it was all that there has to be."""

    def fault(self, words: str) -> None:
        """It does not hold."""
        self._count += 1
        if len(self._faults) < TOLD:
            self._faults.append(words)


class Steps(Judge):
    """Step numbers rise by one, from the first."""

    name, claim = "steps", "steps are consecutive"

    def __init__(self) -> None:
        super().__init__()
        self._at = self._imported = 0

    def start(self, attempt: int, resumed_at: int, *, imported: bool) -> None:
        """A gap before it is a fault of the resume."""
        self._at = resumed_at
        if imported:
            self._imported = resumed_at

    def step(self, step: Step) -> None:
        """Its number is the next one."""
        number, expected = step.line.step, self._at + 1
        if number < expected:
            self.fault(f"step {number} comes after step {self._at}")
        elif number > expected:
            which = f"step {expected} is" if number == expected + 1 else f"steps {expected} to {number - 1} are"
            self.fault(f"{which} not on record")
        self._at = number

    def _seen(self) -> tuple[str, bool]:
        before = f", but for those up to step {self._imported:,}: imported" if self._imported else ""
        return f"up to step {self._at:,}{before}", self._at > 0 and not self._imported


class Resumes(Judge):
    """Each attempt goes on exactly where the record ended that it rests on, and attempts only rise."""

    name, claim = "resumes", "resumes continue exactly"

    def __init__(self) -> None:
        super().__init__()
        self._at = self._attempt = self._resumes = self._imported = 0

    def start(self, attempt: int, resumed_at: int, *, imported: bool) -> None:
        """It rests on the newest step of the record."""
        self._rise(attempt, f"attempt {attempt} starts")
        self._imported += imported
        if resumed_at != self._at and not imported:
            self.fault(f"attempt {attempt} resumed after step {resumed_at}, but the record ends at step {self._at}")
        self._resumes += resumed_at > 0
        self._at = resumed_at

    def step(self, step: Step) -> None:
        """The first of an attempt takes the next samples."""
        line = step.line
        self._at = line.step
        if not step.start:
            self.fault(f"step {line.step} is of attempt {line.attempt}, whose start is not on record")
        self._rise(line.attempt, f"step {line.step} is of attempt {line.attempt}")
        if step.resumed and not step.continues:
            self.fault(f"attempt {line.attempt}, {_out_of_turn(step)}")

    def _rise(self, attempt: int, words: str) -> None:
        if attempt < self._attempt:
            self.fault(f"{words}, after attempt {self._attempt}")
        self._attempt = attempt

    def _seen(self) -> tuple[str, bool]:
        first = ", the first of an imported state" if self._imported else ""
        return f"{self._resumes:,} resume{'s' * (self._resumes != 1)}{first}", not self._imported


class Batch(Judge):
    """Each step took as many samples as the first, and as were configured."""

    name, claim = "batch", "global batch is constant"

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, None] = {}

    def step(self, step: Step) -> None:
        """It is as large as the one before, and as configured."""
        line, wanted = step.line, step.start.get("global_batch")
        said = f"step {line.step} (attempt {line.attempt}) took {line.size} samples"
        if step.before is not None and step.before.size != line.size:
            self.fault(f"{said}, the one before {step.before.size}")
        elif wanted is not None and wanted != line.size:
            self.fault(f"{said}, data.global_batch was {wanted}")
        self._sizes[line.size] = None

    def _seen(self) -> tuple[str, bool]:
        return f"{', '.join(map(str, self._sizes)) or 'no'} samples", bool(self._sizes)


class Coverage(Judge):
    """Each epoch takes each sample once, but for what is skipped on record and a tail that data.last_batch drops, or
    fills up."""

    name, claim = "coverage", "epochs cover the dataset once"

    def __init__(self) -> None:
        super().__init__()
        self.portions: list[Portion] = []
        self.epochs: dict[int, EpochUse] = {}
        self._skips: list[Skip] = []
        self._lengths: dict[int | None, None] = {}
        self._policies: set[Any] = set()
        self._seeds: set[int | None] = set()
        self._largest = 0
        self._imported = False
        self._unknown = (0, 0)
        """Epoch and position before which an imported state may have used anything."""

    def start(self, attempt: int, resumed_at: int, *, imported: bool) -> None:
        """An imported state goes on somewhere in the data."""
        self._imported |= imported

    def skip(self, skip: Skip) -> None:
        """It is no fault, once the run has passed it."""
        self._skips.append(skip)

    def step(self, step: Step) -> None:
        """Its positions lie within the epoch; whether they were used before is judged at the end."""
        line = step.line
        use = self.epochs.setdefault(line.epoch, EpochUse())
        if self._imported and step.before is None:
            self._unknown = line.epoch, line.first
            use.used.add(0, line.first)
        use.take(line.first, line.last, line.padded)
        if step.before is not None and step.before.length != line.length:
            self.fault(f"step {line.step}: the dataset has {line.length} samples, before {step.before.length}")
        self._lengths[line.length] = None
        policy = step.start.get("last_batch")
        if line.length is not None:
            ends = line.last == line.length and policy != "drop"
            if line.last > line.length or (line.padded and not ends):
                self.fault(f"step {line.step} takes {line}, an epoch of {line.length} samples")
        self._policies.add(policy)
        self._seeds.add(step.start.get("seed"))
        self._largest = max(self._largest, line.size)

    def finding(self) -> Finding:
        """Adds what was skipped and repeated."""
        self._place_skips()
        length = next(iter(self._lengths), None)
        if length is not None:
            seed = next(iter(self._seeds)) if len(self._seeds) == 1 else None
            pads, begins = self._policies == {"pad"}, self._unknown[0]
            found = portions(self.epochs, length=length, batch=self._largest, pads=pads, seed=seed, begins=begins)
            self.portions = joined(found)
        for each in self.portions:
            if each.is_fault:
                self.fault(describe(each))
        return super().finding()

    def _place_skips(self) -> None:
        newest = max(self.epochs, default=-1)
        end = newest, self.epochs[newest].used.end if self.epochs else 0
        for skip in self._skips:
            if skip.last - skip.first > self._largest > 0:
                self.fault(f"a skip of {skip.last - skip.first} samples is on record, more than a global batch has")
            elif self._unknown <= (skip.epoch, skip.first) < end:
                self.epochs.setdefault(skip.epoch, EpochUse()).skips.append(skip)

    def _seen(self) -> tuple[str, bool]:
        if not self.epochs:
            return "no epoch", False
        if None in self._lengths:
            return "streams: how many samples an epoch has is not on record", False
        newest, length = max(self.epochs), next(iter(self._lengths)) or 0
        end, (epoch, position) = self.epochs[newest].used.end, self._unknown
        ended = end >= length or any(p.kind == "dropped" and p.last_epoch == newest for p in self.portions)
        whole = sum((each, 0) >= self._unknown and (each < newest or ended) for each in self.epochs)
        words = [f"{whole:,} whole epoch{'s' * (whole != 1)} of {length:,} samples"] * bool(whole)
        used = end - (position if epoch == newest else 0)
        words += [f"{used:,} of the {length:,} samples of epoch {newest}"] * (not ended)
        skipped = sum(p.in_all for p in self.portions if p.kind == "skipped" and not p.is_fault)
        words += [f"but for {skipped:,} skipped on record"] * bool(skipped)
        unknown = self._unknown > (0, 0)
        words += [f"what was used before position {position:,} of epoch {epoch} is not on record"] * unknown
        return ", ".join(words), not unknown


class Order(Judge):
    """The samples of each step are those that (seed, epoch, positions) give, one step's after the other's."""

    name, claim = "order", "order is that of the seed"

    def __init__(self) -> None:
        super().__init__()
        self._seed: int | None = None
        self._recomputed: Recomputed | None = None
        self._checked = self._unchecked = 0

    def step(self, step: Step) -> None:
        """It follows on the one before, and its digest is the one computed again."""
        if not step.continues and not step.resumed:
            self.fault(_out_of_turn(step))
        line, start, digest = step.line, step.start, step.record.get("digest")
        facts = [value for name in ("seed", "shards", "global_batch") if type(value := start.get(name)) is int]
        if digest is None or line.length is None or len(facts) < 3 or facts[1] < 1:
            self._unchecked += 1
            return
        seed, shards, size = facts
        if self._seed not in (None, seed):
            self.fault(f"step {line.step}: attempt {line.attempt} has seed {seed}, the steps before {self._seed}")
        self._seed = seed
        if self._recomputed is None or self._recomputed.of != (seed, line.length):
            self._recomputed = Recomputed(seed=seed, length=line.length)
        self._checked += 1
        batch = {"epoch": line.epoch, "first": line.first, "size": line.size, "shards": shards}
        possible = line.last <= line.length and line.padded <= size and line.size % shards == 0  # else none is computed
        if not possible or digest != self._recomputed.digest(**batch):
            self.fault(f"step {line.step} was given other samples than seed {seed} has at {line}")

    def _seen(self) -> tuple[str, bool]:
        words = [f"seed {self._seed}, {self._checked:,} digests computed again"] * bool(self._checked)
        words += [f"no digest of samples on {self._unchecked:,} steps, so only positions are known"] * bool(
            self._unchecked
        )
        return "; ".join(words) or "no step", bool(self._checked) and not self._unchecked


class Rates(Judge):
    """Each step has its learning rate and its loss scale on record."""

    name, claim = "rates", "learning rate and scale are there"

    def __init__(self) -> None:
        super().__init__()
        self._checked = self._left_out = 0

    def step(self, step: Step) -> None:
        """Both are numbers."""
        self._checked += 1
        self._left_out += step.record.get("updated") is False
        missing = [name for name in ("lr", "scale") if type(step.record.get(name)) not in (int, float)]
        if missing:
            self.fault(f"step {step.line.step} has no {' and no '.join(missing)}")

    def _seen(self) -> tuple[str, bool]:
        left_out = f", {self._left_out:,} of them without an update: not finite" if self._left_out else ""
        return f"{self._checked:,} steps{left_out}", self._checked > 0


def _out_of_turn(step: Step) -> str:
    before, line = step.before, step.line
    stood = f"{before.last} of epoch {before.epoch}" if before else "0 of epoch 0"
    return f"step {line.step}: takes its samples from position {line.first} of epoch {line.epoch}, not {stood}"
