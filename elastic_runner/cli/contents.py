"""``elastic-runner checkpoint inspect|diff|export|import``: arguments and what is printed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table
from rich.text import Text

from elastic_runner.cli.tables import print_table
from elastic_runner.errors import ElasticRunnerError, ExitCode
from elastic_runner.observability.progress import byte_bar

if TYPE_CHECKING:
    from elastic_runner.checkpoint.tools.description import Description, TensorLine, Total
    from elastic_runner.checkpoint.tools.difference import Difference

_LONGEST = 200
"""Characters of plain data that are shown."""
_MOST = 40
"""Differences of a kind that are shown without --all."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
    """Run directory or checkpoint URL: its newest checkpoint, or URL@STEP. Or a .safetensors or torch.save file, or a
    directory of torch.distributed.checkpoint."""
    step: int | None = None
    """The step, instead of URL@STEP."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the filesystem, dotted for nested ones: client_kwargs.endpoint_url http://..."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True, kw_only=True)
class InspectArguments(_Source):
    """What a checkpoint holds, without reading a tensor."""

    all: bool = False
    """List the optimizer's tensors one by one as well."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments(_Source):
    """Write a checkpoint as a file that other programs read.

    safetensors: one file; model tensors by their own names. torch: one file that torch.load(weights_only=True) reads,
    its entry "model" a state dict. dcp: a directory that torch.distributed.checkpoint reads.
    """

    destination: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DEST")]
    """File or, for dcp, directory to write: a path or fsspec URL."""
    to: Literal["safetensors", "torch", "dcp"]
    """What to write."""
    model_only: bool = False
    """The model's weights without optimizer, data position and the rest."""
    verify: bool = True
    """Compare the checkpoint with its digests."""
    force: bool = False
    """Replace what is there."""
    destination_options: dict[str, str] = field(default_factory=dict)
    """Options of the destination's filesystem; by default those of --options where the scheme is the same."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Commit what an exported or foreign file holds as a checkpoint that a run restores.

    Of a foreign file only a model's weights are taken; the run that starts from them must say so, by
    --checkpoint.allow-missing 'optimizer.*' 'state.*'.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """A .safetensors or torch.save file or a directory of torch.distributed.checkpoint, on any fsspec URL; or another
    run's checkpoint, URL@STEP."""
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
    """Run directory or checkpoint URL to commit it below."""
    step: int | None = None
    """The step it is of; needed where the file does not say."""
    format: Literal["sharded", "full"] = "sharded"
    """Layout to write."""
    model_only: bool = False
    """Take the model's weights alone."""
    keep_names: bool = False
    """Leave a foreign file's names as they are, prefixes of DDP and torch.compile included."""
    verify: bool = True
    """Compare another run's checkpoint with its digests."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of URL's filesystem, dotted for nested ones: client_kwargs.endpoint_url http://..."""
    file_options: dict[str, str] = field(default_factory=dict)
    """Options of FILE's filesystem; by default those of --options where the scheme is the same."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True, kw_only=True)
class DiffArguments:
    """Compare two states to the last bit, whatever their formats and the worlds that wrote them.

    Exit code 0: the same; 1: different; 2 or 3: they could not be compared.
    """

    a: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """Run directory or checkpoint URL: its newest checkpoint, or URL@STEP. Or an exported file."""
    b: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """The other."""
    all: bool = False
    """Print every difference, not only the first of many."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of A's filesystem, dotted for nested ones: client_kwargs.endpoint_url http://..."""
    b_options: dict[str, str] = field(default_factory=dict)
    """Options of B's filesystem; by default those of --options where the scheme is the same."""
    json: bool = False
    """Print JSON for machines."""


def inspect(arguments: list[str]) -> int:
    """Print what a checkpoint holds."""
    from elastic_runner.checkpoint.tools.description import as_json, describe
    from elastic_runner.checkpoint.tools.opening import opened

    wanted = _parsed(InspectArguments, "inspect", arguments)
    with opened(wanted.url, wanted.options, step=wanted.step, lease=False) as source:
        description = describe(source)
    if wanted.json:
        print(json.dumps(as_json(description)))
    else:
        _print_description(description, every=wanted.all)
    return ExitCode.FINISHED


