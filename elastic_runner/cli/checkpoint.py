"""The verbs of ``elastic-runner checkpoint`` and what they print; what they do is in ``checkpoint/``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pydantic.dataclasses
import tyro
from rich.table import Table
from rich.text import Text

from elastic_runner.cli.contents import diff, export, import_, inspect
from elastic_runner.cli.tables import print_table
from elastic_runner.config import STRICT, CheckpointConfig, Hours, NotNegative, Positive
from elastic_runner.errors import ExitCode

if TYPE_CHECKING:
    from elastic_runner.checkpoint.manifest import Listing
    from elastic_runner.checkpoint.pruning import Plan, Pruned


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What every verb that reads a storage takes."""

    options: dict[str, str] = field(default_factory=dict)
    """Options of the filesystem, dotted for nested ones: client_kwargs.endpoint_url http://..."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True, kw_only=True)
class CheckpointArguments(Reading):
    """The checkpoints below a checkpoint URL or a run directory, newest first."""

    url: tyro.conf.Positional[str]
    """Path or fsspec URL."""


@dataclass(frozen=True, kw_only=True)
class OneCheckpoint(CheckpointArguments):
    """One of them."""

    step: tyro.conf.Positional[int]
    """Its step."""
    attempt: int | None = None
    """The attempt that wrote it; by default the newest that saved this step."""


@dataclass(frozen=True, kw_only=True)
class PinArguments(OneCheckpoint):
    """Keep a checkpoint whatever the retention policies say (pin), or leave it to them again (unpin)."""


@dataclass(frozen=True, kw_only=True)
class TrustArguments(OneCheckpoint):
    """Take back that a checkpoint is suspect: it was repaired, or the failure had another cause."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class PruneArguments(CheckpointArguments):
    """Delete checkpoints that nothing keeps, and what saves that were never committed have left.

    The newest healthy one, pinned ones and those being read always stay.
    """

    keep: Positive
    """Newest healthy checkpoints to keep."""
    keep_every: Positive | None = None
    """Keep besides the first checkpoint at or after every multiple of so many steps."""
    keep_hours: Hours | None = None
    """Keep besides the first checkpoint, and then one every so many hours."""
    keep_best: NotNegative = 0
    """Keep besides so many of the best by --best-metric."""
    best_metric: str = "loss"
    """Name of a metric given at save."""
    best_mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    dry_run: bool = False
    """Only say what would go and why the rest stays."""


