"""The TCPStore in which the workers of one round meet."""

from __future__ import annotations

import logging
import socket
import threading

import torch.distributed as dist

log = logging.getLogger(__name__)

_MAKING = 20.0
"""Seconds for a store that is being made when the host ends."""


class WorkerStore:
    """Made in a thread: torch looks names up for its log, for seconds where no name server answers.

    Whoever connects meanwhile waits in the queue of the listening socket.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._port = int(listener.getsockname()[1])
        self._listener = listener.detach()
        self._store: dist.TCPStore | None = None
        self._thread = threading.Thread(target=self._make, name="rendezvous host makes a store", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._store = dist.TCPStore(
                "localhost", self._port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener
            )
        except RuntimeError:
            log.exception("rendezvous: the store for the workers could not be made")

    def close(self) -> None:
        """A thread that is inside torch when the interpreter ends would abort the process."""
        self._thread.join(_MAKING)
        self._store = None
