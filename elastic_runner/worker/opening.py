"""What a worker opens once its attempt has a number: the run's record with its trackers, and the snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from elastic_runner.checkpoint.snapshot_plan import Memory, run_identity
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import RunConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.environment import Environment
from elastic_runner.observability.summary import RunSummary
from elastic_runner.storage import SECRET, Storage
from elastic_runner.tracking import told
from elastic_runner.tracking.opening import opener
from elastic_runner.tracking.protocol import TrackedRun
from elastic_runner.tracking.trackers import Trackers
from elastic_runner.train.record import MainRecord, RunRecord, history
from elastic_runner.worker.attempt import Begun, run_id


def open_record(storage: Storage, config: RunConfig, begun: Begun, *, is_main: bool) -> RunRecord:
    """Of this rank."""
    if not is_main:
        return RunRecord(storage, attempt=begun.number)
    return MainRecord(
        storage,
        attempt=begun.number,
        target_step=config.training.max_steps,
        restarts=begun.before,
        trackers=_trackers(storage, config, config.tracking.trackers, run_id=begun.run_id, attempt=begun.number),
    )


def open_snapshots(
    env: Environment, config: RunConfig, record: RunRecord, coordinator: Coordinator, *, node: str, attempt: int
) -> Snapshots:
    """Of this rank. Collective."""
    memory = Memory(files=env.snapshots, local_rank=env.local_rank, node=node)
    run = run_identity(config.run_dir, config.checkpoint.url, config.seed)
    return Snapshots(config.snapshot, memory, record.lines, coordinator, run=run, attempt=attempt)


def tell_finished(storage: Storage, config: RunConfig, summary: RunSummary) -> None:
    """Tell trackers what they lack of a finished run: they were away at its end, or are new to it."""
    lacking = [name for name in config.tracking.trackers if told.read(storage, name).step < summary.step]
    if lacking:
        trackers = _trackers(storage, config, lacking, run_id=run_id(storage), attempt=summary.attempt)
        trackers.begin(history(storage))
        trackers.end("finished")


def _trackers(storage: Storage, config: RunConfig, names: Iterable[str], *, run_id: str, attempt: int) -> Trackers:
    run = TrackedRun(
        id=run_id,
        name=config.tracking.name or config.run_dir.rstrip("/").rpartition("/")[2],
        project=config.tracking.project,
        attempt=attempt,
        settings=_without_secrets(asdict(config)) | {"run_dir": storage.url},
        storage=storage,
    )
    limit = min(config.timeouts.tracking, config.timeouts.teardown / 2)
    # Imported here, not on their threads: a loader process forked meanwhile could wait for ever for such an import.
    return Trackers({name: opener(name) for name in names}, run, limit=limit)


def _without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Without options of storages, URLs, and what is called a secret in sections of a recipe's own."""
    return {
        name: _without_secrets(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in ("options", "storage_options", "url") and not SECRET.search(name)
    }
