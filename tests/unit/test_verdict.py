"""What workers tell their launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_runner.verdict import (
    RunPlace,
    Verdict,
    clear,
    decode,
    encode,
    in_words,
    last_place,
    message_of,
    place,
    read,
    read_place,
    tell,
)


def test_the_first_worker_s_word_counts_until_the_next_attempt(tmp_path: Path) -> None:
    directory = str(tmp_path)
    assert read(directory) is None
    first = Verdict(code=3, message="cause", final=True)
    tell(directory, first)
    tell(directory, Verdict(code=1, message="late", final=False))
    assert read(directory) == first
    clear(directory)
    assert read(directory) is None
    clear(directory)


def test_another_version_s_word_is_understood() -> None:
    given = Verdict(code=3, message="cause", final=True, rank=1)
    newer = json.dumps({**json.loads(encode(given)), "colour": "red"})
    assert decode(newer) == given and in_words(newer) == "cause"


def test_what_comes_after_a_run_is_finished_is_told_and_is_not_started_again(tmp_path: Path) -> None:
    directory, finished = str(tmp_path), Verdict(code=0, message="", final=True)
    for _ in range(2):
        tell(directory, finished)
        assert read(directory) == finished
        tell(directory, Verdict(code=1, message="lost a peer", final=False, consequence=True))
        assert read(directory) == finished
        tell(directory, Verdict(code=1, message="rank 1: ValueError: bad", final=False, kind="ValueError", rank=1))
        said = "after the run was finished: rank 1: ValueError: bad"
        assert read(directory) == Verdict(code=1, message=said, final=True, kind="ValueError", rank=1)
        clear(directory)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad: x"), "ValueError: bad: x"),
        (ValueError("two\nlines,\r\n\tand more "), "ValueError: two lines, and more"),
        (ValueError("\x1b[31mred\x00 \udc80é"), r"ValueError: \x1b[31mred\x00 \udc80é"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Mute(), "Mute"),
        (ValueError("x" * 9999), "ValueError: " + "x" * 480),
    ],
)
def test_a_message_is_one_line_that_can_be_printed(error: BaseException, said: str) -> None:
    assert message_of(error, 1) == f"rank 1: {said}"


@pytest.mark.parametrize("text", ["by hand", "", "5", "[]", "null", '{"code": 3}', '"x"'])
def test_any_other_text_is_no_verdict(text: str) -> None:
    assert decode(text) is None and in_words(text) == text


def test_no_launcher_no_word(tmp_path: Path) -> None:
    tell(None, Verdict(code=3, message="cause", final=True))
    tell(str(tmp_path / "gone"), Verdict(code=3, message="cause", final=True))
    assert read(str(tmp_path / "gone")) is None


def test_the_place_of_the_run(tmp_path: Path) -> None:
    assert read_place(str(tmp_path)) is None
    run = RunPlace(url="s3://bucket/run", options={"key": "k"}, attempt=3)
    place(str(tmp_path), run)
    assert read_place(str(tmp_path)) == run


def test_the_place_outlives_attempts_in_which_no_worker_gets_so_far(tmp_path: Path) -> None:
    directory, run = str(tmp_path), RunPlace(url="runs/x", options={}, attempt=3)
    place(directory, run)
    for _ in range(3):
        clear(directory)
        assert read_place(directory) is None and last_place(directory) == run
    place(directory, RunPlace(url="runs/x", options={}, attempt=7))
    assert last_place(directory) == read_place(directory) != run
