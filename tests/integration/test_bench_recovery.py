"""scripts/bench recovery runs and reports what it promises; its figures are of no interest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("ended", "rendezvous", "start", "load", "first_step")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "recovery", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_recovery(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = bench(
        "--trials", "1", "--only", "worker_kill", "freeze", "--contenders", "floor", "--dir", str(tmp_path),
        "--json", str(file),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(file.read_text())
    assert all(isinstance(value, (int, float, str)) for value in figures.values())
    for name in ("worker_kill", "worker_kill_floor", "freeze"):
        whole, parts = figures[f"{name}_s"], [figures[f"{name}_{part}_s"] for part in PARTS]
        assert whole > 0 and min(parts) >= 0
        assert sum(parts) == pytest.approx(whole, abs=0.005), "each is rounded to a millisecond"
        assert figures[f"{name}_p95_s"] == whole, "of one trial"
        assert (figures[f"{name}_trials"], figures[f"{name}_not_recovered"]) == (1, 0)
    assert figures["worker_kill_floor_ended_s"] == 0, "nothing was there to end"
    assert figures["freeze_notice_s"] > 0 and figures["freeze_ended_s"] > 0
    assert figures["steps_lost_max"] == max(figures["worker_kill_steps_lost_max"], figures["freeze_steps_lost_max"])
    assert "seed 0" in result.stdout and "worker_kill: seconds from the fault" in result.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]


def test_unknown_names_are_refused() -> None:
    result = bench("--only", "worker_kil")
    assert result.returncode == 1
    assert "no case worker_kil; there are worker_kill, worker_kill_two" in result.stderr
