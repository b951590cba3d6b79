"""What a host answers to nodes; these are bare connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.failures import KEPT
from elastic_runner.launch.rendezvous.host import Host
from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import Message, encode, listen
from elastic_runner.storage import LocalStorage

OLD = "old:1:x"
"""Hosted the epoch before."""


class Bare:
    """A connection to a host, which has been welcomed."""

    def __init__(self, host: Host, node: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", host._record.port), timeout=20)
        self._lines = self._socket.makefile("rb")
        self.say(hello=host._record.token, node=node)
        self.welcome = self.hear()

    def say(self, **message: Any) -> None:
        self._socket.sendall(encode(message))

    def hear(self) -> Message:
        """The next message; an empty one at the end."""
        message: Message = json.loads(self._lines.readline() or "{}")
        return message

    def hears_nothing_more(self) -> bool:
        """What the host has heard from others before, it has answered before this."""
        self.say(alive=True)
        return "alive" in self.hear()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def hosting(directory: Path, *names: str, nodes: int = 1, deposed: str | None = None) -> Iterator[tuple[Any, ...]]:
    """A host, and connections of these."""
    listener = listen()
    record = Record(epoch=2, addresses=("127.0.0.1",), port=int(listener.getsockname()[1]), token="word", node="h:1:x")
    settings = Settings(lease=60.0)
    rules = settings.rules(min_nodes=nodes, max_nodes=nodes)
    host = Host(Epochs(LocalStorage(directory)), record, listener, rules, settings, deposed)
    connections = [Bare(host, name) for name in names]
    try:
        yield host, *connections
    finally:
        for connection in connections:
            connection.close()
        host.close()


@pytest.mark.parametrize(
    ("node", "said", "blamed"),
    [
        ("new:1:x", {"join": None, "nodes": None}, []),
        ("peer:1:x", {"join": 1, "nodes": 2}, [OLD]),
        (OLD, {"join": 0, "nodes": 2}, []),
        ("peer:1:x", {"join": 1, "nodes": 2, "left": True}, []),
    ],
    ids=["a newcomer cannot know", "a survivor", "it is there itself", "a survivor that has heard it leave"],
)
def test_who_says_that_the_host_before_was_lost(node: str, said: Message, blamed: list[str], tmp_path: Path) -> None:
    """It may be alive, with the only state in memory, and would be held the second time."""
    with hosting(tmp_path, node, deposed=OLD) as (_, one):
        one.say(**said)
        assert [name for name, *_ in one.hear()["losses"]] == blamed


def test_what_a_newer_version_says_is_passed_over(tmp_path: Path) -> None:
    with hosting(tmp_path, "a") as (_, one):
        one.say(mood="bad", degree=3)
        one.say(join=None, nodes=None)
        assert one.hear()["form"] == 1


@pytest.mark.parametrize(
    "said",
    [
        {"join": None},
        {"join": "first", "nodes": 2},
        {"join": 0, "nodes": float("inf")},
        {"join": 0, "nodes": 2, "losses": [["a", 1]]},
        {"failed": None, "how": "so"},
        {"failed": 1},
        {"round": 1, "get": ["a"]},
    ],
)
def test_whoever_sends_nonsense_is_dropped_and_nobody_else(said: Message, tmp_path: Path) -> None:
    with hosting(tmp_path, "a", "b", nodes=2) as (_, one, other):
        for each in (one, other):
            each.say(join=None, nodes=None)
        assert one.hear()["form"] == other.hear()["form"] == 1
        one.say(**said)
        assert one.hear() == {}
        assert other.hear()["break"] == 1
        assert other.hears_nothing_more()


def test_of_an_attempt_the_first_word_goes_to_all_and_another_one_is_answered_alone(tmp_path: Path) -> None:
    """Each node says how it saw the end: with N of them, N words to N nodes would be too many."""
    with hosting(tmp_path, "a", "b") as (_, one, other):
        one.say(failed=7, how="first")
        assert one.hear() == other.hear() == {"failed": 7, "how": "first"}
        other.say(failed=7, how="second")
        assert other.hear() == {"failed": 7, "how": "first"}
        assert one.hears_nothing_more()


def test_who_comes_late_is_told_of_the_newest_attempts(tmp_path: Path) -> None:
    """Also where they are heard of in another order. A job goes on for years."""
    with hosting(tmp_path, "a") as (host, one):
        for attempt in range(KEPT + 6, 0, -1):
            one.say(failed=attempt, how=str(attempt))
        newest = [one.hear()["failed"] for _ in range(KEPT)]
        assert one.hears_nothing_more()
        assert sorted(newest) == list(range(7, KEPT + 7))
        one.say(failed=KEPT + 7, how="the last")
        late = Bare(host, "b")
        assert late.welcome["known"] == [late.hear()["failed"] for _ in range(KEPT)] == list(range(8, KEPT + 8))
        late.close()


def test_the_first_word_on_the_end_of_the_job_stands(tmp_path: Path) -> None:
    """Also for the node that says the second, and for those that come."""
    with hosting(tmp_path, "a", "b") as (host, one, other):
        one.say(close="first")
        assert one.hear() == other.hear() == {"closed": "first"}
        other.say(close="second")
        assert other.hear() == {"closed": "first"}
        assert one.hears_nothing_more()
        late = Bare(host, "c")
        late.say(join=None, nodes=None)
        assert late.hear() == {"closed": "first"}
        late.close()


@pytest.mark.parametrize("lost", [False, True])
def test_its_last_word_says_whether_it_leaves_in_order(lost: bool, tmp_path: Path) -> None:
    with hosting(tmp_path, "a") as (host, one):
        host.close(lost=lost)
        assert one.hear()["lost"] is lost
        assert host._epochs.lost(2) is lost
