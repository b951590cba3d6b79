"""Weights & Biases: server, entity and key by its own environment variables and its ``wandb login``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import wandb

from elastic_runner.observability.summary import Status
from elastic_runner.tracking.protocol import Opener, TrackedRun


class Wandb:
    """See Tracker. Steps are its own ``step``, which only grows: it ignores what it is told of older ones."""

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        hook, leave = sys.excepthook, sys.exit
        self._run = wandb.init(
            id=run_id or run.id, resume="allow", name=run.name, project=run.project, config=dict(run.settings),
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        if getattr(sys.excepthook, "__module__", "").startswith("wandb."):  # it would print each traceback once more
            sys.excepthook, sys.exit = hook, leave
        self.run_id = self._run.id
        # A process that is killed takes along what it has not sent: the server's word counts, where there is one.
        self.holds = self._run.starting_step - 1 if self._run.resumed else step

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See Tracker."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """It sends by itself, and cannot be waited for."""

    def close(self, status: Status) -> None:
        """See Tracker."""
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _end_service() -> None:
    """Its hook at exit waits for its process without a limit. Private, read in wandb 0.31 (wandb_setup.py, sdk/lib/
    service/service_connection.py, service_process.py); tests/contract/test_trackers.py fails when it changes."""
    connection = wandb.setup()._connection
    if connection is not None and connection._proc is not None:
        connection._proc._process.kill()


OPENER = Opener(open=Wandb, abandon=_end_service)
