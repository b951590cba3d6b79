"""MLflow: server, experiment and credentials by MLflow's own environment variables (``MLFLOW_TRACKING_URI``, …)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlflow

from elastic_runner.observability.summary import Status
from elastic_runner.tracking.protocol import Opener, TrackedRun

_STATUS = {"running": "RUNNING", "finished": "FINISHED", "interrupted": "SCHEDULED", "failed": "FAILED"}
_LONGEST = 500
"""Characters of a parameter's value that every server takes."""


class MLflow:
    """See Tracker. What it has already, it may be told again: the ledger keeps the times of values, and a server takes
    the same value of the same time once."""

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        if run.project is not None:
            mlflow.set_experiment(run.project)
        if run_id is None:
            opened = mlflow.start_run(run_name=run.name, tags={"elastic_runner.run": run.id})
            mlflow.log_params({name: str(value)[:_LONGEST] for name, value in _flat(run.settings)})
        else:
            opened = mlflow.start_run(run_id=run_id)
        self.run_id = opened.info.run_id
        self.holds = step

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See Tracker."""
        mlflow.log_metrics(dict(values), step=step, timestamp=round(at * 1000), run_id=self.run_id, synchronous=True)

    def flush(self) -> None:
        """Each line was waited for."""

    def close(self, status: Status) -> None:
        """See Tracker."""
        mlflow.end_run(_STATUS[status])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


OPENER = Opener(open=MLflow)
