"""The recovery benchmark: one fault after the other, ours and stock torchrun in turn on the same script."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import annotated_types
import tyro
from rich.console import Console

from benchmarks.recovery_floor import Floor
from benchmarks.recovery_jobs import ENDING, TUNED, Contender, Job
from benchmarks.recovery_watch import PARTS, NotRecovered, Recovery
from benchmarks.trials import Figures, machine, print_table, write_json
from elastic_runner.launch.processes import adopt_orphans, end_descendants

Strike = Callable[[Job, int, random.Random], Callable[[], object]]
"""Of a job, an attempt and chance: what is done to it."""
Results = dict[str, list[Recovery]]
"""By contender."""

OURS, FLOOR, STOCK_ELASTIC = "ours", "floor", "stock_elastic"
BLOCK = 5
"""Faults of one run, then it is another contender's turn."""
GIVE_UP = 3
"""Faults of a contender in a case after which there was no recovery."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Seconds from a fault to the next committed step: ours (elastic-runner launch), and stock torch.distributed.run
    on the same script (MLP, 10 MB of state, 2 workers, a checkpoint every 20 steps, our Worker in it).

    worker_kill: SIGKILL of a random worker at a random moment. Stock in three ways: --standalone; --nnodes=1:2 with
    c10d, which waits 30 s of last call at each restart; tuned, with last_call_timeout=1 and a store per restart.
    floor: fork, process groups, load and one step by our fork server without an agent, nothing to notice or tear down.

    worker_kill_two: the same with two agents of one worker each. agent_kill: of two agents (--nnodes=1:2) the one that
    does not host the rendezvous is killed with its worker; store_host_kill: the one that does. The other goes on alone.
    freeze: SIGSTOP of a random worker; freeze_notice_s: until the evidence is in the run directory.

    Each recovery is split, from outside and for all alike: ended (the last old worker is gone), rendezvous (first
    worker of the attempt that made the step is there), start (its attempt is on record), load (the ledger says where
    it resumes), first_step (by the ledger line's own time). steps_lost: steps that were on the ledger and were done
    again. Contenders take turns, five faults each, in a fresh run (agents' ends: one). Names without a contender are
    ours; ..._s are medians, each part's its own, so that parts need not add up to the last digit. Stock is flattered:
    the script's Worker has its process leave as soon as a peer is gone, where a plain one waits for torch's time-outs.
    """

    json: Path | None = None
    """Write the figures to this file, one flat object."""
    trials: Annotated[int, annotated_types.Ge(1)] = 15
    """Faults per case and contender."""
    stock_elastic_trials: Annotated[int, annotated_types.Ge(0)] = 15
    """The same for --nnodes=1:2 as it is, which takes more than a minute each."""
    seed: int = 0
    """Decides moments and ranks."""
    only: tuple[str, ...] = ()
    """Cases to measure; none: all."""
    contenders: tuple[str, ...] = ()
    """Whom to measure beside ours: stock_standalone, stock_elastic, stock_tuned, floor; none: all."""
    dir: Path = Path(tempfile.gettempdir())
    """Runs are written to a temporary directory in this one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of fault."""

    name: str
    """Its name in the results."""
    contenders: tuple[Contender, ...]
    """Who is hit by it, ours first."""
    strike: Strike
    """What happens."""
    block: int = BLOCK
    """Faults of one run."""
    evidence: bool = False
    """Whether evidence is waited for."""
    floor: bool = False
    """Whether the floor takes its turn."""


def signal_worker(number: signal.Signals) -> Strike:
    """A random worker gets a signal."""

    def strike(job: Job, attempt: int, chance: random.Random) -> Callable[[], object]:
        pid = chance.choice(job.watch.pids(attempt))
        return lambda: os.kill(pid, number)

    return strike


def lose_agent(*, host: bool) -> Strike:
    """The agent that hosts the rendezvous, or the other one, is killed with its worker."""

    def strike(job: Job, attempt: int, chance: random.Random) -> Callable[[], object]:
        which = job.host() if host else 1 - job.host()
        return lambda: job.lose(which)

    return strike


