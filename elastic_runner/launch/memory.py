"""Memory of a node that outlives its workers: files without a name that the agent holds open.

Whatever ends the agent, the kernel frees them once the last process that has mapped them is gone.
"""

from __future__ import annotations

import os

from elastic_runner import heartbeat
from elastic_runner.environment import HEARTBEATS, SNAPSHOTS

SNAPSHOTS_PER_WORKER = 2
"""One is whole while the other is written."""


class NodeMemory:
    """For ``workers`` local ranks: a page for each one's heartbeat, and room for its snapshots, as large as they need.

    A worker opens them by path: ``/proc/<agent>/fd/<n>``.
    """

    def __init__(self, workers: int) -> None:
        self.heartbeats = [_memory(f"heartbeat of local rank {rank}", heartbeat.SIZE) for rank in range(workers)]
        """File handles by local rank."""
        self.snapshots = [
            [_memory(f"snapshot {number} of local rank {rank}", 0) for number in range(SNAPSHOTS_PER_WORKER)]
            for rank in range(workers)
        ]
        """File handles by local rank."""

    def variables(self) -> dict[str, str]:
        """What workers are told by their environment."""
        return {
            HEARTBEATS: os.pathsep.join(_path(handle) for handle in self.heartbeats),
            SNAPSHOTS: os.pathsep.join(_path(handle) for mine in self.snapshots for handle in mine),
        }

    def close(self) -> None:
        """Let go of it all."""
        for handle in [*self.heartbeats, *(handle for mine in self.snapshots for handle in mine)]:
            os.close(handle)
        self.heartbeats, self.snapshots = [], []


def _memory(name: str, size: int) -> int:
    handle = os.memfd_create(f"elastic_runner: {name}", os.MFD_CLOEXEC)
    os.ftruncate(handle, size)
    return handle


def _path(handle: int) -> str:
    return f"/proc/{os.getpid()}/fd/{handle}"
