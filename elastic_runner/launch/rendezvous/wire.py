"""What host and nodes say to each other: JSON objects, one a line, over a TCP connection per node.

Not through a TCPStore: its operations ignore their time-out when the server is frozen (torch 2.13: an ``add`` with two
seconds came back when the server was continued), a waiting one cannot be ended, which aborts the process at exit, and
it does not say that a client has gone, which is the fastest news of a killed node.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

NONSENSE = (ValueError, TypeError, LookupError, ArithmeticError)
"""What comes of a message that is not as it should be, where it is read."""
_LONGEST = 1 << 20
"""Bytes of a line; whoever sends more is no node of ours."""
_BACKLOG = 4096


def encode(message: Message) -> bytes:
    """The line of a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with ``data``. Raises ValueError for what is no message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ValueError("a line is too long")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is no object")
        return messages


def listen() -> socket.socket:
    """A listening socket on a port of the system's choice."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def quick(connection: socket.socket) -> None:
    """Send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