ONE = Contender(name=OURS, launcher="ours")
TWO_ELASTIC = Contender(name=OURS, launcher="ours", nodes="1:2", agents=2)
CASES = (
    Case(
        name="worker_kill",
        contenders=(
            ONE,
            Contender(name="stock_standalone", launcher="stock"),
            Contender(name=STOCK_ELASTIC, launcher="stock", nodes="1:2"),
            Contender(name="stock_tuned", launcher="stock", nodes="1:2", conf="last_call_timeout=1", variables=TUNED),
        ),
        strike=signal_worker(signal.SIGKILL),
        floor=True,
    ),
    Case(
        name="worker_kill_two",
        contenders=(
            Contender(name=OURS, launcher="ours", nodes="2", agents=2),
            Contender(
                name="stock_tuned", launcher="stock", nodes="2", agents=2, conf="last_call_timeout=1", variables=TUNED
            ),
        ),
        strike=signal_worker(signal.SIGKILL),
    ),
    Case(name="agent_kill", contenders=(TWO_ELASTIC,), strike=lose_agent(host=False), block=1),
    Case(name="store_host_kill", contenders=(TWO_ELASTIC,), strike=lose_agent(host=True), block=1),
    Case(name="freeze", contenders=(ONE,), strike=signal_worker(signal.SIGSTOP), evidence=True),
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 when a fault was not recovered from by ours."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and clean up on the way
    wanted = tyro.cli(Arguments, prog="scripts/bench recovery", args=list(argv))
    _check("case", wanted.only, [case.name for case in CASES])
    _check("contender", wanted.contenders, [*(each.name for case in CASES for each in case.contenders), FLOOR])
    adopt_orphans()  # what an agent that was killed leaves behind is found and ended
    print(f"seed {wanted.seed}, {wanted.trials} trials", flush=True)
    figures: Figures = {**machine(), "seed": wanted.seed, "trials": wanted.trials}
    failed = lost = 0
    with tempfile.TemporaryDirectory(prefix="elastic-runner-bench-", dir=wanted.dir.absolute()) as directory:
        try:
            for case in CASES:
                if case.name in wanted.only or not wanted.only:
                    series = Series(case, wanted, Path(directory))
                    try:
                        series.run()
                    finally:  # also what there is when somebody has had enough
                        report(case, series.results)
                    figures |= figures_of(case, series.results, series.failures)
                    failed += series.failures[OURS]
                    lost = max([lost, *(recovery.lost for recovery in series.results[OURS])])
        finally:
            end_descendants(ENDING)
    figures["steps_lost_max"] = lost
    if wanted.json is not None:
        write_json(wanted.json, figures)
    return 1 if failed else 0


def _check(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(given) - set(known):
        raise SystemExit(f"no {what} {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(known))}")


class Series:
    """All faults of a case, contenders in turn."""

    def __init__(self, case: Case, wanted: Arguments, directory: Path) -> None:
        self.results: Results = {}
        """What was seen, by contender, and the floor."""
        self.failures: dict[str, int] = {}
        """Faults without a recovery, by contender."""
        self._case = case
        self._directory = directory
        self._chance = random.Random(f"{wanted.seed} {case.name}")
        self._contenders = {contender.name: contender for contender in case.contenders}
        names = [*self._contenders, *([FLOOR] if case.floor else [])]
        chosen = {OURS, *(wanted.contenders or names)}
        self._wanted = {name: wanted.trials for name in names if name in chosen}
        if STOCK_ELASTIC in self._wanted:
            self._wanted[STOCK_ELASTIC] = wanted.stock_elastic_trials

    def run(self) -> None:
        """Until each has had its trials, or was given up."""
        self.results = {name: [] for name in self._wanted}
        self.failures = dict.fromkeys(self._wanted, 0)
        console = Console(stderr=True)
        with console.status(self._case.name) as status:
            while due := [name for name in self._wanted if self._left(name)]:
                for name in due:
                    status.update(f"{self._case.name}: {name}, {len(self.results[name])} of {self._wanted[name]} done")
                    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self._directory) as place:
                        try:
                            self._block(name, Path(place))
                        except (NotRecovered, ProcessLookupError) as error:
                            self.failures[name] += 1
                            console.print(
                                f"{self._case.name}, {name}: not recovered: {error}", markup=False, soft_wrap=True
                            )

    def _left(self, name: str) -> int:
        given_up = self.failures[name] >= GIVE_UP
        return 0 if given_up else min(self._case.block, self._wanted[name] - len(self.results[name]))

    def _block(self, name: str, place: Path) -> None:
        if name == FLOOR:
            with Floor(place) as floor:
                floor.settle()
                for _ in range(self._left(name)):
                    self.results[name].append(floor.trial())
            return
        with Job(self._contenders[name], place) as job:
            try:
                for _ in range(self._left(name)):
                    self.results[name].append(self._trial(job))
            except (NotRecovered, ProcessLookupError) as error:
                raise NotRecovered(f"{error}\n{job.last_words()}") from error

    def _trial(self, job: Job) -> Recovery:
        attempt = job.watch.until_settled(world=2)
        strike = self._case.strike(job, attempt, self._chance)
        time.sleep(self._chance.random())  # the moment is left to chance
        return job.watch.recovery(attempt, strike, evidence=self._case.evidence)


def figures_of(case: Case, results: Results, failures: Mapping[str, int]) -> Figures:
    """Flat names: the case's for ours, with the contender in it for others."""
    figures: Figures = {}
    for name, recoveries in results.items():
        prefix = case.name if name == OURS else f"{case.name}_{name}"
        figures[f"{prefix}_trials"] = len(recoveries)
        figures[f"{prefix}_not_recovered"] = failures[name]
        if not recoveries:
            continue
        seconds = [recovery.seconds for recovery in recoveries]
        figures[f"{prefix}_s"] = round(statistics.median(seconds), 3)
        figures[f"{prefix}_p95_s"] = round(p95(seconds), 3)
        figures[f"{prefix}_steps_lost_max"] = max(recovery.lost for recovery in recoveries)
        for part in PARTS:
            figures[f"{prefix}_{part}_s"] = round(statistics.median(each.parts[part] for each in recoveries), 3)
        if noticed := [recovery.noticed for recovery in recoveries if recovery.noticed is not None]:
            figures[f"{prefix}_notice_s"] = round(statistics.median(noticed), 3)
        if name not in (OURS, FLOOR) and results[OURS]:
            ours = statistics.median(recovery.seconds for recovery in results[OURS])
            # Of the first case these are the headline.
            ratio = f"{name}_over_ours" if case is CASES[0] else f"{prefix}_over_ours"
            figures[ratio] = round(statistics.median(seconds) / ours, 2)
    return figures


def p95(values: Sequence[float]) -> float:
    """The 95th percentile, between the two nearest values."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def report(case: Case, results: Results) -> None:
    """Print the case's table."""
    columns = ["s", "trials", "median", "p95", *(part.replace("_", " ") for part in PARTS), "steps lost (most)"]
    columns += ["evidence"] if case.evidence else []
    rows = [_row(name, recoveries, case) for name, recoveries in results.items() if recoveries]
    print_table(f"{case.name}: seconds from the fault to the next committed step", columns, rows)
    sys.stdout.flush()


def _row(name: str, recoveries: Sequence[Recovery], case: Case) -> list[str]:
    seconds = [recovery.seconds for recovery in recoveries]
    row = [name, str(len(recoveries)), f"{statistics.median(seconds):.2f}", f"{p95(seconds):.2f}"]
    row += [f"{statistics.median(recovery.parts[part] for recovery in recoveries):.2f}" for part in PARTS]
    row.append(str(max(recovery.lost for recovery in recoveries)))
    noticed = [recovery.noticed for recovery in recoveries if recovery.noticed is not None]
    return row + ([f"{statistics.median(noticed):.2f}" if noticed else "none"] if case.evidence else [])
