"""The verbs as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_runner import paths
from elastic_runner.cli.main import HELP, main
from elastic_runner.errors import ExitCode
from elastic_runner.observability.summary import RunSummary, encode
from elastic_runner.storage import LocalStorage
from tests.support.handlers import kept_handlers
from tests.support.job import config, train
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    path = tmp_path_factory.mktemp("run")
    run_ranks(train, 2, config(str(path), steps=10))
    return path


def test_help_lists_every_verb_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("launch", "demo", "status", "audit", "metrics", "checkpoint"))
    assert all(f"{code.value} " in text for code in ExitCode)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["checkpoint"], ["checkpoint", "eat"]])
def test_wrong_verbs_exit_with_2(arguments: list[str]) -> None:
    assert main(arguments) == ExitCode.USAGE


@pytest.mark.parametrize(
    "verb", [["launch"], ["demo"], ["status"], ["audit"], ["metrics"], ["checkpoint", "ls"], ["checkpoint", "verify"]]
)
def test_every_verb_has_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with kept_handlers(), pytest.raises(SystemExit) as left:
        main([*verb, "--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_status_shows_any_text_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages of gloo begin with a path in brackets, which a table could take for markup."""
    run_dir = tmp_path / "ü[a]*?"
    message = "rank 0: PeerLost: 'step 4': a peer went away ([/a/pair.cc:537] Read error [127.0.0.1]:27301)"
    LocalStorage(run_dir).put(paths.SUMMARY, encode(RunSummary(status="failed", message=message)))
    assert main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert message in shown and "ü[a]*?" in shown


def test_status_of_a_torn_summary_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / paths.SUMMARY).write_text('{"status": "runn')
    assert main(["status", str(tmp_path)]) == ExitCode.FAILED
    assert f"{paths.SUMMARY} is no summary" in capsys.readouterr().err


def test_status_counts_from_the_ledger(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["status"] == "finished"
    assert (told["ledger"]["steps"], told["ledger"]["repeated"], told["ledger"]["gaps"]) == (10, 0, 0)
    assert main(["status", str(run_dir)]) == 0
    assert "finished" in capsys.readouterr().out


def test_audit_of_a_run_of_two_ranks_proves_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("proven: ")


def test_status_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "none")]) == ExitCode.FAILED
    error = capsys.readouterr().err
    assert "no summary.json" in error and "Traceback" not in error


def test_checkpoint_ls_and_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run_dir), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [10, 5]
    assert main(["checkpoint", "verify", f"{run_dir}/checkpoints"]) == 0
    assert "digests" in capsys.readouterr().out


def test_verify_names_a_flipped_bit(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next((run_dir / "checkpoints").glob("step-*5/data-*/__0_0.distcp"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    try:
        assert main(["checkpoint", "verify", str(run_dir), "--json"]) == ExitCode.FAILED
        rows = json.loads(capsys.readouterr().out)
        assert [(row["step"], "other bytes" in row["unusable"]) for row in rows] == [(10, False), (5, True)]
    finally:
        file.write_bytes(whole)


def test_the_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "elastic_runner", "--help"], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout.strip()) == (0, HELP)
