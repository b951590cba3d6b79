"""What a user of the defaults may rely on when nodes come late, by a made-up clock, and ports."""

from __future__ import annotations

import socket

import pytest

from elastic_runner.launch.rendezvous.settings import Settings
from elastic_runner.launch.rendezvous.wire import listen
from tests.support.play import Play, formed


def test_by_default_nodes_may_come_minutes_apart_and_one_too_many_waits() -> None:
    """Case c13: after a common failure pods come back at different times, and a spare beyond the maximum with them."""
    play = Play(Settings().rules(min_nodes=3, max_nodes=3))
    actions = play.join("a")
    for node in ("b", "c"):
        assert formed(actions + play.wait(240)) == []
        actions = play.join(node)
    assert formed(actions) == [("a", "b", "c")]
    assert formed(play.join("d") + play.wait(240)) == [], "it waits, and nobody is disturbed"
    assert Settings().join_timeout >= 2 * 240, "which is how long the first one waited"


def test_a_port_is_chosen_by_the_process_that_binds_it() -> None:
    """Case c12: the stores of all rounds begin with such a socket, so nobody can take the port in between."""
    with listen() as first, listen() as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        assert ports[0] != ports[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", ports[0]))
