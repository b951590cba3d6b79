"""A node's part of the rendezvous; what the host says is played."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic_runner import verdict
from elastic_runner.launch.agent import Agent
from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.failures import KEPT
from elastic_runner.launch.rendezvous.handler import ElasticRendezvous, JobEnded, create_handler
from elastic_runner.launch.rendezvous.member import Closed, Member, Place, enter
from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import Message, encode
from elastic_runner.storage import LocalStorage
from elastic_runner.verdict import Verdict
from tests.support.handlers import kept_handlers
from tests.support.nodes import SHORT

RECORD = Record(epoch=1, addresses=("127.0.0.1",), port=1, token="word", node="host:1:x")
SETTINGS = Settings(lease=20.0)
FORM = {"form": 1, "rank": 0, "nodes": 1, "port": 1, "attempt": 1}
FIRST = Verdict(code=3, message="rank 1: ValueError: bad", final=True)


class Played:
    """A member whose host says what a test says; it has said ``first`` with its welcome."""

    def __init__(self, *first: Message, **welcome: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.connection = socket.create_connection(listener.getsockname())
            self._host, _ = listener.accept()
        self.say({"welcome": 1, **welcome}, *first)

    def member(self) -> Member:
        return Member(RECORD, "127.0.0.1", self.connection, "me:1:x", SETTINGS)

    def say(self, *messages: Message) -> None:
        self._host.sendall(b"".join(map(encode, messages)))

    def place(self, member: Member, last: Place | None = None) -> tuple[Message, Place]:
        """What it joins with, and what it takes ``FORM`` for."""
        with ThreadPoolExecutor(1) as pool, self._host.makefile("rb") as lines:
            place = pool.submit(member.join, last)
            said: Message = next(message for message in map(json.loads, lines) if "join" in message)
            self.say(FORM)
            return said, place.result(20)

    def close(self) -> None:
        self._host.close()


@pytest.fixture
def played() -> Iterator[Played]:
    played = Played()
    yield played
    played.close()


NONSENSE: list[Message] = [
    {"form": 1},
    {**FORM, "losses": [["a", 1]]},
    {**FORM, "losses": [["a", float("inf"), 1]]},
    {"hold": "long", "times": 1},
    {"alive": 1},
    {"answer": [], "values": []},
    {"break": "all", "reason": ""},
    {"failed": [], "how": ""},
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda message: next(iter(message)))
def test_a_host_that_sends_nonsense_is_none(nonsense: Message, played: Played) -> None:
    """Nobody would listen any more, and the node would wait for ever."""
    member = played.member()
    played.say(nonsense)
    over = member.wait_over(20)
    assert over is not None and "nonsense" in over
    member.close()


def test_nor_is_one_that_does_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Played(FORM)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: fine.connection)
    member, _ = enter(RECORD, "me:1:x", SETTINGS)
    assert member is not None
    member.close()
    fine.close()
    monkeypatch.undo()
    for played in (Played({"form": 1}), Played(known=1), Played(known=[[]])):
        monkeypatch.setattr(socket, "create_connection", lambda *_, connection=played.connection, **__: connection)
        assert enter(RECORD, "me:1:x", SETTINGS) == (None, False)
        played.close()
        monkeypatch.undo()


def test_an_older_host_tells_of_no_losses(played: Played) -> None:
    member = played.member()
    _, place = played.place(member)
    assert place.losses == {}
    member.close()


def test_why_the_job_is_over_is_told_to_people_in_words(played: Played) -> None:
    member = played.member()
    played.say({"closed": verdict.encode(FIRST)})
    assert member.wait_over(20) == FIRST.message
    with pytest.raises(Closed) as closed:
        member.join(None)
    assert verdict.decode(str(closed.value)) == FIRST
    assert str(JobEnded(str(closed.value))) == f"the job has ended: {FIRST.message}"
    assert str(JobEnded("somebody has ended it")) == "the job has ended: somebody has ended it"
    member.close()


def test_whoever_ends_the_job_hears_whose_word_stands(played: Played) -> None:
    member = played.member()
    played.say({"closed": "first"})
    assert member.end_job("second") == "first"
    member.close()


def test_or_goes_by_its_own_where_nobody_answers(played: Played) -> None:
    member = played.member()
    played.close()
    assert member.end_job("mine") == "mine"
    member.close()


@pytest.mark.parametrize(("more", "left"), [({"lost": False}, True), ({"lost": True}, False), ({}, False)])
def test_whether_a_host_leaves_in_order(more: Message, left: bool, played: Played) -> None:
    member = played.member()
    played.say({"end": "so", **more})
    assert member.wait_over(20) == "so"
    assert member.host_left is left
    member.close()


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[ElasticRendezvous]:
    handler = create_handler(RendezvousParameters("elastic", str(tmp_path), "job", 1, 3, local_addr="here", **SHORT))
    assert isinstance(handler, ElasticRendezvous)
    yield handler
    handler._member = None
    handler.shutdown()


@pytest.mark.parametrize(
    ("node", "lost", "blamed"),
    [("host:1:x", True, True), ("host:1:x", False, False), ("me", True, False), ("", True, False)],
    ids=["lost", "left in order", "lost its peers and opens the next one itself", "nobody knows who it was"],
)
def test_whether_a_former_host_is_blamed(
    node: str, lost: bool, blamed: bool, handler: ElasticRendezvous, tmp_path: Path
) -> None:
    """A host that outlives its peers has the only state in memory, and is not to be held the second time."""
    former = Record(epoch=1, node=handler.node if node == "me" else node, addresses=(), port=1, token="word")
    Epochs(LocalStorage(tmp_path / "job")).end(1, "so", lost=lost, closed=None)
    assert handler._deposed(former) == (node if blamed else None)
    assert handler._deposed(None) is None


@pytest.mark.parametrize("left", [False, True])
def test_the_next_host_is_told_that_the_former_one_has_left(
    left: bool, handler: ElasticRendezvous, played: Played
) -> None:
    handler._place = Place(round=1, rank=0, nodes=2, port=1)
    handler._member = MagicMock(Member, failures={}, host_left=left)
    handler._leave_epoch()
    member = played.member()
    said, place = played.place(member, handler._place)
    assert said["left"] is left
    assert not place.left, "that is another host's"
    member.close()


def test_a_new_host_is_told_of_the_newest_attempts_that_it_does_not_know(handler: ElasticRendezvous) -> None:
    """And whoever has been there knows them all: budgets may be larger."""
    handler._failures = {attempt: str(attempt) for attempt in range(1, KEPT + 11)}
    member = MagicMock(Member, epoch=2, known=frozenset(range(11, KEPT + 9)), failures={})
    member.join.side_effect = Closed("why")
    handler._enter = lambda end: member  # type: ignore[method-assign]
    with pytest.raises(JobEnded):
        handler.next_rendezvous()
    assert member.tell_failure.mock_calls == [call(KEPT + number, str(KEPT + number)) for number in (9, 10)]
    assert len(handler.failures("again")) == KEPT + 10


@pytest.mark.parametrize(("closed", "says"), [(None, 1), ("why", 0)])
def test_a_node_does_not_say_that_it_waits_for_a_job_that_is_over(
    closed: str | None, says: int, handler: ElasticRendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    handler._member = MagicMock(Member, over="why", closed=closed)
    handler._say_why()
    assert len(caplog.messages) == says


def test_an_agent_ends_with_the_word_that_stands() -> None:
    agent = object.__new__(Agent)
    agent._uploads, agent._plan = [], SimpleNamespace()  # type: ignore[assignment]
    for said, given in ((verdict.encode(FIRST), FIRST.message), ("somebody has ended it", "second")):
        agent._handler = MagicMock(ElasticRendezvous, end_job=MagicMock(return_value=said))
        with kept_handlers():
            assert agent._no_more(Verdict(code=1, message="second", final=True)).verdict.message == given
