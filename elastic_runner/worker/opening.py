"""What a worker opens once its attempt has a number: the run's record with its trackers, and the snapshots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from elastic_runner.checkpoint.snapshot_plan import Memory, run_identity
from elastic_runner.checkpoint.snapshots import Snapshots
from elastic_runner.config import RunConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.environment import Environment
from elastic_runner.storage import Storage
from elastic_runner.tracking.opening import opener
from elastic_runner.tracking.protocol import TrackedRun
from elastic_runner.tracking.trackers import Trackers
from elastic_runner.train.record import MainRecord, RunRecord
from elastic_runner.worker.attempt import Begun


def open_record(storage: Storage, config: RunConfig, begun: Begun, *, is_main: bool) -> RunRecord:
    """Of this rank."""
    if not is_main:
        return RunRecord(storage, attempt=begun.number)
    return MainRecord(
        storage,
        attempt=begun.number,
        target_step=config.training.max_steps,
        restarts=begun.before,
        trackers=_trackers(storage, config, begun),
    )


def open_snapshots(
    env: Environment, config: RunConfig, record: RunRecord, coordinator: Coordinator, *, node: str, attempt: int
) -> Snapshots:
    """Of this rank. Collective."""
    memory = Memory(files=env.snapshots, local_rank=env.local_rank, node=node)
    run = run_identity(config.run_dir, config.checkpoint.url, config.seed)
    return Snapshots(config.snapshot, memory, record.lines, coordinator, run=run, attempt=attempt)


def _trackers(storage: Storage, config: RunConfig, begun: Begun) -> Trackers:
    tracking = config.tracking
    run = TrackedRun(
        id=begun.run_id,
        name=tracking.name or config.run_dir.rstrip("/").rpartition("/")[2],
        project=tracking.project,
        attempt=begun.number,
        settings=_without_options(asdict(config)),
        storage=storage,
    )
    limit = min(config.timeouts.tracking, config.timeouts.teardown / 2)
    # Imported here and not on their threads: a loader process forked meanwhile would wait for ever for their import.
    return Trackers({name: opener(name) for name in tracking.trackers}, run, limit=limit)


def _without_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of storages may be secret."""
    return {
        name: _without_options(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in ("options", "storage_options")
    }
