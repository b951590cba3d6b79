"""An S3 server in this process: moto on a free port, a fresh bucket for each test that asks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import boto3
import pytest
from moto.server import ThreadedMotoServer

_KEY, _SECRET = "AKIATESTACCESSKEYID", "a-secret-that-must-stay-secret"


@dataclass(frozen=True, kw_only=True)
class S3:
    """Where a test may put its objects."""

    url: str
    """``s3://bucket/prefix``."""
    options: dict[str, str]
    """As in ``storage_options``."""


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str) -> S3:
    bucket = f"b{uuid.uuid4().hex}"
    options = {
        "key": _KEY,
        "secret": _SECRET,
        "client_kwargs.endpoint_url": s3_endpoint,
        "client_kwargs.region_name": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id=_KEY,
        aws_secret_access_key=_SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=bucket)
    client.close()
    return S3(url=f"s3://{bucket}/run", options=options)
