"""The audit: what a run's record proves of the samples that the run has used.

It reads the record alone and recomputes the order by itself: model, dataset and checkpoints are not asked. Steps that
were lost at a restart and done again are counted, not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_runner.data.claims import Batch, Coverage, Finding, Line, Order, Rates, Resumes, Step, Steps, Verdict
from elastic_runner.data.coverage import Portion
from elastic_runner.data.ledger import Record
from elastic_runner.data.lineage import Lineage, from_outside, is_start
from elastic_runner.data.skips import START, Skip, begins


@dataclass(frozen=True, kw_only=True)
class AttemptLines:
    """What one attempt left on record."""

    attempt: int
    """Its number."""
    world: int | None
    """Ranks."""
    strategy: str | None
    """Of its model."""
    resumed_at: int
    """The step that it continued after."""
    steps: int
    """Steps that led to the present state."""
    lost: int
    """Steps that were lost at a later start, and done again."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the whole record proves."""

    verdict: Verdict
    """The worst of all claims."""
    steps: int
    """Steps that led to the present state."""
    lost: int
    """Steps on record that were lost and done again."""
    findings: tuple[Finding, ...]
    """One for each claim."""
    portions: tuple[Portion, ...]
    """Samples that an epoch did not use exactly once, faults or not."""
    attempts: tuple[AttemptLines, ...]
    """In the order of the record."""


def audit(read: Callable[[], Iterable[Record]]) -> Audit:
    """Judge the records that ``read`` gives.

    It is called twice, so that a ledger need not fit into memory. Attempts that have begun by the second time are left
    for the next audit.
    """
    lineage, auditor = Lineage(read()), _Auditor()
    for record, led, _ in lineage.marked(read()):
        if is_start(record):
            auditor.start(record, led)
        elif record.get("event") == "step":
            auditor.step(record, led)
        elif (skip := Skip.of(record)) is not None:
            auditor.skip(skip)
    return auditor.result()


class _Auditor:
    """Puts the lines that led to the present state in place and before the judges."""

    def __init__(self) -> None:
        self._steps, self._coverage = Steps(), Coverage()
        self._judges = (self._steps, Resumes(), Batch(), self._coverage, Order(), Rates())
        self._starts: dict[int, Record] = {}
        self._led: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._before: Line | None = None
        self._skips: list[Skip] = []
        self._at = 0
        self._resumed, self._place_known = False, True

    def start(self, record: Record, led: bool) -> None:
        """An attempt begins; ``led``: what it rests on led to the present state."""
        attempt, resumed_at = record.get("attempt", 0), record["resumed_at"]
        self._starts.setdefault(attempt, record)
        if led:
            self._place_known = resumed_at == self._at
            self._at, self._resumed = resumed_at, True
            for judge in self._judges:
                judge.start(attempt, resumed_at, imported=from_outside(record))

    def skip(self, skip: Skip) -> None:
        """From now on this global batch is passed over."""
        self._skips.append(skip)
        self._coverage.skip(skip)

    def step(self, record: Record, led: bool) -> None:
        """A step was committed; ``led``: to the present state."""
        if not led:
            self._lost[record.get("attempt", 0)] += 1
            return
        line = Line.of(record)
        if line is None:
            self._steps.fault(f"the line of step {record.get('step')} lacks something that has to be in it")
            return
        self._led[line.attempt] += 1
        place_known = self._place_known and line.step == self._at + 1
        step = Step(
            line=line,
            record=record,
            before=self._before,
            start=self._starts.get(line.attempt, {}),
            resumed=self._resumed,
            continues=not place_known or self._continues(line),
        )
        for judge in self._judges:
            judge.step(step)
        self._before, self._at, self._resumed, self._place_known = line, line.step, False, True

    def result(self) -> Audit:
        """After all records."""
        findings = tuple(judge.finding() for judge in self._judges)
        verdicts = {finding.verdict for finding in findings}
        return Audit(
            verdict="refuted" if "refuted" in verdicts else "open" if "open" in verdicts else "proven",
            steps=self._led.total(),
            lost=self._lost.total(),
            findings=findings,
            portions=tuple(self._coverage.portions),
            attempts=tuple(
                AttemptLines(
                    attempt=attempt,
                    world=start.get("world"),
                    strategy=start.get("strategy"),
                    resumed_at=start["resumed_at"],
                    steps=self._led[attempt],
                    lost=self._lost[attempt],
                )
                for attempt, start in self._starts.items()
            ),
        )

    def _continues(self, line: Line) -> bool:
        before = self._before
        after = START if before is None else (before.epoch, before.last)
        return begins((line.epoch, line.first), after, self._skips)