def export(arguments: list[str]) -> int:
    """Write a checkpoint as a file for others."""
    from elastic_runner.checkpoint.tools.export import export as write
    from elastic_runner.checkpoint.tools.opening import opened

    wanted = _parsed(ExportArguments, "export", arguments)
    options = _options(wanted.destination, wanted.destination_options, wanted.url, wanted.options)
    with opened(wanted.url, wanted.options, step=wanted.step) as source:
        done = write(
            source,
            wanted.destination,
            options,
            to=wanted.to,
            model_only=wanted.model_only,
            verify=wanted.verify,
            force=wanted.force,
            bar=byte_bar,
        )
    if wanted.json:
        print(json.dumps({**asdict(done), "source": source.where, "notes": source.notes}))
        return ExitCode.FINISHED
    _print_notes(source.notes)
    print(f"{source.where} -> {done.destination}: {done.tensors} tensors, {_bytes(done.size)}, {done.to}")
    return ExitCode.FINISHED


def import_(arguments: list[str]) -> int:
    """Commit a file as a checkpoint."""
    from elastic_runner.checkpoint.tools.importing import import_state
    from elastic_runner.checkpoint.tools.opening import opened

    wanted = _parsed(ImportArguments, "import", arguments)
    options = _options(wanted.file, wanted.file_options, wanted.url, wanted.options)
    with opened(wanted.file, options, keep_names=wanted.keep_names) as source:
        done = import_state(
            source,
            wanted.url,
            wanted.options,
            step=wanted.step,
            format=wanted.format,
            model_only=wanted.model_only,
            verify=wanted.verify,
            bar=byte_bar,
        )
    if wanted.json:
        print(json.dumps(asdict(done)))
        return ExitCode.FINISHED
    _print_notes(done.notes)
    print(f"committed step {done.step} below {done.url}: {done.tensors} tensors, {_bytes(done.size)}, {done.format}")
    if done.weights_only:
        print("It holds weights only. To start from them: --checkpoint.allow-missing 'optimizer.*' 'state.*'")
    if not done.url.rstrip("/").endswith("/checkpoints"):
        print(f"A run finds it by --checkpoint.url {done.url}")
    return ExitCode.FINISHED


def diff(arguments: list[str]) -> int:
    """Compare two states."""
    from elastic_runner.checkpoint.tools.difference import as_json, compare
    from elastic_runner.checkpoint.tools.opening import opened

    wanted = _parsed(DiffArguments, "diff", arguments)
    b_options = _options(wanted.b, wanted.b_options, wanted.a, wanted.options)
    try:
        with (
            opened(wanted.a, wanted.options) as a,
            opened(wanted.b, b_options) as b,
            byte_bar("comparing", a.contents.nbytes) as tick,
        ):
            found = compare(a.contents, b.contents, tick)
    except ElasticRunnerError as error:
        if error.exit_code == ExitCode.FAILED:  # which says "different" here
            error.exit_code = ExitCode.USAGE
        raise
    if wanted.json:
        print(json.dumps({"a": a.where, "b": b.where, **as_json(found)}))
    else:
        _print_difference(found, a.where, b.where, most=10**9 if wanted.all else _MOST)
    return ExitCode.FINISHED if found.same else ExitCode.FAILED


def _parsed(kind: Any, verb: str, arguments: list[str]) -> Any:
    return tyro.cli(kind, prog=f"elastic-runner checkpoint {verb}", args=arguments)


def _options(url: str, own: dict[str, str], other: str, others: dict[str, str]) -> dict[str, str]:
    """Options for ``url``: its own, else those of a URL of the same scheme."""
    schemes = [each.partition("://")[0] if "://" in each else "" for each in (url, other)]
    return own or (others if schemes[0] == schemes[1] else {})


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def _bytes(size: int) -> str:
    from elastic_runner.checkpoint.tools.overview import readable_size

    return readable_size(size)


