"""How attempts ended: one small file for each that failed, beside its record, by the first rank that had the error."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, fields

from elastic_runner import paths
from elastic_runner.checkpoint.trust import End
from elastic_runner.errors import AlreadyExists, NotFound
from elastic_runner.storage import Storage

_RECENT = 64
"""Ends to read: each is a request, at every start."""


def write_end(storage: Storage, end: End, *, rank: int, message: str) -> None:
    """Put an end on record, unless another rank has."""
    record = {**asdict(end), "rank": rank, "message": message, "time": time.time()}
    with suppress(AlreadyExists):
        storage.create(paths.attempt_end(end.attempt), json.dumps(record, indent=1).encode())


def read_ends(storage: Storage) -> list[End]:
    """The latest ends on record, oldest first; torn ones are left out."""
    numbers = sorted(n for name in storage.list(paths.ATTEMPTS) if (n := paths.ended_attempt(name)) is not None)
    known = {field.name for field in fields(End)}
    found = []
    for number in numbers[-_RECENT:]:
        with suppress(NotFound, ValueError, TypeError, AttributeError):
            record = json.loads(storage.read(paths.attempt_end(number)))
            found.append(End(**{name: value for name, value in record.items() if name in known}))
    return found
