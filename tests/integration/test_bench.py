"""scripts/bench runs and reports what it promises; its figures are of no interest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seaweed import weed

ROOT = Path(__file__).parents[2]
NAMES = {
    "async_stall_over_memcpy",
    "dcp_async_stall_over_memcpy",
    "save_over_raw",
    "dcp_save_over_raw",
    "load_over_raw",
    "async_peak_memory_over_state",
    "async_stall_ms",
    "save_mb_per_s",
    "cores",
    "torch",
    "trials",
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_checkpoint(tmp_path: Path) -> None:
    result = bench("checkpoint", "--quick", "--json", str(tmp_path / "figures.json"), "--dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) >= (NAMES | {"s3_over_plain_upload"} if weed() else NAMES)
    assert all(isinstance(value, (int, float, str)) for value in figures.values())
    assert all(name.replace("_", " ") in result.stdout for name in NAMES if name.endswith(("memcpy", "raw")))
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.slow
def test_exact(tmp_path: Path) -> None:
    result = bench("exact", "--quick", "--json", str(tmp_path / "figures.json"))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = {"overhead_ddp", "overhead_fsdp", "bytes_over_ring_aligned", "bytes_over_ring_unaligned"}
    assert set(figures) >= names
    # What is moved is counted, not measured: a ring's on 2 ranks, more on 3. Others may use the device as well.
    assert figures["bytes_over_ring_aligned"] >= 1 and figures["bytes_over_ring_unaligned"] >= 4 / 3


def test_unknown_benchmark() -> None:
    result = bench("nothing")
    assert (result.returncode, "'nothing'" in result.stderr) == (2, True)
