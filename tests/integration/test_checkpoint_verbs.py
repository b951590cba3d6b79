"""ls, pin, unpin and prune as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.checkpoint.marks import mark_suspect
from elastic_runner.cli.main import HELP, main
from elastic_runner.errors import ExitCode
from elastic_runner.storage import LocalStorage, Storage, open_storage
from tests.support.committed import commit, write_data
from tests.support.s3 import S3


def fill(storage: Storage) -> None:
    """Steps 10 to 50; 40 is suspect, 50 not finite."""
    for step in (10, 20, 30):
        commit(storage, step, metrics={"accuracy": 1 / step})
    mark_suspect(storage, commit(storage, 40), "led 2 times to ValueError in step 43", 3)
    commit(storage, 50, 3, non_finite=("model.w",))


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    fill(LocalStorage(tmp_path / "checkpoints"))
    return str(tmp_path)


def steps(run_dir: str) -> list[int]:
    return [m.step for m in list_checkpoints(LocalStorage(f"{run_dir}/checkpoints")).manifests]


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = ExitCode.FINISHED) -> Any:
    assert main(["checkpoint", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["checkpoint", *arguments]) == ExitCode.FINISHED
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_ls_says_what_is_worth_knowing_of_each(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "pin", run_dir, "10"])
    LocalStorage(f"{run_dir}/checkpoints").delete("step-0000000020/data-000001/full.pt")
    LocalStorage(f"{run_dir}/checkpoints").put("step-0000000030/manifest-000009.json", b"{")
    capsys.readouterr()
    lines = printed(capsys, "ls", run_dir)
    assert lines[0] == "step attempt age size format world verified pinned metrics remarks"
    assert [line.split(" s 1 kB ")[-1] for line in lines[1:]] == [
        "full 1 sizes NaN or infinity in model.w",
        "full 1 sizes suspect: led 2 times to ValueError in step 43",
        "full 1 sizes accuracy 0.03333",
        "full 1 accuracy 0.05 step-0000000020/data-000001/full.pt is missing",
        "full 1 sizes yes accuracy 0.1",
        "step-0000000030/manifest-000009.json is torn: not a complete manifest, so it was never committed",
    ]
    rows = told(capsys, "ls", run_dir)
    assert [(row["step"], row["pinned"], bool(row["suspect"]), bool(row["unusable"])) for row in rows] == [
        (50, False, True, False), (40, False, True, False), (30, False, False, False), (20, False, False, True),
        (10, True, False, False), (None, False, False, True),
    ]  # fmt: skip
    assert rows[4]["metrics"] == {"accuracy": 0.1}


def test_ls_leaves_out_columns_in_which_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(LocalStorage(tmp_path), 1)
    assert printed(capsys, "ls", str(tmp_path))[0] == "step attempt age size format world verified"


def test_pin_and_unpin(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "pin", run_dir, "10") == ["step 10 of attempt 1: pinned"]
    assert printed(capsys, "pin", run_dir, "10") == ["step 10 of attempt 1: already pinned"]
    assert [row["step"] for row in told(capsys, "ls", run_dir) if row["pinned"]] == [10]
    assert told(capsys, "unpin", run_dir, "10") == {"step": 10, "attempt": 1, "pinned": False, "changed": True}
    assert printed(capsys, "unpin", run_dir, "10") == ["step 10 of attempt 1: not pinned"]


def test_pin_takes_the_newest_attempt_s_unless_told(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    commit(LocalStorage(f"{run_dir}/checkpoints"), 10, 2)
    assert told(capsys, "pin", run_dir, "10")["attempt"] == 2
    assert told(capsys, "pin", run_dir, "10", "--attempt", "1")["attempt"] == 1


def test_pin_of_what_is_not_there_says_what_is(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "pin", run_dir, "11"]) == ExitCode.FAILED
    assert "no checkpoint of step 11" in (error := capsys.readouterr().err) and "30 (attempt 1), 20" in error


def test_prune_says_what_would_go_and_why_the_rest_stays(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(f"{run_dir}/checkpoints")
    write_data(storage, 25, 2)
    write_data(storage, 60, 3)
    arguments = ("prune", run_dir, "--keep", "1", "--keep-best", "1", "--best-metric", "accuracy", "--best-mode", "max")
    lines = printed(capsys, *arguments, "--dry-run")
    assert lines == [
        "step attempt size fate because",
        "50 3 1 kB stays newer than step 30, from which the run goes on",
        "40 1 1 kB stays newer than step 30, from which the run goes on",
        "30 1 1 kB stays the newest",
        "20 1 1 kB would go no policy keeps it",
        "10 1 1 kB stays number 1 by accuracy (0.1)",
        "step-0000000025/data-000002, left by a save that was never committed: would go",
        "1 of 5 checkpoints (1 kB) would go. Without --dry-run it is done.",
    ]
    assert steps(run_dir) == [50, 40, 30, 20, 10]
    lines = printed(capsys, *arguments)
    assert lines[4] == "20 1 1 kB deleted no policy keeps it" and lines[-1] == "1 of 5 checkpoints (1 kB) deleted"
    assert steps(run_dir) == [50, 40, 30, 10]
    assert "step-0000000060" in storage.list("") and "step-0000000025" not in storage.list("")


def test_prune_does_not_take_a_short_one_for_a_good_one(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    LocalStorage(f"{run_dir}/checkpoints").put("step-0000000030/data-000001/full.pt", b"short")
    report = told(capsys, "prune", run_dir, "--keep", "1")
    assert [row["step"] for row in report["checkpoints"] if row["goes"]] == [10]
    assert steps(run_dir) == [50, 40, 30, 20]


@pytest.mark.parametrize("wrong", [[], ["--keep", "0"], ["--keep", "1", "--keep-hours", "0"]])
def test_prune_wants_to_be_told_how_many(run_dir: str, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "prune", run_dir, *wrong])
    assert left.value.code == ExitCode.USAGE
    assert "keep" in capsys.readouterr().err
    assert len(steps(run_dir)) == 5


@pytest.mark.parametrize("verb", ["ls", "pin", "unpin", "prune"])
def test_every_verb_has_help_and_is_in_the_overview(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", verb, "--help"])
    assert left.value.code == 0 and "usage" in capsys.readouterr().out
    assert verb in HELP


@pytest.mark.s3
def test_on_an_object_store(s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    fill(open_storage(f"{s3.url}/checkpoints", s3.options))
    options = ["--options", *(word for pair in s3.options.items() for word in pair)]
    assert told(capsys, "pin", s3.url, "10", *options)["changed"]
    report = told(capsys, "prune", s3.url, "--keep", "1", *options)
    assert [row["step"] for row in report["checkpoints"] if row["goes"]] == [20]
    assert [row["step"] for row in told(capsys, "ls", s3.url, *options)] == [50, 40, 30, 10]
