"""MLflow: server, experiment and credentials by MLflow's own environment variables (``MLFLOW_TRACKING_URI``, …)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import mlflow

from elastic_runner.observability.summary import Status
from elastic_runner.tracking.protocol import Opener, TrackedRun

_STATUS: Final = {"running": "RUNNING", "finished": "FINISHED", "interrupted": "SCHEDULED", "failed": "FAILED"}
_LONGEST: Final = 500
"""Characters of a parameter's value that every server takes."""
_REFUSED: Final = re.compile(r"[^\w\-. :/]")
"""What it does not take in names."""
_TAG, _STEP = "elastic_runner.run", "run/step"


class MLflow:
    """See Tracker. A server takes a value that it has, of the same time, as no news, and the ledger keeps the times."""

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        if run.project is not None:
            mlflow.set_experiment(run.project)
        try:
            opened = mlflow.start_run(run_id=run_id or _found(run), run_name=run.name, tags={_TAG: run.id})
            settings = {name: str(value)[:_LONGEST] for name, value in _flat(run.settings)}
            mlflow.log_params({name: settings[name] for name in settings.keys() - opened.data.params.keys()})
        except BaseException:
            mlflow.end_run()  # else it stays this thread's, and no other can be started
            raise
        self.run_id = opened.info.run_id
        self._told = int(opened.data.metrics.get(_STEP, -1))
        # Of the newest step it may lack the evaluation.
        self.holds = max(step, self._told - 1)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See Tracker."""
        if "run/attempt" in values:  # the step itself
            if step <= self._told:
                return
            values = {**values, _STEP: step}
        metrics = {_REFUSED.sub("_", name): value for name, value in values.items()}
        mlflow.log_metrics(metrics, step=step, timestamp=round(at * 1000), run_id=self.run_id, synchronous=True)

    def flush(self) -> None:
        """Each line was waited for."""

    def close(self, status: Status) -> None:
        """See Tracker."""
        mlflow.end_run(_STATUS[status])


def _found(run: TrackedRun) -> str | None:
    """The run that an attempt has begun which was killed before it could write down the name."""
    found = mlflow.search_runs(
        filter_string=f"tags.`{_TAG}` = '{run.id}'", max_results=1, output_format="list", search_all_experiments=True
    )
    return found[0].info.run_id if found else None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


OPENER = Opener(open=MLflow)
