"""Attempts: each start of a run owns a number, taken by exclusive create. It fences what an older start may commit."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

from elastic_runner import paths
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import AlreadyExists, Damaged, Fenced, NotFound
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


class Begun(NamedTuple):
    """An attempt that has its number."""

    number: int
    """From 1."""
    before: int
    """Attempts before it."""
    last: End | None
    """How the last one that failed did."""
    run_id: str
    """Of the run, the same for all attempts."""


def begin_together(storage: Storage, coordinator: Coordinator) -> Begun:
    """Take the next number once for all ranks. Collective."""
    pids = coordinator.gather("pids", (socket.gethostname(), os.getpid()))
    facts = {"world_size": len(pids), "workers": [{"host": host, "pid": pid} for host, pid in pids]}

    def begin() -> Begun:
        number = begin_attempt(storage, facts)
        last = next(iter(read_ends(storage, most=1)), None)
        return Begun(number, len(attempts(storage)) - 1, last, run_id(storage))

    return coordinator.once("attempt", begin)


def run_id(storage: Storage) -> str:
    """Made at random, once for a run directory. Raises Damaged."""
    try:
        data = storage.read(paths.RUN)
    except NotFound:
        made = json.dumps({"id": uuid.uuid4().hex[:12], "created": time.time()}, indent=1).encode()
        with suppress(AlreadyExists):
            storage.create(paths.RUN, made)
        data = storage.read(paths.RUN)
    try:
        return str(json.loads(data)["id"])
    except (ValueError, TypeError, KeyError):
        raise Damaged(f"{storage.url}/{paths.RUN} names no run; delete it, and trackers begin a new one") from None


def check_fence(storage: Storage, attempt: int) -> None:
    """Raise Fenced when a newer attempt has begun."""
    newest = max(attempts(storage), default=0)
    if newest > attempt:
        raise Fenced(f"attempt {newest} has taken over this run; attempt {attempt} must not commit")
