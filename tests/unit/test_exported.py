"""The public names, and what importing them does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic_runner as er

IMPORT = """
import logging, os, signal, sys, threading
before = (dict(os.environ), sys.excepthook, [signal.getsignal(n) for n in (2, 10, 15)], threading.active_count())
import torch
root = (list(logging.getLogger().handlers), logging.getLogger().level)
from elastic_runner import *
after = (dict(os.environ), sys.excepthook, [signal.getsignal(n) for n in (2, 10, 15)], threading.active_count())
assert before == after, (before, after)
assert root == (logging.getLogger().handlers, logging.getLogger().level)
assert not logging.getLogger("elastic_runner").handlers
assert not torch.distributed.is_initialized()
assert "torch._dynamo" not in sys.modules, "costs half a second"
"""
STAR = """
import importlib, sys
from elastic_runner.launch.fork_server import MODULES
for name in MODULES:
    importlib.import_module(name)
before = set(sys.modules)
from elastic_runner import *
assert Worker.__name__ == "Worker"
assert before == set(sys.modules), set(sys.modules) - before
"""
LIGHT = """
import sys
import elastic_runner, elastic_runner.__main__, elastic_runner.cli.main, elastic_runner.launch.early
heavy = {"torch", "numpy", "fsspec", "pydantic", "tyro", "rich"} & set(sys.modules)
assert not heavy, heavy
"""

MODULES = """
import sys
import elastic_runner as er
try:
    raise er.errors.PeerLost("rank 1")
except er.errors.ElasticRunnerError as error:
    assert type(error) is er.errors.PeerLost
assert "torch" not in sys.modules
assert er.config.RunConfig is er.RunConfig
assert not hasattr(er, "no_such_module")
"""


def test_all_is_sorted_and_importable() -> None:
    assert er.__all__ == sorted(er.__all__)
    assert set(er.__all__) <= set(dir(er))
    for name in er.__all__:
        assert getattr(er, name).__doc__, name


def test_all_is_complete() -> None:
    for name in er.__all__:
        getattr(er, name)
    public = {name for name, value in vars(er).items() if not name.startswith("_") and hasattr(value, "__qualname__")}
    assert public == set(er.__all__)


def test_an_unknown_name_is_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="module 'elastic_runner' has no attribute 'Wroker'"):
        er.Wroker  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(er, "__wrapped__")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(IMPORT, id="changes nothing"),
        pytest.param(LIGHT, id="the package and the command line: in an instant"),
        pytest.param(MODULES, id="a module: only what it needs"),
        pytest.param(STAR, id="all names: only what the fork server has imported"),
    ],
)
def test_what_importing_does_not_do(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
