"""The rendezvous with real storage and sockets; nodes are threads, with short leases."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from elastic_runner.errors import StorageError
from elastic_runner.launch.rendezvous import member
from elastic_runner.launch.rendezvous.backoff import Loss, machine
from elastic_runner.launch.rendezvous.epochs import Epochs, Record
from elastic_runner.launch.rendezvous.handler import ElasticRendezvous, create_handler
from elastic_runner.launch.rendezvous.member import Place
from elastic_runner.launch.rendezvous.wire import Lines, encode
from elastic_runner.storage import LocalStorage
from tests.support.nodes import SHORT, Node, nodes, together
from tests.support.s3 import S3
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.name.startswith("rendez")])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return str(tmp_path)


def epochs(endpoint: str) -> Epochs:
    return Epochs(LocalStorage(Path(endpoint) / "job"))


def host_of(all_nodes: list[Node]) -> Node:
    (host,) = [node for node in all_nodes if node.hosts]
    return host


def test_three_nodes_become_a_world_at_once(endpoint: str) -> None:
    start = time.monotonic()
    with nodes(endpoint, 3, conf={"last_call": 60}):
        assert time.monotonic() - start < 10


def test_ranks_of_workers_follow_from_what_all_nodes_have(endpoint: str) -> None:
    two = Node(endpoint, nodes=(2, 2), workers=2)
    three = Node(endpoint, nodes=(2, 2), workers=3)
    together([two, three])
    assert {two.ranks[-1], three.ranks[-1]} == ({0, 2} if two.ranks[-1] == 0 else {0, 3})
    two.end()
    three.end()


def test_a_restart_is_heard_of_by_all_and_keeps_the_order(endpoint: str) -> None:
    with nodes(endpoint, 3) as all_nodes:
        before = [node.world for node in all_nodes]
        all_nodes[1].tell("restart")
        eventually(lambda: all(node.world and node.world.round == 2 for node in all_nodes))
        assert [node.world.rank for node in all_nodes if node.world] == [world.rank for world in before if world]


def test_a_node_that_leaves_and_one_that_comes(endpoint: str) -> None:
    with nodes(endpoint, 3) as all_nodes:
        gone = next(node for node in all_nodes if not node.hosts)
        gone.tell("leave")
        rest = [node for node in all_nodes if node is not gone]
        together(rest)
        new = Node(endpoint)
        together([*rest, new])
        assert new.world and new.world.rank == 2
        new.end()


def test_a_killed_node_is_noticed_at_once(endpoint: str) -> None:
    with nodes(endpoint, 3, conf={"lease": 60}) as all_nodes:
        gone = next(node for node in all_nodes if not node.hosts)
        gone.die()
        together([node for node in all_nodes if node is not gone], seconds=10)


def test_a_silent_node_is_noticed_after_its_lease(endpoint: str) -> None:
    with nodes(endpoint, 2) as all_nodes:
        record, _ = epochs(endpoint).newest()
        assert record is not None
        with socket.create_connection(("127.0.0.1", record.port)) as silent:
            silent.sendall(encode({"hello": record.token, "node": "silent"}))
            silent.sendall(encode({"join": None, "nodes": None}))
            lines, formed = Lines(), False
            while not formed:
                formed = any("form" in message for message in lines.feed(silent.recv(1 << 16)))
            eventually(
                lambda: all(node.worlds[-1].size == 3 for node in all_nodes) or all_nodes[0].worlds[-1].size == 2
            )
            together(all_nodes)
            silent.settimeout(10)
            while silent.recv(1 << 16):  # the host hangs up, so that it learns of it
                pass


def test_a_spare_waits_and_steps_in(endpoint: str) -> None:
    """Case c13: it closes nothing, and has no deadline."""
    with nodes(endpoint, 2, nodes=(2, 2)) as all_nodes:
        spare = Node(endpoint, nodes=(2, 2), conf={"join_timeout": 1.0})
        eventually(lambda: spare.handler._member is not None and spare.handler._member._spare)
        assert len(all_nodes[0].worlds) == len(all_nodes[1].worlds) == 1
        time.sleep(1.2)  # past its join_timeout, which is not for spares
        gone = next(node for node in all_nodes if not node.hosts)
        gone.tell("leave")
        together([next(node for node in all_nodes if node is not gone), spare])
        spare.end()


@pytest.mark.parametrize("how", ["die", "leave"])
def test_the_host_goes_and_another_one_takes_over(how: str, endpoint: str) -> None:
    with nodes(endpoint, 3) as all_nodes:
        host = host_of(all_nodes)
        rest = [node for node in all_nodes if node is not host]
        order = sorted(rest, key=lambda node: node.worlds[-1].rank)
        host.die() if how == "die" else host.tell("leave")
        together(rest)
        assert [node.worlds[-1].rank for node in order] == [0, 1]
        newest, ended = epochs(endpoint).newest()
        assert newest is not None and (newest.epoch, ended) == (2, False)
        assert epochs(endpoint).lost(1) == (how == "die")


def test_a_host_that_leaves_in_order_is_not_blamed_though_the_storage_is_slow_to_say_so(endpoint: str) -> None:
    """Its peers have heard it."""
    with nodes(endpoint, 3) as all_nodes:
        host = host_of(all_nodes)
        assert host.handler._host is not None
        host.handler._host._epochs.end = lambda *_args, **_more: None  # type: ignore[method-assign]
        host.tell("leave")
        rest = [node for node in all_nodes if node is not host]
        together(rest)
        assert epochs(endpoint).lost(1)
        assert [node.handler._place.losses for node in rest if node.handler._place] == [{}, {}]


def test_all_nodes_know_how_attempts_have_ended_also_when_the_host_is_lost(endpoint: str) -> None:
    """Case c01: a budget is the job's. Of each attempt the first word counts, and whoever comes late hears of it."""
    with nodes(endpoint, 3) as all_nodes:
        host = host_of(all_nodes)
        rest = [node for node in all_nodes if node is not host]
        attempt = rest[0].handler.attempt
        assert rest[0].handler.failures("first") == ["first"]
        eventually(lambda: all(node.handler._member.failures == {attempt: "first"} for node in all_nodes))  # type: ignore[union-attr]
        assert host.handler.failures("another word") == ["first"]
        host.die()
        together(rest)
        assert rest[1].handler.failures("second") == ["first", "second"]
        late = Node(endpoint)
        together([*rest, late])
        assert late.handler.failures("third") == ["first", "second", "third"]
        late.end()


