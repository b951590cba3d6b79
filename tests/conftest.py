"""Fixtures that several folders use, and what may run beside what."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["tests.support.s3", "tests.support.seaweed", "tests.support.proxy", "tests.support.storage_bench"]

_ONE_AFTER_THE_OTHER = ("integration", "chaos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest -n, jobs of several processes have one of pytest's to themselves, and all else has the others."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in _ONE_AFTER_THE_OTHER:
            item.add_marker(pytest.mark.xdist_group("jobs"))
