"""Trackers of a real job: one client in the job, one run over all attempts, one unit (case c66)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_runner.cli.main import main
from elastic_runner.data.ledger import read_records
from elastic_runner.storage import open_storage
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tracked import read_calls, train

ROOT = Path(__file__).parents[2]


def test_one_client_one_run_and_one_unit_over_a_crash_and_a_resize(tmp_path: Path) -> None:
    """Cases c66, c67: 2 ranks that are killed at 17, and 3 that go on from 15."""
    run = str(tmp_path / "run")
    with pytest.raises(RankFailed):
        run_ranks(train, 2, run, 17)
    ids = set(run_ranks(train, 3, run))
    calls = read_calls(tmp_path)
    assert len(ids) == 1
    assert {call["rank"] for call in calls} == {"0"}
    opened = [call for call in calls if call["did"] == "open"]
    assert [call["run"] for call in opened] == [f"calls-{ids.pop()}"] * 2
    assert all(call["name"] == "my run" and call["settings"]["data"]["shards"] == 4 for call in opened)
    assert "a secret" not in str(calls)
    logged = [call for call in calls if call["did"] == "log"]
    assert [call["step"] for call in logged if "train/loss" in call["values"]] == list(range(1, 21))
    assert [call["step"] for call in logged if "validation/mean" in call["values"]] == [10, 20]
    assert [call["step"] for call in logged] == sorted(call["step"] for call in logged)
    assert calls[-1]["did"] == "close" and calls[-1]["status"] == "finished"


def test_what_a_script_logs_is_the_same_at_every_world_size(tmp_path: Path) -> None:
    curves = []
    for world in (1, 3):
        where = tmp_path / str(world)
        where.mkdir()
        run_ranks(train, world, str(where / "run"))
        lines = [r for r in read_records(open_storage(str(where / "run"))) if r.get("event") == "step"]
        curves.append([line["metrics"] for line in lines])
        told = [call["values"] for call in read_calls(where) if "train/mean" in call.get("values", {})]
        assert [values["train/mean"] for values in told] == [metrics["mean"] for metrics in curves[-1]]
    assert len(curves[0]) == 20 and curves[0] == curves[1]


def test_what_a_tracker_lacks_of_a_finished_run_it_is_told_at_the_next_start(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(train, 1, run, None, ())
    assert read_calls(tmp_path) == []
    for _ in range(2):
        with pytest.raises(RankFailed, match="AlreadyFinished: 0"):
            run_ranks(train, 1, run)
    calls = read_calls(tmp_path)
    assert [call["step"] for call in calls if "train/loss" in call.get("values", {})] == list(range(1, 21))
    assert [call["status"] for call in calls if call["did"] == "close"] == ["finished"], "once"


def test_a_tracker_that_cannot_be_had_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(train, 2, str(tmp_path / "run"), None, ("tensorbord",))
    words = "'tensorbord': No module named 'tensorbord'"
    assert all(words in text for text in failed.value.errors.values())
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_worker_killed_under_launch_leaves_no_trace_in_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's own reader, and ``elastic-runner metrics``, give each step once."""
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(f"from tests.support.tracked import train\ntrain({str(run)!r}, 7, ('tensorboard',))\n")
    command = [sys.executable, "-m", "elastic_runner", "launch", "--nproc-per-node=2", str(script)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("train/loss", "train/mean"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 21))
    attempts = [event.value for event in events.Scalars("run/attempt")]
    assert attempts == [1] * 6 + [2] * 14, "killed before step 7 was in memory"
    assert main(["metrics", str(run)]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["run/attempt"] for row in rows] == attempts
    assert [row["step"] for row in rows if "validation/mean" in row] == [10, 20]
