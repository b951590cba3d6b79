"""scripts/bench control-plane runs and reports what it promises; its figures are of no interest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_control_plane(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "control-plane", "--trials", "1", "--sizes", "5", "20"]
    result = subprocess.run([*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert {"form_s_5", "lose_s_20", "drop_s_20", "messages_per_node_20", "form_slope", "trials"} <= set(figures)
    assert all(isinstance(value, (int, float, str)) for value in figures.values())
    assert "form_slope" in result.stdout
