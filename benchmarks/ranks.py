"""The processes of a benchmark: one per rank, of a module that leaves what it has measured in a file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from elastic_runner.chaos.driver import end_tree, launch_command

_TAIL = 8000
"""Characters of the log that are shown of ranks that failed."""


def measured_by(module: str, order: Path, result: Path, *, ranks: int, name: str) -> dict[str, Any]:
    """What ``ranks`` processes of ``module``, given the file ``order``, have left in ``result``; none is left behind.

    Their log goes beside it. Raises SystemExit, with its end and ``name``, where they fail.
    """
    log = result.with_name("log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch_command(ranks, "--max-restarts=0", "-m", module, str(order)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            end_tree(process)
    if code or not result.exists():
        raise SystemExit(f"{name}: exit code {code}\n{log.read_text(errors='replace')[-_TAIL:]}")
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured
