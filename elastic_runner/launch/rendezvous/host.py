"""The host of an epoch: it keeps the membership, and answers the nodes that are connected to it.

One thread serves all connections; another one gives signs of life on the storage. Nobody polls, and what is sent to a
node does not grow with the number of nodes. Each round gets a TCPStore of its own for its workers, so that no key of
an old world is met in a new one, bound by this process, so that nobody else takes its port.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from elastic_runner.errors import StorageError
from elastic_runner.launch.rendezvous import backoff, membership
from elastic_runner.launch.rendezvous.backoff import Losses
from elastic_runner.launch.rendezvous.board import Board
from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.failures import newest
from elastic_runner.launch.rendezvous.membership import (
    Action,
    Alive,
    Break,
    Event,
    Finish,
    Form,
    Hold,
    Join,
    Leave,
    Membership,
    Resign,
    Rules,
    Tick,
)
from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import NONSENSE, Lines, Message, encode, listen, quick
from elastic_runner.launch.rendezvous.worker_store import WorkerStore

log = logging.getLogger(__name__)

_ENDING = 2.0
"""Seconds for a thread that was told to end; one that waits for the storage does not hear of it."""
_LEAVING = 5.0
"""Seconds that the host waits, when the job is done, for the others to go before it goes itself."""
_UNSENT = 4 << 20
"""Bytes waiting for a node that does not read them, at which it counts as gone."""
_CHUNK = 1 << 16
_LEFT = "its host has left"


@dataclass(eq=False)
class _Peer:
    """A connection."""

    socket: socket.socket
    node: str | None = None
    """Who it is, once it has said so."""
    lines: Lines = field(default_factory=Lines)
    unsent: bytearray = field(default_factory=bytearray)


class Host:
    """Hosts one epoch from construction to ``close``. ``listener``: listening already, its port on record.

    ``deposed``: the host before, where it was lost.
    """

    def __init__(
        self,
        epochs: Epochs,
        record: Record,
        listener: socket.socket,
        rules: Rules,
        settings: Settings,
        deposed: str | None = None,
    ) -> None:
        self.received = self.sent = 0
        """Messages so far."""
        self._epochs = epochs
        self._record = record
        self._listener = listener
        self._rules = rules
        self._settings = settings
        self._deposed = deposed
        self._began = time.monotonic()
        self._state = Membership()
        self._board = Board()
        self._peers: dict[str, _Peer] = {}
        self._closed: str | None = None
        self._attempts = 0
        self._failures: dict[int, str] = {}
        """How the newest attempts have ended, by their numbers."""
        self._worker_stores: list[WorkerStore] = []
        self._ending: str | None = None
        self._over = threading.Event()
        self._empty = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for each in (listener, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._threads = [
            threading.Thread(target=work, name=f"rendezvous host {name}", daemon=True)
            for name, work in (("serves", self._serve), ("beats", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        """Whether it has resigned or was replaced."""
        return self._over.is_set()

    def close(self, *, wait: bool = False, lost: bool = False) -> None:
        """End the epoch; ``wait``: not before its world has gone, for some seconds; ``lost``: not in order."""
        if wait:
            self._empty.wait(_LEAVING)
        self._end("its host is lost" if lost else _LEFT)
        for thread in self._threads:
            thread.join(_ENDING)

    def _end(self, reason: str) -> None:
        self._ending = self._ending or reason
        with suppress(OSError):
            self._waker.send(b"x")

    def _serve(self) -> None:
        """Thread: all connections."""
        try:
            while self._ending is None:
                self._serve_once()
        except Exception:  # a host that beats and does not answer would keep all others waiting
            log.exception("rendezvous: the host of epoch %d failed", self._record.epoch)
            self._end("its host has failed")
        self._over.set()
        self._tell(list(self._peers), {"end": self._ending, "lost": self._ending != _LEFT})
        for selected in list(self._selector.get_map().values()):
            selected.fileobj.close()  # type: ignore[union-attr]
        self._waker.close()
        self._selector.close()
        for store in self._worker_stores:
            store.close()

    def _serve_once(self) -> None:
        due = membership.next_deadline(self._state, self._rules)
        arrived: list[tuple[_Peer, Message | str]] = []
        began = time.monotonic()
        wait = None if due is None else max(due - began, 0.001)
        ready = self._selector.select(wait)
        held_up = wait is not None and time.monotonic() - began > wait + self._rules.lease / 3
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(_CHUNK)
            elif events & selectors.EVENT_WRITE:
                self._flush(key.data)
            else:
                arrived += [(key.data, each) for each in self._read(key.data)]
        # What had arrived counts before anybody is called silent: this process may have been held up itself. If it was
        # for long, perhaps all were, as those of a suspended job are: they get time to give a sign.
        heard = frozenset(self._state.seen if held_up else (peer.node for peer, _ in arrived if peer.node is not None))
        self._apply(Alive(nodes=heard) if heard else Tick())
        for peer, message in arrived:
            if peer.socket.fileno() < 0:
                continue
            if isinstance(message, str):
                self._drop(peer, message)
                continue
            try:
                self._take(peer, message)
            except NONSENSE:
                self._drop(peer, "sent nonsense")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                quick(connection)
                self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> list[Message | str]:
        """What has arrived; a text at the end says that nothing more will, and why."""
        try:
            data = peer.socket.recv(_CHUNK)
            return [*peer.lines.feed(data)] if data else ["is gone"]
        except BlockingIOError:
            return []
        except OSError as error:
            return [f"is gone ({error.strerror})"]
        except ValueError:
            return ["sent nonsense"]

    def _drop(self, peer: _Peer, reason: str) -> None:
        """The connection has ended; ``reason``: what became of its node."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.node is not None and self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
            self._board.forget(peer.node)
            self._apply(Leave(node=peer.node, lost=self._counts(peer.node), reason=reason))

    def _take(self, peer: _Peer, message: Message) -> None:
        self.received += 1
        if peer.node is None:
            if message["hello"] != self._record.token:
                raise ValueError("a stranger")
            self._welcome(peer, str(message["node"]))
            return
        node = peer.node
        if "alive" in message:
            self._tell([node], {"alive": len(self._state.waiting), "needed": self._rules.min_nodes})
        elif "join" in message:
            if self._closed is not None:
                self._tell([node], {"closed": self._closed})
            self._attempts = max(self._attempts, int(message.get("attempt", 0)))
            rank = None if message["join"] is None else int(message["join"])
            losses = self._inherited(node, message)
            self._apply(Join(node=node, rank=rank, nodes=int(message["nodes"] or 0), losses=losses))
            if node in self._state.waiting and self._state.running:
                self._tell([node], {"spare": self._state.round})
        elif "leave" in message:
            unhealthy = bool(message.get("unhealthy"))
            lost = unhealthy and self._counts(node)
            reason = "is unhealthy" if unhealthy else "has left"
            self._apply(Leave(node=node, done=bool(message["leave"]), lost=lost, reason=reason))
        elif "failed" in message:
            self._hear_failure(node, int(message["failed"]), str(message["how"]))
        elif "close" in message:
            first = self._closed is None
            if first:
                self._closed = str(message["close"])
            self._tell(list(self._peers) if first else [node], {"closed": self._closed})
        elif message.get("round") == self._state.round:  # what newer versions say besides is passed over
            for asker, answer in self._board.take(node, message):
                self._tell([asker], answer)

    def _inherited(self, node: str, message: Message) -> Losses:
        """What a node knows, and how the epoch before has ended, which later rounds of this one tell.

        That its host was lost is for those to say who were in a world with it and have not heard it leave.
        """
        losses = backoff.unpack(message.get("losses", []), time.monotonic())
        outlived = message["join"] is not None and node != self._deposed and not message.get("left")
        if self._deposed is None or self._state.round > 0 or not outlived:
            return losses
        return self._rules.backoff.lose(losses, self._deposed, self._began)

    def _hear_failure(self, node: str, attempt: int, how: str) -> None:
        """Of each attempt the first word counts; whoever says another one, as all nodes may, is told that one."""
        first = attempt not in self._failures
        self._failures = newest({attempt: how, **self._failures})
        if attempt in self._failures:
            self._tell(list(self._peers) if first else [node], {"failed": attempt, "how": self._failures[attempt]})

    def _counts(self, node: str) -> bool:
        """Whether a loss of this node is for this host to count: its own is for the next one, which counts it once."""
        return node != self._record.node

    def _welcome(self, peer: _Peer, node: str) -> None:
        former = self._peers.get(node)
        if former is not None:  # it has come back before the end of its old connection was noticed
            self._drop(former, "has lost its connection")
        peer.node = node
        self._peers[node] = peer
        failures: list[Message] = [{"failed": attempt, "how": how} for attempt, how in self._failures.items()]
        self._tell([node], {"welcome": self._record.epoch, "known": list(self._failures)}, *failures)

    def _apply(self, event: Event) -> None:
        before = self._state
        self._state, actions = membership.transition(before, event, time.monotonic(), self._rules)
        for action in actions:
            self._act(action)
        if len(self._state.seen) < len(before.seen):
            for node in before.seen.keys() - self._state.seen.keys():
                # Whoever was silent learns it by the end of the connection, and comes back.
                if node in self._peers and not (isinstance(event, Leave) and event.node == node):
                    self._drop(self._peers[node], "")
        if self._state.world:
            self._empty.clear()
        else:
            self._empty.set()

    def _act(self, action: Action) -> None:
        if isinstance(action, Break):
            log.info("epoch %d: round %d is over: %s", self._record.epoch, action.round, action.reason)
            self._tell(action.nodes, {"break": action.round, "reason": action.reason})
        elif isinstance(action, Form):
            self._form(action)
        elif isinstance(action, Hold):
            log.warning(
                "rendezvous: epoch %d: %s was lost %d times in a row; it waits %.0f s for a place, unless it is needed",
                *(self._record.epoch, action.node, action.times, action.seconds),
            )
            self._tell([action.node], {"hold": action.seconds, "times": action.times})
        elif isinstance(action, Finish):
            self._tell(action.spares, {"finished": True})
            self._tell(action.stranded, {"closed": "the other nodes have finished"})
        elif isinstance(action, Resign):
            log.warning("rendezvous: epoch %d: %s; its host gives way", self._record.epoch, action.reason)
            self._end(action.reason)

    def _form(self, action: Form) -> None:
        listener = listen()
        port = int(listener.getsockname()[1])
        self._worker_stores = [*self._worker_stores[-1:], WorkerStore(listener)]
        self._board = Board()
        self._attempts += 1
        place: Message = {"form": action.round, "nodes": len(action.nodes), "port": port, "attempt": self._attempts}
        place["losses"] = backoff.pack(self._state.losses, time.monotonic())
        for rank, node in enumerate(action.nodes):
            self._tell([node], {**place, "rank": rank})
        self._tell(self._state.waiting, {"spare": action.round})

    def _tell(self, nodes: Iterable[str], *messages: Message) -> None:
        lines = b"".join(encode(message) for message in messages)
        for node in nodes:
            peer = self._peers.get(node)
            if peer is not None:
                self.sent += len(messages)
                peer.unsent += lines
                self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        waited = len(peer.unsent)
        try:
            del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # reading says what has happened
        if len(peer.unsent) > _UNSENT:
            peer.socket.shutdown(socket.SHUT_RDWR)
            peer.unsent.clear()
        if bool(peer.unsent) or waited:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if self._selector.get_key(peer.socket).events != wanted:
                self._selector.modify(peer.socket, wanted, peer)

    def _beat(self) -> None:
        """Thread: signs of life on the storage, and a look whether another epoch has begun."""
        me = uuid.uuid4().hex
        count, trouble = 0, False
        while not self._over.is_set():
            count += 1
            try:
                self._epochs.set_beat(self._record.epoch, f"{me} {count}")
                newest, _ = self._epochs.newest()
                if newest is not None and newest.epoch > self._record.epoch:
                    self._end(f"epoch {newest.epoch} has begun")
                trouble = False
            except StorageError as error:
                if not trouble:
                    log.warning("rendezvous: its host cannot give a sign of life: %s", error)
                trouble = True
            self._over.wait(self._settings.beat)
        with suppress(StorageError):
            lost = self._ending != _LEFT
            self._epochs.end(self._record.epoch, self._ending or "", lost=lost, closed=self._closed)
