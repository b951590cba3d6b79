"""Ranks that hang in ways that Python cannot notice: the watchdog names the right one, the evidence holds its stack."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_runner.launch.evidence import GATHER, gather, upload
from elastic_runner.launch.watchdog import Hang
from elastic_runner.verdict import RunPlace
from tests.support import watched
from tests.support.watched import AT_STEP, HANGING, LIMIT, WatchedRanks


def bundle_of(ranks: WatchedRanks, hang: Hang) -> tuple[Path, str]:
    begun = time.monotonic()
    bundle = gather(ranks.directory, ranks.pids, hang, heartbeats=ranks.watchdog.describe())
    assert time.monotonic() - begun < GATHER + 5
    return bundle, (bundle / "summary.txt").read_text()


def worker_file(bundle: Path, rank: int) -> str:
    (file,) = bundle.glob(f"local-rank-{rank}-worker-*.txt")
    return file.read_text()


def test_a_stopped_worker_is_named_within_two_seconds(tmp_path: Path) -> None:
    with WatchedRanks(tmp_path) as ranks:
        ranks.until_step(AT_STEP)
        os.kill(ranks.pids[HANGING], signal.SIGSTOP)
        begun = time.monotonic()
        hang = ranks.hang()
        noticed = time.monotonic() - begun
        assert (hang.rank, hang.local_rank, hang.pid) == (HANGING, HANGING, ranks.pids[HANGING])
        assert "rank 1 is stopped by a signal" in hang.reason and "rank 0 has" in hang.reason
        assert noticed < 2.5, "2 s, and what a busy machine adds"
        bundle, summary = bundle_of(ranks, hang)
        assert hang.reason in summary
        stacks = worker_file(bundle, HANGING)
        assert "State: T (stopped)" in stacks
        assert "in train" in stacks, "it was let run for its stack"
        assert "in train" in worker_file(bundle, 0)


@pytest.mark.parametrize("strike", [watched.stuck_in_sleep, watched.stuck_with_the_gil])
def test_a_worker_stuck_in_its_own_code_is_named(tmp_path: Path, strike: Callable[[], None]) -> None:
    with WatchedRanks(tmp_path, strike) as ranks:
        hang = ranks.hang()
        assert (hang.rank, hang.phase, hang.step, hang.attempt) == (HANGING, "step", AT_STEP - 1, 1)
        assert hang.seconds >= LIMIT - 1
        assert "rank 0 has waited for" in hang.reason
        bundle, summary = bundle_of(ranks, hang)
        assert f"in {strike.__name__}" in worker_file(bundle, HANGING)
        assert f"local rank 1 waits for nobody: S; {strike.__name__} (watched.py:" in summary
        assert "local rank 0 waits for nobody" not in summary
        where = upload(bundle, RunPlace(url=str(tmp_path / "run"), options={}, attempt=1))
        assert where.startswith(f"{tmp_path}/run/evidence/000001/")
        assert Path(where, "summary.txt").read_text() == summary
        assert {file.name for file in Path(where).iterdir()} == {file.name for file in bundle.iterdir()}


def test_a_stuck_loader_process_is_named(tmp_path: Path) -> None:
    with WatchedRanks(tmp_path, loader_hangs=True) as ranks:
        hang = ranks.hang()
        assert hang.rank == HANGING
        bundle, summary = bundle_of(ranks, hang)
        (child,) = bundle.glob("local-rank-1-child-*.txt")
        assert "in stuck_in_a_loader" in child.read_text()
        assert "waits for its loader process" in summary and "stuck_in_a_loader (watched.py:" in summary
        (other,) = bundle.glob("local-rank-0-child-*.txt")
        assert "stuck_in_a_loader" not in other.read_text()


def test_a_job_that_trains_is_left_alone(tmp_path: Path) -> None:
    with WatchedRanks(tmp_path) as ranks:
        ranks.until_step(AT_STEP)
        end = time.monotonic() + LIMIT + 1
        while (now := time.monotonic()) < end:
            assert ranks.watchdog.look(now) is None
            time.sleep(ranks.watchdog.wait_s(time.monotonic()))
        assert min(ranks.watchdog.steps().values()) > AT_STEP
