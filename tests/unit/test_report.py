"""What a person reads when a worker dies, and with which code it leaves."""

from __future__ import annotations

import pytest

from elastic_runner.errors import ConfigError, Interrupted, ModelError, PeerLost
from elastic_runner.worker.report import describe, exit_code, where_am_i


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (PeerLost("x"), 1),
        (ConfigError("x"), 2),
        (ModelError("x"), 3),
        (Interrupted("x"), 75),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_our_errors_are_one_line() -> None:
    text = describe(raised(ModelError("set this option")), "rank 1", with_traceback=False)
    assert text == "elastic_runner: error: rank 1: ModelError: set this option"


def test_our_errors_with_traceback_on_request() -> None:
    assert "in raised" in describe(raised(ModelError("x")), "rank 1", with_traceback=True)


def test_foreign_errors_have_their_traceback() -> None:
    text = describe(raised(ZeroDivisionError("division by zero")), "rank 1", with_traceback=False)
    assert text.startswith("elastic_runner: error: rank 1:\nTraceback")
    assert "in raised" in text and text.endswith("ZeroDivisionError: division by zero")


class Mute(ConfigError, RuntimeError):
    def __str__(self) -> str:
        raise ValueError("not even that")


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_type() -> None:
    assert describe(raised(Mute()), "rank 1", with_traceback=False) == "elastic_runner: error: rank 1: Mute: "
    assert "test_report.Mute" in describe(raised(Mute()), "rank 1", with_traceback=True)


def test_a_torn_connection_is_told_as_a_consequence() -> None:
    """c08: the only traceback often belongs to a victim."""
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42")
    assert "look for the first error of another rank" in describe(raised(error), "rank 0", with_traceback=False)
    assert "another rank" not in describe(raised(RuntimeError("x")), "rank 0", with_traceback=False)


def test_interruption_is_no_error() -> None:
    assert describe(Interrupted("saved at step 3"), "rank 0", with_traceback=True) == "elastic_runner: saved at step 3"


def test_where_am_i() -> None:
    assert where_am_i(1, 4, "save", 12).endswith(", phase save, after step 12")
    assert where_am_i(1, 4, "setup", None).startswith("rank 1 of 4 on ")
    assert "step" not in where_am_i(1, 4, "setup", None)
