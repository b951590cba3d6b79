"""Saving and restoring with several ranks: any world, any strategy, one outcome for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_runner.checkpoint.checkpointer import checkpoint_storage
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.config import CheckpointConfig
from tests.support import checkpoint_jobs as jobs
from tests.support.ranks import run_ranks
from tests.support.s3 import S3

FORMATS = pytest.mark.parametrize("format", ["sharded", "full"])


def pass_on(run_dir: str, options: dict[str, str], format: str, worlds: list[tuple[str, int]]) -> None:
    """Each world takes over from the one before: every rank finds, to the last bit, what that one saved."""
    saved: jobs.Dump | None = None
    for number, (strategy, size) in enumerate(worlds):
        results = run_ranks(jobs.continue_and_save, size, run_dir, options, strategy, format)
        for step, found, _, kinds in results:
            assert step == number
            assert ("DTensor" in kinds) == (strategy == "fsdp")
            if saved is not None:
                assert found == saved, f"{worlds[number - 1]} to {worlds[number]}"
        assert all(result[2] == results[0][2] for result in results)
        saved = results[0][2]
        assert "optimizer.state.two_rows.weight.exp_avg" in saved
    storage = checkpoint_storage(CheckpointConfig(), run_url=run_dir, run_options=options, seconds=30)
    manifests = list_checkpoints(storage).manifests
    assert [manifest.world_size for manifest in reversed(manifests)] == [size for _, size in worlds]


@FORMATS
def test_any_world_and_strategy_takes_over(format: str, tmp_path: Path) -> None:
    """Case c46."""
    # Two rows on three ranks: one rank has none of them.
    worlds = [("fsdp", 2), ("single", 1), ("fsdp", 3), ("ddp", 2), ("fsdp", 2), ("ddp", 1), ("ddp", 2)]
    pass_on(str(tmp_path), {}, format, worlds)


@pytest.mark.s3
@FORMATS
def test_on_an_object_store_too(format: str, s3: S3) -> None:
    pass_on(s3.url, s3.options, format, [("fsdp", 2), ("single", 1)])


@pytest.mark.parametrize(("format", "failing"), [("sharded", 0), ("sharded", 1), ("full", 0)])
def test_one_rank_that_cannot_write_is_everybodys_failure(format: str, failing: int, tmp_path: Path) -> None:
    results = run_ranks(jobs.fail_on_one_rank, 2, str(tmp_path), format, failing, False)
    assert results[0]["failure"] == ("SaveFailed", "step 2 was not saved: the network is gone")
    assert results[1]["failure"] == results[0]["failure"]
    for result in results:
        assert result["manifests"] == ["step-0000000001/manifest-000001.json"]
        assert (result["restored"], result["same"], result["again"]) == (1, True, None)


@pytest.mark.parametrize(("format", "failing"), [("sharded", 1), ("full", 0)])
def test_a_full_disk_on_one_rank_keeps_its_kind(format: str, failing: int, tmp_path: Path) -> None:
    results = run_ranks(jobs.fail_on_one_rank, 2, str(tmp_path), format, failing, True)
    assert [result["failure"] for result in results] == [("StorageFull", "no space left")] * 2


@FORMATS
def test_only_global_rank_0_commits_and_deletes(format: str, tmp_path: Path) -> None:
    """Case c32."""
    calls = run_ranks(jobs.record_storage_calls, 2, str(tmp_path), format)
    committing = [[call for call in each if not call.startswith("writer")] for each in calls]
    assert committing[0] == [
        "create step-0000000001/manifest-000001.json",
        "create step-0000000002/manifest-000001.json",
        "delete step-0000000001/manifest-000001.json",
        "delete step-0000000001/data-000001",
        "delete step-0000000001",
    ]
    assert committing[1] == []
    written = [call.removeprefix("writer ") for each in calls for call in each if call.startswith("writer")]
    assert len(written) == len(set(written))
    if format == "full":
        assert calls[1] == []


@FORMATS
def test_an_older_attempt_cannot_commit(format: str, tmp_path: Path) -> None:
    for failure, files in run_ranks(jobs.fenced_by_a_newer_attempt, 2, str(tmp_path), format):
        assert failure is not None
        assert failure == ("Fenced", "attempt 2 has taken over this run; attempt 1 must not commit")
        assert files == ["data-000001"]


def test_ranks_at_different_steps_do_not_save(tmp_path: Path) -> None:
    for failure, files in run_ranks(jobs.disagree_on_the_step, 2, str(tmp_path)):
        assert failure is not None
        assert failure[0] == "LoopError"
        assert "step 1" in failure[1]
        assert "step 2" in failure[1]
        assert files == []


@FORMATS
def test_tensors_do_not_travel_and_only_rank_0_holds_a_copy(format: str, tmp_path: Path) -> None:
    """Case c62."""
    results = run_ranks(jobs.measure_what_travels, 2, str(tmp_path), format)
    whole = 3 * 2 * (512 * 512 + 512) * 4  # parameters and two moments
    if format == "full":
        assert whole <= results[0]["kept"] < 1.01 * whole
        assert results[1]["kept"] == 0
    else:
        for result in results:
            assert 0.5 * whole <= result["kept"] < 0.53 * whole
    for result in results:
        assert result["exchanged"] < 20_000
