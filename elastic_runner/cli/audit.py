"""``elastic-runner audit``: what a run's record proves of the samples that it has used, and how that is printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import tyro
from rich.table import Table
from rich.text import Text

from elastic_runner.cli.checkpoint import Reading
from elastic_runner.cli.tables import print_table
from elastic_runner.errors import ExitCode, NotFound

if TYPE_CHECKING:
    from elastic_runner.data.audit import Audit
    from elastic_runner.data.coverage import Portion

_ATTEMPTS = 10
_VERDICTS = {"proven": "proven", "open": "not proven", "refuted": "WRONG"}


@dataclass(frozen=True, kw_only=True)
class AuditArguments(Reading):
    """Prove from a run's ledger alone that each epoch used each sample once, in the order of the seed.

    Steps, resumes, batch size, positions and digests of sample ids are checked against the order computed again. Exit
    code 0: all of it is proven. 1: something is wrong (refuted, in JSON), or the record does not suffice (open), as of
    streams, of ledgers without digests and of what came before an imported state. The run may go on meanwhile.
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory, a path or fsspec URL."""


def audit(arguments: list[str]) -> int:
    """Run the verb and return the exit code."""
    from elastic_runner.data.audit import audit as judge
    from elastic_runner.data.ledger import read_records
    from elastic_runner.storage import open_storage

    wanted = tyro.cli(AuditArguments, prog="elastic-runner audit", args=arguments)
    storage = open_storage(wanted.run_dir, wanted.options)
    found = judge(lambda: read_records(storage))
    if not found.attempts and not found.steps:
        raise NotFound(f"{storage.url} holds no run: there is no ledger")
    if wanted.json:
        print(json.dumps(asdict(found)))
    else:
        _print(storage.url, found)
    return ExitCode.FINISHED if found.verdict == "proven" else ExitCode.FAILED


def _print(url: str, found: Audit) -> None:
    attempts = f"{len(found.attempts):,} attempt{'s' * (len(found.attempts) != 1)}"
    lost = f"{found.lost:,} more were lost at restarts" if found.lost else "none was lost"
    print(f"{_verdict(found)}\n{url}: {found.steps:,} steps on record in {attempts}, {lost}\n")
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for each in found.findings:
        table.add_row(_VERDICTS[each.verdict], each.claim, Text(each.seen))
    print_table(table)
    for each in found.findings:
        if each.count:
            print(f"\n{each.claim}: {each.count:,} fault{'s' * (each.count != 1)}")
            for words in each.faults:
                print(f"  {words}")
            if each.count > len(each.faults):
                print(f"  ... and {each.count - len(each.faults):,} more")
    _print_portions("by data.last_batch", [p for p in found.portions if p.kind in ("dropped", "padded")])
    _print_portions("by training.skip_failing", _skipped(found))
    _print_attempts(found)


def _print_portions(title: str, portions: Sequence[Portion]) -> None:
    from elastic_runner.data.coverage import describe

    if portions:
        print(f"\n{title}")
        for portion in portions[-_ATTEMPTS:]:
            print(f"  {describe(portion)}")
        if len(portions) > _ATTEMPTS:
            print(f"  and {len(portions) - _ATTEMPTS:,} more (--json)")


def _skipped(found: Audit) -> list[Portion]:
    return [portion for portion in found.portions if portion.kind == "skipped" and not portion.is_fault]


def _print_attempts(found: Audit) -> None:
    table = Table("attempt", "ranks", "strategy", "resumed after", "steps", "lost", box=None, pad_edge=False)
    for each in found.attempts[-_ATTEMPTS:]:
        values = (each.attempt, each.world, each.strategy, each.resumed_at, each.steps, each.lost)
        table.add_row(*("?" if value is None else str(value) for value in values))
    print()
    print_table(table)
    if len(found.attempts) > _ATTEMPTS:
        print(f"and {len(found.attempts) - _ATTEMPTS:,} earlier attempts (--json)")


def _verdict(found: Audit) -> str:
    if found.verdict == "proven":
        skipped = sum(portion.in_all for portion in _skipped(found))
        but = f", but for {skipped:,} skipped on record" if skipped else ""
        return f"proven: each sample was used once per epoch{but}, in the order of the seed"
    claims = [each.claim for each in found.findings if each.verdict == found.verdict]
    if found.verdict == "open":
        return f"not proven, though nothing is wrong: {', '.join(claims)}"
    return f"WRONG: it does not hold that {', '.join(claims)}"
