"""The public names, and what importing them does not do."""

from __future__ import annotations

import subprocess
import sys

import elastic_runner as er

IMPORT = """
import logging, os, signal, sys, threading
before = (dict(os.environ), sys.excepthook, [signal.getsignal(n) for n in (2, 10, 15)], threading.active_count())
import torch
root = (list(logging.getLogger().handlers), logging.getLogger().level)
import elastic_runner
after = (dict(os.environ), sys.excepthook, [signal.getsignal(n) for n in (2, 10, 15)], threading.active_count())
assert before == after, (before, after)
assert root == (logging.getLogger().handlers, logging.getLogger().level)
assert not logging.getLogger("elastic_runner").handlers
assert not torch.distributed.is_initialized()
assert "torch._dynamo" not in sys.modules, "costs half a second"
"""


def test_all_is_sorted_and_importable() -> None:
    assert er.__all__ == sorted(er.__all__)
    for name in er.__all__:
        assert getattr(er, name).__doc__, name


def test_all_is_complete() -> None:
    public = {name for name, value in vars(er).items() if not name.startswith("_") and hasattr(value, "__qualname__")}
    assert public == set(er.__all__)


def test_importing_has_no_side_effects() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
