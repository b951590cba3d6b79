"""The README's script is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_runner.chaos.driver import launch_command
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def script(tmp_path: Path) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(block)
    return str(path)


@pytest.mark.parametrize("workers", [None, 2], ids=["python", "launch"])
def test_the_script_trains_to_its_end(script: str, workers: int | None, tmp_path: Path) -> None:
    flags = ("--run-dir", str(tmp_path / "run"), "--training.max-steps", "30")
    start = [sys.executable, script] if workers is None else launch_command(workers, script)
    result = subprocess.run([*start, *flags], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    summary = read_summary(LocalStorage(tmp_path / "run"))
    assert summary is not None and (summary.status, summary.step) == ("finished", 30)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--standalone", "--master-addr", "--rdzv-backend=c10d", "--rdzv-backend=elastic"])
def test_the_lines_of_torchrun_train(way: str, script: str, tmp_path: Path) -> None:
    """With one node of one worker."""
    lines = re.findall(r"^\$ (torchrun .*) SCRIPT …$", README, flags=re.MULTILINE)
    (line,) = [line for line in lines if way in line]
    here = [("nnodes", "1"), ("nproc-per-node", "1"), ("node-rank", "0"), ("master-addr", "127.0.0.1")]
    here += [("master-port", str(free_port()))]
    here += [("rdzv-endpoint", f"127.0.0.1:{free_port()}" if "c10d" in way else str(tmp_path / "rendezvous"))]
    for flag, value in here:
        line = re.sub(rf"--{flag}=\S+", f"--{flag}={value}", line)
    command = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:], script]
    command += ["--run-dir", str(tmp_path / "run"), "--training.max-steps", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    summary = read_summary(LocalStorage(tmp_path / "run"))
    assert summary is not None and (summary.status, summary.step) == ("finished", 3)


def test_the_script_is_as_short_as_promised() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 25


def test_every_folder_of_the_package_is_in_the_tree() -> None:
    for folder in (ROOT / "elastic_runner").iterdir():
        if (folder / "__init__.py").exists():
            assert f"\n  {folder.name}/" in README


def test_every_dependency_has_its_reason() -> None:
    dependencies = re.search(r"\ndependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), flags=re.DOTALL)
    assert dependencies is not None
    table = README.partition("## What it depends on")[2]
    for name in re.findall(r'"([a-z0-9_-]+)[>=;]', dependencies.group(1)):
        assert re.search(rf"^\| .*\b{name}\b", table, flags=re.MULTILINE), name
