"""Attempts: each start of a run owns a number, taken by exclusive create. It fences what an older start may commit."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from elastic_runner import paths
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import AlreadyExists, Fenced
from elastic_runner.history import End, read_ends
from elastic_runner.storage import Storage


def attempts(storage: Storage) -> list[int]:
    """Numbers taken so far, ascending."""
    return sorted(n for name in storage.list(paths.ATTEMPTS) if (n := paths.attempt_number(name)) is not None)


def begin_attempt(storage: Storage, facts: dict[str, Any]) -> int:
    """Take the next number, with ``facts`` (hosts, pids) on record."""
    number = max(attempts(storage), default=0) + 1
    while True:
        try:
            _create(storage, number, facts)
        except AlreadyExists:
            number += 1
        else:
            return number


def begin_next(storage: Storage, attempt: int, facts: dict[str, Any]) -> int:
    """Take the number after ``attempt``. Raises Fenced when somebody else has."""
    try:
        _create(storage, attempt + 1, facts)
    except AlreadyExists:
        raise Fenced(f"attempt {attempt + 1} has taken over this run") from None
    return attempt + 1


def _create(storage: Storage, number: int, facts: dict[str, Any]) -> None:
    record = {"attempt": number, "started": time.time(), **facts}
    storage.create(paths.attempt_record(number), json.dumps(record, indent=1).encode())


def begin_together(storage: Storage, coordinator: Coordinator) -> tuple[int, int, End | None]:
    """Take the next number once for all ranks, count the attempts before, and read the last failure. Collective."""
    pids = coordinator.gather("pids", (socket.gethostname(), os.getpid()))
    facts = {"world_size": len(pids), "workers": [{"host": host, "pid": pid} for host, pid in pids]}

    def begin() -> tuple[int, int, End | None]:
        number = begin_attempt(storage, facts)
        return number, len(attempts(storage)) - 1, next(iter(read_ends(storage, most=1)), None)

    return coordinator.once("attempt", begin)


def check_fence(storage: Storage, attempt: int) -> None:
    """Raise Fenced when a newer attempt has begun."""
    newest = max(attempts(storage), default=0)
    if newest > attempt:
        raise Fenced(f"attempt {newest} has taken over this run; attempt {attempt} must not commit")
