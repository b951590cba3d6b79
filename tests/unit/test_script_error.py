"""Tracebacks of ranks and attempts that fail alike (case c02)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_runner import verdict
from elastic_runner.environment import AGENT_DIR
from elastic_runner.launch.script_error import _print_once, report_errors
from elastic_runner.verdict import Verdict


def test_the_same_text_is_printed_once_and_another_one_in_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, text in enumerate(["one\n", "one\n", "another\n", "one\n"]):
        _print_once(text, f"rank {rank}: above\n", tmp_path)
    assert capfd.readouterr().err == "one\nrank 1: above\nanother\nrank 3: above\n"


def test_whoever_writes_to_a_file_of_its_own_has_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        with (tmp_path / f"{rank}.log").open("w") as file:
            monkeypatch.setattr(sys, "stderr", file)
            _print_once("one\n", "above\n", tmp_path)
    assert [(tmp_path / f"{rank}.log").read_text() for rank in range(2)] == ["one\n"] * 2


def test_what_fails_after_the_run_is_finished_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AGENT_DIR, str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    verdict.tell(str(tmp_path), Verdict(code=0, message="", final=True))
    report_errors(())
    sys.excepthook(ValueError, ValueError("after\nthe with"), None)
    told = verdict.read(str(tmp_path))
    assert told is not None and (told.code, told.final, told.kind) == (1, True, "ValueError")
    assert told.message == "after the run was finished: rank 0: ValueError: after the with"
    assert capfd.readouterr().err == "ValueError: after\nthe with\n"
