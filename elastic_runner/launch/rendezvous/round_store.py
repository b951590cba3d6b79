"""The store in which torch's agents of one round agree on their workers' ranks and wait for each other at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elastic_runner.launch.rendezvous.member import EpochLost, Member, Place

_SECONDS = 300.0
_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"


class RoundStore(dist.Store):
    """A torch store whose waits end when the round is over, because whoever is waited for may never come.

    torch's agent ends the job when a store raises. So in a round that is over, ranks are made up, from this node's
    own; the agent starts its workers with them, sees at its next look that the round is over, and starts them again.
    Private formats of torch, read in 2.13: ``SimpleElasticAgent._assign_worker_ranks``.
    """

    def __init__(self, member: Member, place: Place) -> None:
        super().__init__()
        self._member = member
        self._place = place
        self._seconds = _SECONDS
        self._role: dict[str, Any] = {}

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Change it."""
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: bytes | str, /) -> None:
        """Set a key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str], /) -> None:
        """Set several keys."""
        texts = [value if isinstance(value, str) else value.decode("latin-1") for value in values]
        for key, text in zip(keys, texts, strict=True):
            if key.startswith(_ROLE):
                self._role = json.loads(text)
        try:
            self._member.post({"round": self._place.round, "set": dict(zip(keys, texts, strict=True))})
        except EpochLost:
            return

    def add(self, key: str, number: int, /) -> int:
        """Add to a counter; 0 when the round is over."""
        values = self._ask({"add": key, "number": number})
        return 0 if values is None else int(values[0])

    def get(self, key: str, /) -> bytes:
        """A key's value, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Values, once all are there."""
        values = self._ask({"get": list(keys)})
        if values is None:
            values = [self._made_up(key) for key in keys]
        return [value.encode("latin-1") for value in values]

    def check(self, keys: Sequence[str], /) -> bool:
        """Whether all are there."""
        return bool((self._ask({"check": list(keys)}) or [False])[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, /) -> None:
        """Until all are there, or the round is over."""
        self._ask({"get": list(keys)}, timeout)

    def _ask(self, message: dict[str, Any], timeout: timedelta | None = None) -> list[Any] | None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        try:
            return self._member.ask({"round": self._place.round, **message}, seconds)
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from None

    def _made_up(self, key: str) -> str:
        if key.startswith(_ROLE):
            return json.dumps(self._role)
        if key.startswith(_RANKS):
            workers = int(self._role.get("local_world_size", 1))
            base, world = self._place.rank * workers, self._place.nodes * workers
            return json.dumps([base, world, base, world])
        raise dist.DistStoreError(f"no {key}: the round is over")
