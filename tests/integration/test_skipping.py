"""A sample that always fails: its global batch is skipped when that is asked for, and the record says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.chaos.driver import ObservedRun, launch_command
from elastic_runner.cli.main import main
from elastic_runner.data.ledger import Record, read_records
from elastic_runner.data.lineage import effective
from elastic_runner.history import read_ends
from elastic_runner.storage import LocalStorage
from tests.support.ranks import RankFailed, run_ranks
from tests.support.skipping_job import BAD, train


def records(run_dir: Path) -> list[Record]:
    return effective(read_records(LocalStorage(run_dir)))[0]


def steps(run_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "epoch", "first", "last", "digest", "rng", "loss", "grad_norm")
    return [tuple(r[name] for name in names) for r in records(run_dir) if r["event"] == "step"]


def in_changing_worlds(run_dir: Path) -> None:
    """Fails with 3 ranks and with 1; with 3 it skips and is killed; with 2 it skips the same again."""
    for world, killed, words in ((3, None, "cannot be read"), (1, None, "cannot be read"), (3, (2, 4), "exit code -9")):
        with pytest.raises(RankFailed, match=words):
            run_ranks(train, world, str(run_dir), 0, killed)
    run_ranks(train, 2, str(run_dir))


def test_its_batch_is_skipped_with_the_same_result_at_any_world_size_and_through_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run from memory, whose loader processes meet the sample ahead; one that goes back behind the skip."""
    launched, changing = tmp_path / "launched", tmp_path / "changing"
    with ObservedRun(launched, launch_command(2, "-m", "tests.support.skipping_job")) as started:
        assert started.process.wait(120) == 0, started.log.read_text()
    assert "restored step 3 from memory" in started.log.read_text()
    in_changing_worlds(changing)

    assert steps(launched) == steps(changing)
    assert [place for _, epoch, *place, _, _, _, _ in steps(launched) if epoch == 0] == [
        [0, 8],
        [8, 16],
        [16, 24],
        [32, 40],
    ]
    assert main(["checkpoint", "diff", str(launched), str(changing)]) == 0
    assert not list(tmp_path.rglob("suspect-*")), "no checkpoint is to blame"
    for run_dir in (launched, changing):
        [skip] = [r for r in records(run_dir) if r["event"] == "skip"]
        assert (skip["epoch"], skip["first"], skip["last"], skip["step"], skip["attempt"]) == (0, 24, 32, 4, 3)
        told = json.loads((run_dir / "summary.json").read_text())
        assert (told["status"], told["samples_skipped"]) == ("finished", 8)
    assert [(end.kind, end.step) for end in read_ends(LocalStorage(changing))] == [("ValueError", 4)] * 2

    capsys.readouterr()
    assert main(["status", str(changing)]) == 0
    assert "skipped 8," in capsys.readouterr().out
    assert main(["audit", str(changing)]) == 0
    said = capsys.readouterr().out
    assert "8 samples skipped in epoch 0: positions 24 to 31" in said and f"sample {BAD} cannot be read" in said
