"""``elastic-runner status``: what a run has come to."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import tyro
from rich.table import Table
from rich.text import Text

from elastic_runner import paths
from elastic_runner.cli.checkpoint import Reading
from elastic_runner.cli.tables import print_table
from elastic_runner.errors import Damaged, ExitCode, NotFound


@dataclass(frozen=True, kw_only=True)
class StatusArguments(Reading):
    """What a run has come to: its summary, with counts made anew from the ledger."""

    run_dir: tyro.conf.Positional[str]
    """The run directory, a path or fsspec URL."""


def status(arguments: list[str]) -> int:
    """Run the verb and return the exit code."""
    from elastic_runner.data.ledger import read_records
    from elastic_runner.data.tally import count
    from elastic_runner.storage import open_storage
    from elastic_runner.train.record import read_summary

    wanted = tyro.cli(StatusArguments, prog="elastic-runner status", args=arguments)
    storage = open_storage(wanted.run_dir, wanted.options)
    summary = read_summary(storage)
    if summary is None:
        if paths.SUMMARY in storage.list(""):
            raise Damaged(f"{storage.url}/{paths.SUMMARY} is no summary; a start of the run writes it anew")
        raise NotFound(f"{storage.url} holds no run: there is no {paths.SUMMARY}")
    led_here, lost = count(lambda: read_records(storage))
    counts = {**{k: v for k, v in asdict(led_here).items() if not k.startswith("_")}, "lost": lost}
    if wanted.json:
        print(json.dumps({"summary": asdict(summary), "ledger": counts}))
        return ExitCode.FINISHED
    table = Table(title=Text(storage.url), title_justify="left", show_header=False, box=None)
    for name, value in asdict(summary).items():
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if name == "updated" else value
        table.add_row(name.replace("_", " "), Text(str(text)))
    table.add_row("by the ledger", ", ".join(f"{name} {value}" for name, value in counts.items()))
    print_table(table)
    return ExitCode.FINISHED
