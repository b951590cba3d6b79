"""Epochs on the storage: who hosts each, whether that host is alive, whether it has ended."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from elastic_runner import paths
from elastic_runner.errors import AlreadyExists, NotFound, StorageError
from elastic_runner.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Record:
    """An epoch's host."""

    epoch: int
    """Its number, from 1."""
    node: str = ""
    """Its name: machine:pid:word."""
    addresses: tuple[str, ...]
    """Names and addresses of the host, the likeliest first."""
    port: int
    """Where it listens."""
    token: str
    """A word that whoever connects must know, and nobody but this host does: others may listen there later."""


_KEPT = 8
"""Epochs whose files stay, for people."""


class Epochs:
    """The epochs of one job; ``storage`` is the job's rendezvous directory."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url = storage.url

    def newest(self) -> tuple[Record | None, bool]:
        """The newest epoch, and whether it has ended. One that is being written or torn counts as none, ended."""
        names = self._storage.list("")
        number = max((n for name in names if (n := paths.epoch_number(name)) is not None), default=0)
        if number == 0:
            return None, True
        ended = paths.epoch_end(number) in names
        try:
            body = json.loads(self._storage.read(paths.epoch_record(number)))
            return Record(**{**body, "addresses": tuple(body["addresses"])}), ended
        except (NotFound, ValueError, TypeError, KeyError):
            return Record(epoch=number, addresses=(), port=0, token=""), True

    def open(self, record: Record) -> bool:
        """Take an epoch; False when another node has taken it."""
        try:
            self._storage.create(paths.epoch_record(record.epoch), json.dumps(asdict(record)).encode())
        except AlreadyExists:
            return False
        return True

    def beat(self, epoch: int) -> str | None:
        """The host's latest beat."""
        try:
            return self._storage.read(paths.epoch_beat(epoch)).decode(errors="replace")
        except NotFound:
            return None

    def set_beat(self, epoch: int, beat: str) -> None:
        """Give a sign of life."""
        self._storage.put(paths.epoch_beat(epoch), beat.encode())

    def end(self, epoch: int, reason: str, *, lost: bool, closed: str | None) -> None:
        """Say that the epoch is over; ``lost``: its host does not leave in order; ``closed``: why the job is, too."""
        said = {"reason": reason, "lost": lost, "closed": closed}
        self._storage.put(paths.epoch_end(epoch), json.dumps(said).encode())

    def closed(self, epoch: int) -> str | None:
        """Why the job was over with this epoch; None when it was not."""
        closed = self._said(epoch, "closed")
        return None if closed is None else str(closed)

    def lost(self, epoch: int) -> bool:
        """Whether its host has not left in order."""
        return self._said(epoch, "lost") is not False

    def _said(self, epoch: int, what: str) -> object:
        try:
            return json.loads(self._storage.read(paths.epoch_end(epoch)))[what]
        except (NotFound, ValueError, TypeError, KeyError):
            return None

    def forget(self, epoch: int) -> None:
        """Delete what is left of epochs long before this one."""
        with suppress(StorageError):
            for name in self._storage.list(""):
                number = paths.epoch_number(name)
                if number is not None and number <= epoch - _KEPT:
                    for each in (paths.epoch_beat(number), paths.epoch_end(number), name):
                        self._storage.delete(each)
