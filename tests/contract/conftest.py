"""Where and how checkpoints are kept, for every suite about them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.checkpointing import CheckpointingPlace
from tests.support.s3 import S3


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointingPlace:
    if request.param == "s3":
        server: S3 = request.getfixturevalue("s3")
        return CheckpointingPlace(server.url, server.options)
    return CheckpointingPlace(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def local(tmp_path: Path) -> CheckpointingPlace:
    return CheckpointingPlace(str(tmp_path))


@pytest.fixture(params=["sharded", "full"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)
