"""A node's connection to an epoch: joins rounds, hears when they are over, gives signs of life."""

from __future__ import annotations

import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastic_runner import verdict
from elastic_runner.launch.rendezvous import backoff
from elastic_runner.launch.rendezvous.backoff import Losses
from elastic_runner.launch.rendezvous.epochs import Record
from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import NONSENSE, Lines, Message, encode, quick

log = logging.getLogger(__name__)

_CHUNK = 1 << 16
_FIRST_WORD = 10.0
"""Seconds of waiting for a world after which a line says for whom; later ones come ever more rarely."""


class EpochLost(Exception):
    """The host is gone, or has ended the epoch."""


class Closed(Exception):
    """Another node has ended the job."""


class Finished(Exception):
    """The job is complete; this node has waited in vain."""


class NoWorld(Exception):
    """No world was formed in time."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node's place in a round."""

    round: int
    """The round's number within its epoch."""
    rank: int
    """This node's rank."""
    nodes: int
    """Nodes in the world."""
    port: int
    """Port of the store for the round's workers, on the epoch's host."""
    attempt: int = 1
    """How many worlds the job has had, this one included: the same on all nodes, through all epochs."""
    losses: Losses = field(default_factory=dict)
    """What the host knew of nodes that keep being lost, for the next one; times are of this node's clock."""
    left: bool = False
    """Whether the host has said since that it leaves, and is not lost."""


def enter(record: Record, node: str, settings: Settings, first: int = 0) -> tuple[Member | None, bool]:
    """Connect to an epoch's host, at its addresses from the ``first`` on; None when it does not answer.

    The flag: whether its machine refused, which means that it is there and nobody listens.
    """
    refused = silent = False
    end = time.monotonic() + settings.connect
    addresses = [record.addresses[(first + i) % len(record.addresses)] for i in range(len(record.addresses))]
    for address in addresses:
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            connection = socket.create_connection((address, record.port), timeout=left)
        except ConnectionRefusedError:
            refused = True
            continue
        except OSError:
            silent = True
            continue
        try:
            return Member(record, address, connection, node, settings), False
        except (OSError, *NONSENSE):
            connection.close()
            silent = True
    return None, refused and not silent


