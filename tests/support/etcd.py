"""A real etcd in a process of its own, with the API that torch's rendezvous speaks.

Needs Debian's package etcd-server, and python-etcd.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.waiting import eventually

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None, reason="needs etcd and python-etcd"
)


@contextmanager
def running_etcd(directory: Path) -> Iterator[str]:
    """Its endpoint, HOST:PORT."""
    endpoint, peers = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = ["etcd", "--enable-v2", f"--data-dir={directory / 'data'}", f"--listen-peer-urls={peers}"]
    command += [f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}"]
    command += [f"--listen-client-urls=http://{endpoint}", f"--advertise-client-urls=http://{endpoint}"]
    with (directory / "etcd.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: server.poll() is not None or _answers(endpoint), "etcd", seconds=60)
        assert server.poll() is None, (directory / "etcd.log").read_text()
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/v2/keys", timeout=5):
            return True
    except OSError:
        return False
