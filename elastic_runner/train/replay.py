"""The replay check: steps that were done before a fault and are done again must come to the same. Pure.

What differs first, and when, tells which piece of the state was not restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from elastic_runner.data.ledger import Record
from elastic_runner.data.skips import Skip

KEPT_STEPS = 4096
"""Steps after the checkpoint that are compared at most: a line takes about a kilobyte of memory."""

Cause: TypeAlias = Literal[
    "data", "random numbers", "schedule", "scaler", "parameters", "gradients", "optimizer", "computation"
]
"""The piece of the state, or of the work, that a divergence points to."""

_SETTLED: dict[str, Cause] = {
    "epoch": "data", "first": "data", "last": "data", "digest": "data",
    "rng": "random numbers", "lr": "schedule", "scale": "scaler",
}  # fmt: skip
"""What is fixed before a step computes anything, with what it depends on."""
_RESULTS = {"loss": 1, "grad_norm": 10}
"""What it computes, with how many times the tolerance it may differ."""

_MEANING: dict[Cause, str] = {
    "data": "other samples, so the order or the position of the data. Look at the loader in TrainState(data=...), the "
    "dataset's length and order, the seed",
    "random numbers": "same samples, other random numbers. Look for code that seeds or sets a generator by itself",
    "schedule": "same samples, another learning rate. Look at TrainState(schedule=...), at a schedule that was built "
    "for another length, and for code that sets the rate by itself",
    "scaler": "another loss scale, so the loss scaler's state. Look at what changes state.scaler",
    "parameters": "the first step done again, with the same samples and random numbers, so parameters or buffers are "
    "not what they were. Look at checkpoint.allow_missing, and at what the program changes after restore()",
    "gradients": "the same loss from the same samples, so the backward pass. Look at requires_grad, at hooks, at "
    "gradients that were left over, and for kernels that are not deterministic",
    "optimizer": "the step before was the same and its update was not, so the optimizer's state: moments, step counts, "
    "learning rates of its other groups. Look at what the program changes in it after restore()",
    "computation": "updates before it were the same, so that no lost state explains it. Look for kernels that are "
    "not deterministic, for code that goes by time or attempt, and at the hardware",
}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first step that came to something else when it was done again."""

    step: int
    """Which."""
    what: str
    """The field of the ledger's line."""
    old: Any
    """What it was."""
    new: Any
    """What it is now."""
    cause: Cause
    """What that points to."""

    def __str__(self) -> str:
        return (
            f"step {self.step} was done again and its {self.what} is {self.new}, where the ledger has {self.old}: "
            f"{_MEANING[self.cause]}."
        )


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that is on record and will be done again."""

    line: Record
    """Its line."""
    start: Record
    """The first line of the attempt that did it."""


def done_beyond(records: Iterable[Record], resumed_at: int) -> dict[int, Done]:
    """The newest line of each step after ``resumed_at`` that is a measure for it.

    An attempt that diverged and went on is another course, for which older lines are none; one that was stopped for it
    has none itself. Steps in which replicas may have differed have none either, nor have those from a skip on, which
    moved the samples of all that follows.
    """
    found: dict[int, Done] = {}
    start: Record = {}
    stopped = False
    for record in records:
        if record.get("event") == "start":
            start, stopped = record, False
        elif record.get("event") == "step" and not stopped and resumed_at < record["step"] <= resumed_at + KEPT_STEPS:
            found[record["step"]] = Done(line=record, start=start)
        elif (skip := Skip.of(record)) is not None:
            found = {step: done for step, done in found.items() if step < skip.step}
        elif record.get("stops"):
            stopped = True
        elif record.get("agreed") is not None:
            found = {step: done for step, done in found.items() if step <= record["agreed"]}
    return found


def tolerance(old: Record, new: Record) -> float | None:
    """How far losses may differ, as a part of them, between attempts that began so; None: not comparable.

    That is where batches are cut in another way, or another kind of device draws the random numbers.
    0, equal to the last bit, under "elastic"; under "order" where the same number of processes adds in the same order:
    on the CPU, at equal world size, strategy and threads. DDP arranges its buckets anew in its first steps, and from
    three ranks on that is another order.
    """
    kinds = {old.get("determinism"), new["determinism"]}
    cut = all(old.get(name, new.get(name)) == new.get(name) for name in ("global_batch", "shards", "device"))
    if "off" in kinds or not cut:
        return None
    same = all(old.get(name) == new[name] for name in ("world", "strategy", "threads", "device"))
    rearranged = new["strategy"] == "ddp" and new["world"] > 2
    if kinds == {"elastic"} or (kinds == {"order"} and same and new["device"] == "cpu" and not rearranged):
        return 0.0
    return 0.01 if new["precision"] == "fp32" else 0.05


def diagnose(old: Record, new: Record, *, updates: int, tolerance: float) -> Divergence | None:
    """What the first differing value of a step done again points to; None when nothing differs.

    ``updates``: of the parameters, since the checkpoint, by steps that came to the same.
    """
    for name in (*_SETTLED, *_RESULTS):
        if not _differs(name, old, new, tolerance):
            continue
        cause: Cause
        if name in _SETTLED:
            cause = _SETTLED[name]
        elif updates == 0:
            cause = "parameters" if name == "loss" else "gradients"
        else:
            # Where rounding is allowed for, a wrong first update may show only later.
            cause = "optimizer" if updates == 1 or tolerance else "computation"
        return Divergence(step=new["step"], what=name, old=old[name], new=new[name], cause=cause)
    return None


def _differs(name: str, old: Record, new: Record, tolerance: float) -> bool:
    if name not in old or name not in new:
        return False  # a line of an older version
    before, now = old[name], new[name]
    if before is None or now is None:
        return before is not now and name != "digest"  # not finite; no digest: samples without numbers
    if name in _RESULTS:
        return abs(now - before) > _RESULTS[name] * tolerance * max(abs(now), abs(before))
    return bool(before != now)


class Replay:
    """Compares this attempt's lines with those of ``done``, one after the other, to the first divergence.

    ``start``: the first line of this attempt. ``stops``: whether a divergence will end it.
    """

    def __init__(self, done: Mapping[int, Done], start: Record, *, stops: bool) -> None:
        self._left = dict(done)
        self._start = start
        self._stops = stops
        self._updates = 0
        self.equal = 0
        """Steps that came to the same."""
        self.divergence: Divergence | None = None
        """Where they ceased to."""

    @property
    def over(self) -> bool:
        """Whether there is nothing more to compare."""
        return self.divergence is not None or not self._left

    def compare(self, line: Record) -> None:
        """The next step is done."""
        done = self._left.pop(line["step"], None)
        allowed = None if done is None else tolerance(done.start, self._start)
        if done is not None and allowed is not None:
            self.divergence = diagnose(done.line, line, updates=self._updates, tolerance=allowed)
            self.equal += self.divergence is None
        self._updates += bool(line.get("updated", True))

    def event(self) -> Record:
        """For the ledger: how many steps came to the same; the first that did not, and the last one before it."""
        event: Record = {"event": "replay", "equal": self.equal}
        if (found := self.divergence) is not None:
            event |= {"divergence": asdict(found), "agreed": found.step - 1, "stops": self._stops}
        return event