class Member:
    """One node in one epoch, from construction to ``close``. ``address``: where its host answers.

    Raises OSError, or one of NONSENSE, when that host is not the one on record.
    """

    def __init__(self, record: Record, address: str, connection: socket.socket, node: str, settings: Settings) -> None:
        self.epoch = record.epoch
        self.address = address
        self._socket = connection
        self._settings = settings
        self._lines = Lines()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._asks = itertools.count(1)
        self._answers: dict[int, list[Any]] = {}
        self._place: Place | None = None
        self._waiting = self._needed = 0
        self._held_until, self._times = 0.0, 0
        self._spare = self._finished = self._left = False
        self._broken: tuple[int, str] = (0, "")
        self._lost: str | None = None
        self.closed: str | None = None
        """Why the job is over, by the first node that said so; None while it is not."""
        self.host_left = False
        """Whether the host has said that it leaves, in order."""
        self._told: Callable[[], None] | None = None
        self.failures: dict[int, str] = {}
        """How attempts have ended, by their numbers, as the nodes have said."""
        self.known: frozenset[int] = frozenset()
        """Of which attempts the host knew already, and tells."""
        quick(connection)
        self._greet(record, node)
        connection.settimeout(settings.lease)
        self._thread = threading.Thread(target=self._listen, name="rendezvous member", daemon=True)
        self._thread.start()

    @property
    def over(self) -> str | None:
        """Why the present round is over, for people; None while it is not."""
        number, reason = self._broken
        broken = self._place is not None and number >= self._place.round
        closed = None if self.closed is None else verdict.in_words(self.closed)
        return self._lost or closed or (reason if broken else None)

    @property
    def place(self) -> Place | None:
        """In the latest round; None while none was given."""
        return self._place

    def tell(self, told: Callable[[], None]) -> None:
        """Call this when a round is over, from another thread."""
        self._told = told
        self._tell_if_over()

    def _tell_if_over(self) -> None:
        if self._told is not None and self.over is not None:
            self._told()

    def join(self, last: Place | None) -> Place:
        """Wait for a place in the next round; ``last``: the one before, here or in another epoch.

        Raises EpochLost, Closed, Finished, NoWorld.
        """
        self._place, self._spare, self._held_until = None, False, 0.0
        start = time.monotonic()
        said: Message = {"join": last and last.rank, "nodes": last and last.nodes}
        if last is not None:
            said |= {"attempt": last.attempt, "losses": backoff.pack(last.losses, start), "left": last.left}
        self._say(said)
        word = _FIRST_WORD
        with self._changed:
            while True:
                if self.closed is not None:
                    raise Closed(self.closed)
                if self._finished:
                    raise Finished
                if self._lost is not None or self._left:
                    raise EpochLost(self._lost or "this node has left")
                if self._place is not None:
                    return self._place
                waited = time.monotonic() - start
                if waited >= self._settings.join_timeout and not self._spare:
                    here = f"{self._waiting} of {self._needed} nodes wait"
                    raise NoWorld(f"no world within {self._settings.join_timeout:g} s: {here}")
                if waited >= word:
                    word *= 3
                    log.warning("rendezvous: %s", self._state_of_waiting())
                limit = word if self._spare else min(word, self._settings.join_timeout)
                self._changed.wait(max(limit - waited, 0.01))

    def wait_over(self, seconds: float | None) -> str | None:
        """Block until the present round is over, for so long at most; why it is, None when it is not."""
        with self._changed:
            self._changed.wait_for(lambda: self.over is not None or self._left, seconds)
        return self.over

    def leave(self, *, done: bool, unhealthy: bool = False) -> None:
        """Go; ``done``: with the work complete; ``unhealthy``: what is held against this node when it comes back."""
        with suppress(EpochLost):
            self._say({"leave": done, "unhealthy": unhealthy})
        self.close()

    def end_job(self, reason: str) -> str:
        """Tell every node that the job is over; returns why it is: another node may have said so first."""
        with suppress(EpochLost, TimeoutError):
            self._say({"close": reason})
            self._wait(lambda: self.closed is not None or self._lost is not None or self._left, self._settings.lease)
        return reason if self.closed is None else self.closed

    def tell_failure(self, attempt: int, end: str) -> None:
        """Tell every node how an attempt has ended; the first word on it counts."""
        with self._changed:
            self.failures = {attempt: end, **self.failures}
        with suppress(EpochLost):
            self._say({"failed": attempt, "how": end})

    def close(self) -> None:
        """Fall silent."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(self._settings.lease)
        self._socket.close()

    def post(self, message: Message) -> None:
        """Say something to the round's board. Raises EpochLost."""
        self._say(message)

    def ask(self, message: Message, seconds: float) -> list[Any] | None:
        """What the round's board answers; None once the round is over. Raises TimeoutError."""
        number = next(self._asks)
        try:
            self._say({**message, "ask": number})
        except EpochLost:
            return None
        self._wait(lambda: number in self._answers or self.over is not None or self._left, seconds)
        return self._answers.pop(number, None)

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(until, seconds):
                raise TimeoutError(f"no answer within {seconds:g} s")

    def _state_of_waiting(self) -> str:
        held = self._held_until - time.monotonic()
        if held > 0:
            return f"this node was lost {self._times} times in a row; it waits {held:.0f} s for a place, unless needed"
        if self._spare:
            return "as many nodes as allowed are at work; this one waits to step in"
        return f"waiting for more nodes: {self._waiting} of {self._needed} are here"

    def _greet(self, record: Record, node: str) -> None:
        self._socket.sendall(encode({"hello": record.token, "node": node}))
        messages: list[Message] = []
        while not messages:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionError("not the host on record")
            messages = self._lines.feed(data)
        if messages[0].get("welcome") != record.epoch:
            raise ValueError("not the host on record")
        self.known = frozenset(messages[0].get("known", []))
        for message in messages[1:]:
            self._take(message)

    def _say(self, message: Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(encode(message))
        except OSError as error:
            self._lose(f"the connection to its host is broken ({error})")
            raise EpochLost(self._lost) from error

    def _listen(self) -> None:
        """Thread: what the host says, and signs of life to it."""
        heard = time.monotonic()
        due = heard + self._settings.lease / 3
        arrivals = select.poll()
        arrivals.register(self._socket, select.POLLIN)
        while not self._left and self._lost is None:
            now = time.monotonic()
            if now >= due:
                due = now + self._settings.lease / 3
                with suppress(EpochLost):
                    self._say({"alive": True})
            if arrivals.poll(max(due - now, 0) * 1000):
                self._receive()
                heard = time.monotonic()
            # Judged only when nothing has arrived: this process may have been frozen itself, and its host with it.
            elif time.monotonic() - due > self._settings.lease / 3:
                heard = time.monotonic()
            elif time.monotonic() - heard >= self._settings.lease:
                self._lose(f"its host has not answered for {self._settings.lease:g} s")

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
            for message in self._lines.feed(data):
                self._take(message)
            self._tell_if_over()
        except OSError as error:
            self._lose(f"the connection to its host is broken ({error})")
        except NONSENSE as error:
            self._lose(f"its host has sent nonsense ({error!r})")
        else:
            if not data:
                self._lose("its host is gone")

    def _take(self, message: Message) -> None:
        with self._changed:
            if "alive" in message:
                self._waiting, self._needed = message["alive"], message["needed"]
                return
            if "answer" in message:
                self._answers[message["answer"]] = message["values"]
            elif "form" in message:
                self._place = Place(
                    round=message["form"],
                    rank=message["rank"],
                    nodes=message["nodes"],
                    port=message["port"],
                    attempt=message["attempt"],
                    losses=backoff.unpack(message.get("losses", []), time.monotonic()),
                )
            elif "hold" in message:
                self._held_until, self._times = time.monotonic() + message["hold"], message["times"]
                log.warning("rendezvous: %s", self._state_of_waiting())
            elif "spare" in message:
                self._spare = True
            elif "break" in message:
                self._broken = (int(message["break"]), str(message["reason"]))
            elif "failed" in message:
                self.failures = {**self.failures, int(message["failed"]): str(message["how"])}
            elif "closed" in message:
                self.closed = str(message["closed"])
            elif "finished" in message:
                self._finished = True
            elif "end" in message:
                self._lost = self._lost or str(message["end"])
                self.host_left = message.get("lost") is False
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            if not self._left:
                self._lost = self._lost or reason
            self._changed.notify_all()
        self._tell_if_over()
