"""Nodes as threads of this process: handlers with short settings, each driven as torch's agent drives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic_runner.launch.rendezvous.handler import ElasticRendezvous, create_handler
from tests.support.waiting import eventually

SHORT = {
    "last_call": 0.4,
    "lease": 0.9,
    "beat": 0.1,
    "patience": 0.4,
    "connect": 1.0,
    "rejoin": 5.0,
    "join_timeout": 20.0,
}


class World(NamedTuple):
    """What a node is told of a round."""

    round: int
    rank: int
    size: int


class Node:
    """An agent in a thread; its workers run until told otherwise."""

    def __init__(
        self,
        endpoint: str,
        *,
        nodes: tuple[int, int] = (1, 3),
        workers: int = 1,
        conf: Mapping[str, object] = {},
        machine: str | None = None,
    ) -> None:
        handler = create_handler(
            RendezvousParameters("elastic", endpoint, "job", *nodes, local_addr="127.0.0.1", **{**SHORT, **conf})
        )
        assert isinstance(handler, ElasticRendezvous)
        self.handler = handler
        if machine is not None:
            handler.node = f"{machine}:{handler.node.partition(':')[2]}"
        self.worlds: list[World] = []
        self.ranks: list[int] = []
        """The first global rank of each round."""
        self.error: BaseException | None = None
        self._workers = workers
        self._told = ""
        self._thread = threading.Thread(target=self._run, name=f"agent of {handler.node}", daemon=True)
        self._thread.start()

    @property
    def world(self) -> World | None:
        """The present one, None while there is none."""
        member = self.handler._member
        return self.worlds[-1] if self.worlds and member is not None and member.over is None else None

    @property
    def hosts(self) -> bool:
        """Whether it hosts an epoch."""
        return self.handler._host is not None and not self.handler._host.over

    @property
    def ended(self) -> bool:
        """Whether its agent has returned."""
        return not self._thread.is_alive()

    def tell(self, what: str) -> None:
        """``restart``: its workers have failed; ``fail``: for good; ``done``: they have finished; the node is to
        ``leave``, or does as ``unhealthy``."""
        self._told = what

    def die(self) -> None:
        """As if its process had been killed: all its connections end."""
        self._told = "die"
        host, member = self.handler._host, self.handler._member
        if host is not None:
            host._epochs.end = lambda *_args, **_more: None  # type: ignore[method-assign]
            for peer in list(host._peers.values()):
                with suppress(OSError):
                    peer.socket.shutdown(2)
            host.close()
        if member is not None:
            member.close()
        self._thread.join(10)

    def end(self) -> None:
        """Whatever it does, it ends."""
        self._told = "die"
        self.handler.leave(done=False)
        self._thread.join(10)

    def _run(self) -> None:
        spec = WorkerSpec(role="default", local_world_size=self._workers, rdzv_handler=self.handler, entrypoint="none")
        try:
            while self._told not in ("done", "fail", "leave", "unhealthy", "die"):
                self._told = ""
                info = self.handler.next_rendezvous()
                assign = SimpleElasticAgent._assign_worker_ranks.__wrapped__  # type: ignore[attr-defined]
                (first, *_) = assign(None, info.store, info.rank, info.world_size, spec)
                self.ranks.append(first.global_rank)
                assert self.handler._place is not None
                self.worlds.append(World(self.handler._place.round, info.rank, info.world_size))
                while not self._told and self.handler.wait_over(0.02) is None:
                    pass
            if self._told == "done":
                self.handler.shutdown()
            elif self._told == "fail":
                try:
                    raise RuntimeError("restarts used up")
                except RuntimeError:
                    self.handler.shutdown()
            elif self._told in ("leave", "unhealthy"):
                self.handler.leave(done=False, unhealthy=self._told == "unhealthy")
        except BaseException as error:
            self.error = error
            with suppress(Exception):
                self.handler.leave(done=False)


@contextmanager
def nodes(endpoint: str, count: int, **settings: object) -> Iterator[list[Node]]:
    """So many, in one world of all."""
    all_nodes = [Node(endpoint, **settings) for _ in range(count)]  # type: ignore[arg-type]
    try:
        together(all_nodes)
        yield all_nodes
    finally:
        for node in all_nodes:
            node.end()


def together(all_nodes: list[Node], seconds: float = 20.0) -> None:
    """Wait until these, and no others, are a world."""

    def are() -> bool:
        worlds = [node.world for node in all_nodes]
        if any(world is None or world.size != len(all_nodes) for world in worlds):
            return False
        return sorted(world.rank for world in worlds if world) == list(range(len(all_nodes)))

    eventually(are, seconds=seconds)