def _print_description(told: Description, *, every: bool) -> None:
    print(told.where)
    facts = [] if told.step is None else [f"step {told.step}"]
    if told.attempt is not None:
        facts.append(f"attempt {told.attempt}" if told.attempt else "imported")
    facts.append(told.kind)
    if told.world_size is not None:
        facts.append(f"written by {told.world_size} rank{'s' if told.world_size > 1 else ''}")
    if told.size is not None:
        facts.append(f"{_bytes(told.size)} in {told.files} file{'s' if told.files != 1 else ''}")
    if told.created is not None:
        facts.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told.created)))
    facts += [f"{name} {version}" for name, version in told.versions.items()]
    print(f"  {' · '.join(facts)}")
    for note in told.notes:
        print(f"  note: {note}")
    print(f"\nmodel: {_total(told.totals['model'])}")
    _print_lines([line for line in told.tensors if line.part == "model"])
    for alias, name in told.aliases.items():
        print(f"  {alias} is {name}")
    _print_optimizer(told, every=every)
    _print_states(told)


def _print_optimizer(told: Description, *, every: bool) -> None:
    from elastic_runner.checkpoint.tools.description import by_field

    if told.optimizer is None:
        print("\noptimizer: none, weights only")
        return
    print(f"\noptimizer: {_total(told.totals['optimizer'])}")
    for number, group in enumerate(told.optimizer):
        settings = ", ".join(f"{name} {_say(value)}" for name, value in group.items() if name != "params")
        print(f"  group {number}: {group['params']} parameters, {settings}")
    if every:
        _print_lines([line for line in told.tensors if line.part == "optimizer"])
        return
    for field_line in by_field(told.tensors):
        print(f"  {field_line.field}: {_total(field_line.total)}, {field_line.dtypes}")


def _print_states(told: Description) -> None:
    if told.states or told.totals["other"].tensors:
        print(f"\nother state: {_total(told.totals['other'])}")
    for key, value in told.states.items():
        print(f"  {key.removeprefix('state.')}: {_say(value)}")
    _print_lines([line for line in told.tensors if line.part == "other"])


def _print_lines(lines: list[TensorLine]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(lines))
    for name in ("  tensor", "type", "shape", "size", "in"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for line in lines:
        place = line.files[0] if len(line.files) == 1 else f"{len(line.files)} files"
        if line.chunks > 1:
            place = f"{line.chunks} chunks, {place}"
        name = line.key.removeprefix("model.")
        table.add_row(*map(Text, (f"  {name}", line.dtype, str(list(line.shape)), _bytes(line.nbytes), place)))
    if lines:
        print_table(table)


def _print_difference(found: Difference, a: str, b: str, *, most: int) -> None:
    print(f"a: {a}\nb: {b}")
    if found.same:
        print(f"no difference: {found.equal} tensors and all plain data are the same to the last bit")
        return
    for side, keys in (("a", found.only_a), ("b", found.only_b)):
        _print_some([f"only in {side}: {key}" for key in keys], most)
    table = Table("tensor", "differs in", "elements", "max abs", "max rel", "NaN a", "NaN b", box=None, pad_edge=False)
    for each in found.tensors[:most]:
        if each.what == "values":
            share = f"{each.elements} of {each.of}"
            numbers = ["" if n is None else f"{n:.3g}" for n in (each.max_abs, each.max_rel)]
            cells = [each.key, "values", share, *numbers, str(each.nan_a or ""), str(each.nan_b or "")]
        else:
            cells = [each.key, f"{each.what}: {each.a}, {each.b}"]
        table.add_row(*map(Text, cells))
    if found.tensors:
        print_table(table)
    _print_some([""] * len(found.tensors), most, skip=True)
    _print_some([f"{each.path}: {_say(each.a)} -> {_say(each.b)}" for each in found.plain], most)
    counts = f"{len(found.tensors)} tensors differ, {found.equal} are the same"
    alone = f"{len(found.only_a)} are only in a, {len(found.only_b)} only in b"
    print(f"{counts}, {alone}; {len(found.plain)} differences in plain data")


def _print_some(lines: list[str], most: int, *, skip: bool = False) -> None:
    for line in [] if skip else lines[:most]:
        print(line)
    if len(lines) > most:
        print(f"... and {len(lines) - most} more (--all)")


def _total(total: Total) -> str:
    return f"{total.tensors} tensor{'s' * (total.tensors != 1)}, {total.numel:,} elements, {_bytes(total.nbytes)}"


def _say(value: Any) -> str:
    """Plain data in one line."""
    from elastic_runner.checkpoint.capture import references

    if isinstance(value, str) and references(value):
        return "(tensor)"
    if isinstance(value, dict) and value:
        text = ", ".join(f"{key} {_say(item)}" for key, item in value.items())
    else:
        text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
