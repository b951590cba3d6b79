"""Standby workers: forked while others train, the device of their local rank open, waiting to be told what to run."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from elastic_runner.environment import read_environment
from elastic_runner.errors import ElasticRunnerError

_READY, _TAKEN = b"r", b"t"
"""What a standby says: its device is open; it has what it is to run."""
_TAKING = 1.0
"""Seconds for that; one that is stopped, or about to die, does not say it."""


class Standbys:
    """Those of a fork server, by their process ids."""

    def __init__(self) -> None:
        self._channels: dict[int, socket.socket] = {}

    def fork(self) -> tuple[int, socket.socket]:
        """Make one. Returns its pid; in itself 0, and the socket that it is to wait on."""
        ours, its = socket.socketpair()
        pid = os.fork()
        if pid:
            its.close()
            self._channels[pid] = ours
        else:
            ours.close()
        return pid, its

    def start(self, pid: int, request: dict[str, Any]) -> bool:
        """Have it become the worker of ``request``. Returns False when it is not ready, and ends it."""
        channel = self._channels.pop(pid, None)
        if channel is None:
            return False
        with channel:
            try:
                channel.setblocking(False)
                said = channel.recv(1)
                channel.settimeout(_TAKING)
                channel.sendall(json.dumps(request).encode() + b"\n")
                said += channel.recv(1)
            except OSError:
                said = b""
        if said == _READY + _TAKEN:
            return True
        os.kill(pid, signal.SIGKILL)
        return False

    def ended(self, pid: int) -> None:
        """It has, before it was told anything."""
        if pid in self._channels:
            self._channels.pop(pid).close()

    def close(self) -> None:
        """Let go of the sockets; a standby whose socket is closed everywhere ends."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}


def stand_by(channel: socket.socket, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Open the device of the local rank that ``env`` names and wait for what to become; None: nobody is left to say so.

    Raises SystemExit when the device cannot be opened.
    """
    from elastic_runner.device import open_device  # a server that does not fork has no use for torch

    os.environ.update(env)  # CUDA reads it when it is opened
    local_rank = read_environment().local_rank
    try:
        open_device(local_rank)
    except (ElasticRunnerError, RuntimeError) as error:
        sys.exit(f"no standby worker for local rank {local_rank}: its device cannot be opened: {error}")
    with channel, channel.makefile("r") as lines:
        channel.sendall(_READY)
        if not (line := lines.readline()):
            return None
        channel.sendall(_TAKEN)
    return json.loads(line)