def test_nodes_that_speak_at_once_come_to_the_same_word(endpoint: str) -> None:
    with nodes(endpoint, 2) as all_nodes:
        for word in ("a", "b"):
            for number, node in enumerate(all_nodes):
                node.handler._member.tell_failure(ord(word), f"{word} by {number}")  # type: ignore[union-attr]
        # The answer to what was said last comes last.
        for node in all_nodes:
            node.handler._member.tell_failure(0, "the end")  # type: ignore[union-attr]
        one, other = (node.handler._member for node in all_nodes)
        assert one is not None and other is not None
        eventually(lambda: one.failures == other.failures and set(one.failures) == {0, ord("a"), ord("b")})


def lose(node: Node, how: str) -> None:
    node.die() if how == "die" else node.tell(how)


def test_a_node_that_keeps_dying_waits_and_disturbs_nobody(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """Case c01: it comes back at once after an accident; after the next one in a row it waits as a spare does."""
    conf = {"backoff": 3.0}
    with nodes(endpoint, 2, conf=conf) as steady:
        for _ in range(2):
            flaky = Node(endpoint, conf=conf, machine="flaky")
            together([*steady, flaky])
            lost = time.monotonic()
            flaky.die()
            together(steady)
        before = [len(node.worlds) for node in steady]
        flaky = Node(endpoint, conf=conf, machine="flaky")
        together([*steady, flaky])
        assert time.monotonic() - lost >= 3.0
        assert [len(node.worlds) for node in steady] == [count + 1 for count in before]
        for says in (f"{flaky.handler.node} was lost 2 times in a row", "this node was lost 2 times in a row"):
            assert caplog.text.count(says) == 1
        flaky.end()


def test_a_node_without_which_there_is_no_world_never_waits(endpoint: str) -> None:
    all_nodes = [Node(endpoint, nodes=(3, 3), conf={"backoff": 600.0}, machine=name) for name in "abc"]
    together(all_nodes)
    for _ in range(3):
        flaky = next(node for node in all_nodes if node.handler.node.startswith("c"))
        flaky.die()
        all_nodes.remove(flaky)
        all_nodes.append(Node(endpoint, nodes=(3, 3), conf={"backoff": 600.0}, machine="c"))
        together(all_nodes)
    for node in all_nodes:
        node.end()


@pytest.mark.parametrize("how", ["die", "unhealthy"])
def test_the_next_hosts_know_a_node_that_keeps_being_lost(how: str, endpoint: str) -> None:
    """Were it a host itself."""
    conf = {"backoff": 600.0}
    flaky = Node(endpoint, conf=conf, machine="flaky")
    eventually(lambda: flaky.hosts)
    steady = {name: Node(endpoint, conf=conf, machine=name) for name in "ab"}
    for _ in range(2):
        together([flaky, *steady.values()])
        lose(flaky, how)
        together([*steady.values()])
        flaky = Node(endpoint, conf=conf, machine="flaky")
    eventually(lambda: flaky.handler._member is not None and flaky.handler._member._held_until)
    host = next(name for name, node in steady.items() if node.hosts)
    lose(steady.pop(host), how)
    together([*steady.values()])
    eventually(lambda: flaky.handler._member is not None and flaky.handler._member.epoch == 3)
    steady[host] = Node(endpoint, conf=conf, machine=host)
    together([*steady.values()])
    assert flaky.handler._member is not None and flaky.handler._member._held_until and not flaky.worlds
    for node in (flaky, *steady.values()):
        node.end()


@pytest.mark.parametrize(("times", "waits"), [(1, False), (2, True)])
def test_a_node_that_keeps_being_lost_lets_others_host(times: int, waits: bool, endpoint: str) -> None:
    handler = create_handler(RendezvousParameters("elastic", endpoint, "job", 1, 3, local_addr="127.0.0.1", **SHORT))
    assert isinstance(handler, ElasticRendezvous)
    now = time.monotonic()
    losses = {machine(handler.node): Loss(times=times, until=now, node=handler.node)}
    handler._place = Place(round=1, rank=0, nodes=3, port=1, losses=losses)
    handler._leave_epoch()
    assert (handler._not_before > now) is waits
    handler.shutdown()


def test_a_host_that_is_replaced_gives_way_and_joins(endpoint: str) -> None:
    with nodes(endpoint, 2, nodes=(1, 2)) as all_nodes:
        host_of(all_nodes)
        stale = Record(epoch=2, addresses=("127.0.0.1",), port=1, token="x")
        assert epochs(endpoint).open(stale)  # its host dies right away
        eventually(lambda: all(node.handler._member and node.handler._member.epoch == 3 for node in all_nodes))
        together(all_nodes)


def test_a_host_that_says_nothing_more_is_replaced(endpoint: str) -> None:
    """It listens, knows its word, and then falls silent, as a frozen one does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        record = Record(epoch=1, addresses=("127.0.0.1",), port=listener.getsockname()[1], token="word")
        assert epochs(endpoint).open(record)
        node = Node(endpoint)
        connection, _ = listener.accept()
        assert Lines().feed(connection.recv(1 << 16))[0]["hello"] == "word"
        connection.sendall(encode({"welcome": 1}))
        together([node])
        assert node.handler._member is not None and node.handler._member.epoch == 2
        connection.close()
        node.end()


def test_whoever_else_listens_at_a_dead_hosts_port_is_no_host(endpoint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        record = Record(epoch=1, addresses=("127.0.0.1",), port=listener.getsockname()[1], token="word")
        assert epochs(endpoint).open(record)
        stop = threading.Event()

        def answer() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.sendall(b"SSH-2.0-something\n")
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        node = Node(endpoint)
        together([node])
        node.end()
        stop.set()
        thread.join()


def test_strangers_and_their_noise_do_not_disturb_a_host(endpoint: str) -> None:
    with nodes(endpoint, 2) as all_nodes:
        record, _ = epochs(endpoint).newest()
        assert record is not None
        for noise in (b"GET / HTTP/1.0\r\n\r\n", b'{"hello": "wrong", "node": "x"}\n', b"[]\n", b"\xff\n", b"{}\n"):
            with socket.create_connection(("127.0.0.1", record.port)) as stranger:
                stranger.sendall(noise)
                stranger.settimeout(10)
                assert stranger.recv(100) == b""
        all_nodes[0].tell("restart")
        eventually(lambda: all(node.worlds[-1].round == 2 for node in all_nodes))


def test_a_job_that_failed_is_over_for_all(endpoint: str) -> None:
    with nodes(endpoint, 3) as all_nodes:
        all_nodes[0].tell("fail")
        eventually(lambda: all(node.ended for node in all_nodes))
        assert all(isinstance(node.error, RendezvousClosedError) for node in all_nodes[1:])


def test_a_job_that_is_done_is_over_for_spares(endpoint: str) -> None:
    with nodes(endpoint, 2, nodes=(2, 2)) as all_nodes:
        spare = Node(endpoint, nodes=(2, 2))
        eventually(lambda: spare.handler._member is not None and spare.handler._member._spare)
        for node in all_nodes:
            node.tell("done")
        eventually(lambda: all(node.ended for node in [*all_nodes, spare]))
        assert isinstance(spare.error, SystemExit) and spare.error.code == 0
        assert [node.error for node in all_nodes] == [None, None]


def test_without_enough_nodes_there_is_an_end_and_a_word(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c13: an early one waits, and says for how many."""
    monkeypatch.setattr(member, "_FIRST_WORD", 0.5)
    node = Node(endpoint, nodes=(2, 3), conf={"join_timeout": 1.5})
    eventually(lambda: node.ended)
    assert isinstance(node.error, RendezvousTimeoutError)
    assert "2 or more must start" in str(node.error)
    assert "waiting for more nodes: 1 of 2 are here" in caplog.text


def test_waits_on_a_node_that_is_lost_end_with_the_round(endpoint: str) -> None:
    """torch's agent would end the job if its store raised."""
    first = Node(endpoint, nodes=(2, 2), workers=2)
    eventually(lambda: first.hosts)
    record, _ = epochs(endpoint).newest()
    assert record is not None
    with socket.create_connection(("127.0.0.1", record.port)) as other:
        other.sendall(encode({"hello": record.token, "node": "other"}))
        other.sendall(encode({"join": None, "nodes": None}))
        lines, formed = Lines(), False
        while not formed:
            formed = any("form" in message for message in lines.feed(other.recv(1 << 16)))
    eventually(lambda: first.worlds)  # with ranks made up
    assert first.error is None
    new = Node(endpoint, nodes=(2, 2), workers=2)
    together([first, new])
    assert {first.ranks[-1], new.ranks[-1]} == {0, 2}
    first.end()
    new.end()


class Trouble:
    """A storage that can fail for a while."""

    def __init__(self, inner: LocalStorage) -> None:
        self.on = False
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        if self.on and name in ("put", "read", "list", "create"):
            raise StorageError("out of order")
        return getattr(self._inner, name)


def test_trouble_with_the_storage_stops_no_world(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(LocalStorage(Path(endpoint) / "job"))
    monkeypatch.setattr("elastic_runner.launch.rendezvous.handler.open_storage", lambda *_, **__: trouble)
    with nodes(endpoint, 2) as all_nodes:
        trouble.on = True
        eventually(lambda: "cannot give a sign of life" in caplog.text)
        all_nodes[0].tell("restart")
        eventually(lambda: all(node.worlds[-1].round == 2 for node in all_nodes))
        new = Node(endpoint)  # it cannot find the others yet
        eventually(lambda: "trouble with" in caplog.text)
        trouble.on = False
        together([*all_nodes, new])
        assert caplog.text.count("cannot give a sign of life") == 1
        new.end()


@pytest.mark.s3
def test_an_endpoint_on_s3(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    conf = {f"storage.{name}": value for name, value in s3.options.items() if name.startswith("client_kwargs")}
    with nodes(s3.url, 3, conf=conf) as all_nodes:
        host = host_of(all_nodes)
        host.die()
        together([node for node in all_nodes if node is not host])


def test_old_epochs_are_cleared_away(endpoint: str) -> None:
    for number in range(1, 21):
        assert epochs(endpoint).open(Record(epoch=number, addresses=("127.0.0.1",), port=1, token="x"))
        epochs(endpoint).end(number, "over", lost=False, closed=None)
    node = Node(endpoint)
    together([node])
    eventually(lambda: len([p for p in (Path(endpoint) / "job").iterdir() if p.suffix == ".json"]) == 8)
    node.end()


def test_a_node_comes_back_under_its_own_name_before_its_old_connection_ends(endpoint: str) -> None:
    with nodes(endpoint, 2) as all_nodes:
        node = next(node for node in all_nodes if not node.hosts)
        record, _ = epochs(endpoint).newest()
        assert record is not None
        with socket.create_connection(("127.0.0.1", record.port)) as again:
            again.sendall(encode({"hello": record.token, "node": node.handler.node}))
            eventually(lambda: len(node.worlds) > 1)
        together(all_nodes)
        host = host_of(all_nodes).handler._host
        assert host is not None
        assert [loss.times for loss in host._state.losses.values()] == [1], "that it was lost counts"


def test_settings_of_short_tests_are_valid() -> None:
    parameters = RendezvousParameters("elastic", "/tmp/h6_none", "job", 1, 1, local_addr="127.0.0.1", **SHORT)
    handler = create_handler(parameters)
    handler.shutdown()
    assert replace(Record(epoch=1, addresses=(), port=0, token="x"), epoch=2).epoch == 2
