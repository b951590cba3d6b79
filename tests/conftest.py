"""Fixtures that several folders use, and what may run beside what."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["tests.support.s3", "tests.support.seaweed", "tests.support.proxy", "tests.support.storage_bench"]

_HOSTS = ("test_hosts.py", "test_slurm.py")
"""They mostly wait: for leases, for time limits."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest -n, jobs of several processes run one after the other, those of several hosts beside them."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in ("integration", "chaos"):
            item.add_marker(pytest.mark.xdist_group("hosts" if item.path.name in _HOSTS else "jobs"))
