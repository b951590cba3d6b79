"""The error tree: its docstring is complete and true."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from elastic_runner import errors
from elastic_runner.errors import ElasticRunnerError, ExitCode, Mismatch


def classes() -> Iterator[type[ElasticRunnerError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, ElasticRunnerError):
            yield value


def told() -> dict[str, tuple[str | None, int, bool]]:
    """By class: its parent, exit code and whether a restart may cure it, as the docstring tells; inherited if not."""
    tree: dict[str, tuple[str | None, int, bool]] = {}
    above: list[str] = []
    line = re.compile(r"^    ([│├└─ ]*)(\w+)(?: +(\d+) +(not restartable|restartable))?")
    assert errors.__doc__ is not None
    for text in errors.__doc__.split("::")[1].splitlines():
        match = line.match(text)
        if match is None:
            continue
        depth, name = len(match.group(1)) // 4, match.group(2)
        above[depth:] = [name]
        parent = above[depth - 1] if depth else None
        if match.group(3):
            tree[name] = (parent, int(match.group(3)), match.group(4) == "restartable")
        else:
            assert parent is not None
            tree[name] = (parent, *tree[parent][1:])
    return tree


def test_docstring_lists_every_class_with_parent_exit_code_and_whether_to_restart() -> None:
    actual = {
        cls.__name__: (
            None if cls is ElasticRunnerError else cls.__mro__[1].__name__,
            int(cls.exit_code),
            cls.restartable,
        )
        for cls in classes()
    }
    assert told() == actual


@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__name__)
def test_every_error_travels_between_ranks(cls: type[ElasticRunnerError]) -> None:
    again = pickle.loads(pickle.dumps(cls("what and why")))
    assert type(again) is cls and str(again) == "what and why"
    assert cls.__doc__


def test_mismatch_keeps_its_lists() -> None:
    again = pickle.loads(pickle.dumps(Mismatch("m", missing=["a"], extra=["b"], misshapen=["c"])))
    assert (again.missing, again.extra, again.misshapen) == (("a",), ("b",), ("c",))


def test_exit_codes_are_the_documented_ones() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "FINISHED": 0,
        "FAILED": 1,
        "USAGE": 2,
        "DO_NOT_RETRY": 3,
        "UNHEALTHY_NODE": 69,
        "INTERRUPTED": 75,
    }