def checkpoint(arguments: list[str]) -> int:
    """Run one of VERBS and return the exit code."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb in VERBS:
        return VERBS[verb](rest)
    asked = verb in ("-h", "--help")
    usage = f"usage: elastic-runner checkpoint {'|'.join(VERBS)} ...; 'elastic-runner checkpoint VERB --help' says more"
    print(usage, file=sys.stdout if asked else sys.stderr)
    return ExitCode.FINISHED if asked else ExitCode.USAGE


def _ls(arguments: list[str]) -> int:
    return _look("ls", arguments)


def _verify(arguments: list[str]) -> int:
    return _look("verify", arguments)


def _look(verb: str, arguments: list[str]) -> int:
    from elastic_runner.checkpoint.tools.overview import COLUMNS, look

    wanted = tyro.cli(CheckpointArguments, prog=f"elastic-runner checkpoint {verb}", args=arguments)
    rows = look(wanted.url, wanted.options, digests=verb == "verify")
    if wanted.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print_table(COLUMNS, [row.cells(time.time()) for row in rows], needed=("verified",))
    damaged = verb == "verify" and any(row.unusable for row in rows)
    return ExitCode.FAILED if damaged else ExitCode.FINISHED


def _pin(arguments: list[str]) -> int:
    return _set_pin("pin", arguments)


def _unpin(arguments: list[str]) -> int:
    return _set_pin("unpin", arguments)


def _set_pin(verb: str, arguments: list[str]) -> int:
    from elastic_runner.checkpoint.marks import pin, unpin
    from elastic_runner.checkpoint.tools.overview import find, open_checkpoints

    wanted = tyro.cli(PinArguments, prog=f"elastic-runner checkpoint {verb}", args=arguments)
    storage = open_checkpoints(wanted.url, wanted.options)
    found = find(storage, wanted.step, wanted.attempt)
    was, pinned = found.marks.pinned, verb == "pin"
    (pin if pinned else unpin)(storage, found.manifest)
    facts = {"step": found.manifest.step, "attempt": found.manifest.attempt, "pinned": pinned, "changed": was != pinned}
    if wanted.json:
        print(json.dumps(facts))
    else:
        state = f"{'already ' if pinned else 'not '}pinned" if was == pinned else verb + "ned"
        print(f"step {found.manifest.step} of attempt {found.manifest.attempt}: {state}")
    return ExitCode.FINISHED


def _trust(arguments: list[str]) -> int:
    from elastic_runner.checkpoint.marks import trust
    from elastic_runner.checkpoint.tools.overview import find, open_checkpoints

    wanted = tyro.cli(TrustArguments, prog="elastic-runner checkpoint trust", args=arguments)
    storage = open_checkpoints(wanted.url, wanted.options)
    manifest = find(storage, wanted.step, wanted.attempt).manifest
    said = trust(storage, manifest)
    if wanted.json:
        print(json.dumps({"step": manifest.step, "attempt": manifest.attempt, "taken_back": said}))
    else:
        print(f"step {manifest.step} of attempt {manifest.attempt}: trusted" + ("" if said else " already"))
        for reason in said:
            print(f"taken back: {reason}")
    return ExitCode.FINISHED


def _prune(arguments: list[str]) -> int:
    from elastic_runner.checkpoint.pruning import carry_out
    from elastic_runner.checkpoint.retention import retention_of
    from elastic_runner.checkpoint.tools.overview import open_checkpoints, plan_by_hand

    wanted = tyro.cli(PruneArguments, prog="elastic-runner checkpoint prune", args=arguments)
    storage = open_checkpoints(wanted.url, wanted.options)
    shared = {name: getattr(wanted, name) for name in _RETENTION}
    listing, plan = plan_by_hand(storage, retention_of(CheckpointConfig(**shared)))
    done = None if wanted.dry_run else carry_out(storage, plan)
    fates = _fates(listing, plan, done)
    swept = list(plan.sweep if done is None else done.swept)
    trouble = list(done.trouble) if done else []
    rejected = [one.reason for one in listing.rejected]
    if wanted.json:
        told = {"dry_run": wanted.dry_run, "checkpoints": fates, "swept": swept, "trouble": trouble}
        print(json.dumps({**told, "rejected": rejected}))
    else:
        _print_pruning(fates, swept, [*trouble, *rejected], dry_run=wanted.dry_run)
    return ExitCode.FAILED if trouble else ExitCode.FINISHED


_RETENTION = ("keep", "keep_every", "keep_hours", "keep_best", "best_metric", "best_mode")


def _fates(listing: Listing, plan: Plan, done: Pruned | None) -> list[dict[str, Any]]:
    """For each checkpoint, newest first, whether it goes and why, as planned or as done."""
    going = {checkpoint.manifest.path: why for checkpoint, why in plan.delete}
    kept = plan.keep if done is None else done.kept
    gone = going.keys() if done is None else set(done.deleted)
    return [
        {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "size": manifest.size,
            "goes": manifest.path in gone,
            "why": kept.get(manifest.path) or going[manifest.path],
        }
        for manifest in listing.manifests
    ]


def _print_pruning(fates: list[dict[str, Any]], swept: list[str], notes: list[str], *, dry_run: bool) -> None:
    from elastic_runner.checkpoint.tools.overview import readable_size

    word = "would go" if dry_run else "deleted"
    columns = ("step", "attempt", "size", "fate", "because")
    rows = [
        [str(f["step"]), str(f["attempt"]), readable_size(f["size"]), word if f["goes"] else "stays", f["why"]]
        for f in fates
    ]
    _print_table(columns, rows, needed=columns)
    for directory in swept:
        print(f"{directory}, left by a save that was never committed: {word}")
    for note in notes:
        print(f"note: {note}")
    going = [fate["size"] for fate in fates if fate["goes"]]
    again = ". Without --dry-run it is done." if dry_run and (going or swept) else ""
    print(f"{len(going)} of {len(fates)} checkpoints ({readable_size(sum(going))}) {word}{again}")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, needed: Collection[str] = ()) -> None:
    """Print ``rows`` without the columns in which nothing is said, unless ``needed``."""
    shown = [i for i, name in enumerate(columns) if name in needed or any(row[i] for row in rows)]
    numbers = ("step", "attempt", "age", "size", "world")
    table = Table(box=None, pad_edge=False)
    for index in shown:
        table.add_column(columns[index], justify="right" if columns[index] in numbers else "left")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))
    print_table(table)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "ls": _ls,
    "verify": _verify,
    "inspect": inspect,
    "diff": diff,
    "export": export,
    "import": import_,
    "pin": _pin,
    "unpin": _unpin,
    "trust": _trust,
    "prune": _prune,
}
