"""Hosts: network namespaces on a bridge of their own, each with an address, a hostname and a hosts file.

They need root and iproute2. A host can be cut off silently, its cable pulled, and all healed. Nothing is seen outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NET = "10.77.0"
_TOOLS = ("ip", "bridge", "unshare")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def missing() -> str | None:
    """Why there can be no hosts here; None when there can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root"
    name = f"er{uuid.uuid4().hex[:6]}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        return None
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Hosts:
    """So many hosts, numbered from 1."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._base = f"er{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._base}s"

    def name(self, number: int) -> str:
        """A host's name, which is its namespace's."""
        return f"{self._base}h{number}"

    def on(self, number: int) -> list[str]:
        """The beginning of a command line that runs the rest on a host; the process id stays the same."""
        name = self.name(number)
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]

    def cut(self, number: int) -> None:
        """The switch drops what comes from the host and goes to it; nobody is told."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", f"port{number}", "state", "0")

    def heal(self, number: int) -> None:
        """Undo ``cut``."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", f"port{number}", "state", "3")

    def unplug(self, number: int) -> None:
        """The host's link goes down."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """Undo ``unplug``."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")

    def make(self) -> None:
        """Make them."""
        _run("ip", "netns", "add", self._switch)
        _run(
            "ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0"
        )
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        names = "".join(f"{_NET}.{n} {self.name(n)}\n" for n in range(1, self._count + 1))
        for number in range(1, self._count + 1):
            name, port = self.name(number), f"port{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", name, "address", "add", f"{_NET}.{number}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "route", "add", "default", "via", f"{_NET}.254")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            files = Path("/etc/netns") / name  # bound over /etc by "ip netns exec"
            files.mkdir(parents=True)
            (files / "resolv.conf").write_text(
                "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
            )  # refuses at once
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def remove(self) -> None:
        """Whatever was made of them."""
        for name in [self._switch, *(self.name(number) for number in range(1, self._count + 1))]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextmanager
def running_hosts(count: int) -> Iterator[Hosts]:
    """Hosts; the test is skipped where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    hosts = Hosts(count)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
