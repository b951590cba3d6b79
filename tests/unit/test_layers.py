"""Imports go one way: .importlinter says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_layers_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def test_importing_the_package_is_enough_for_no_optional_dependency() -> None:
    code = (
        "import sys\n"
        "import elastic_runner.cli.audit, elastic_runner.cli.checkpoint, elastic_runner.cli.status\n"
        "from elastic_runner import *\n"
        "loaded = {'sklearn', 's3fs', 'boto3', 'botocore'} & set(sys.modules)\n"
        "print(loaded)\n"
        "sys.exit(len(loaded))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
