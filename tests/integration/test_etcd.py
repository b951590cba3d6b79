"""Nodes that meet by torchrun's etcd-v2, in a real etcd."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from elastic_runner import paths
from tests.support.agents import LAUNCH, TORCHRUN, Job
from tests.support.etcd import needs_etcd, running_etcd

pytestmark = [needs_etcd, pytest.mark.slow]


@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "launch"])
def test_two_nodes_meet_by_etcd_and_a_worker_is_killed(launcher: tuple[str, ...], tmp_path: Path) -> None:
    with (
        running_etcd(tmp_path) as endpoint,
        Job(tmp_path, "2", launcher, backend="etcd-v2", endpoint=endpoint) as job,
    ):
        job.start(2)
        attempt = job.wait_for_world(2)
        record = json.loads((job.run_dir / paths.attempt_record(attempt)).read_text())
        os.kill(record["workers"][1]["pid"], signal.SIGKILL)
        job.wait_for_world(2, after=attempt)
        job.finish()
        if launcher is LAUNCH:
            assert "rendezvous etcd-v2: whatever hosts its store must not be lost" in job.logs()
