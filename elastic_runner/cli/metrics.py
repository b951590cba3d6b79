"""``elastic-runner metrics``: the record as numbers, for other programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import tyro

from elastic_runner.errors import ExitCode, NotFound


@dataclass(frozen=True, kw_only=True)
class MetricsArguments:
    """A run's numbers as JSON lines: each step once, in order, by the attempt that led to the present state."""

    run_dir: tyro.conf.Positional[str]
    """The run directory, a path or fsspec URL."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the filesystem, dotted for nested ones: client_kwargs.endpoint_url http://..."""


def metrics(arguments: list[str]) -> int:
    """Print them. Raises NotFound when there are none."""
    from elastic_runner.data.ledger import read_records
    from elastic_runner.data.lineage import course
    from elastic_runner.storage import open_storage
    from elastic_runner.tracking.values import rows

    wanted = tyro.cli(MetricsArguments, prog="elastic-runner metrics", args=arguments)
    storage = open_storage(wanted.run_dir, wanted.options)
    row = None
    for row in rows(course(lambda: read_records(storage))):
        print(json.dumps(row))
    if row is None:
        raise NotFound(f"{storage.url} has no step on record")
    return ExitCode.FINISHED
