"""Where this process is: on which node, and under which agent."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def this_node() -> str:
    """What ranks that see each other's memory have in common: host and process namespace."""
    host = socket.gethostname()
    with suppress(OSError):  # tells hosts of the same name apart
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{host}/{Path('/proc/self/ns/pid').stat().st_ino}"


def this_agent(directory: str | None) -> str:
    """What ranks that were started by the same agent have in common. ``directory``: the agent's, where it is ours."""
    return f"{this_node()}/{directory or ''}"
