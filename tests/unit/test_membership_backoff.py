"""Nodes that are lost again and again: who is held, for how long, and who is taken in all the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.launch.rendezvous.backoff import Backoff, Losses, pack, unpack
from elastic_runner.launch.rendezvous.membership import Action, Alive, Break, Hold, Join, Membership, next_deadline
from tests.support.play import ONE, RULES, Play, formed, reasons, world


def lost_twice(play: Play, node: str) -> None:
    """The other nodes are the world then; the wait has begun."""
    for _ in range(2):
        if node not in play.state.world:
            play.join(node)
            play.rejoin(*play.state.world)
        assert node in play.state.world
        play.lose(node)
        play.rejoin(*play.state.world)


def holds(actions: list[Action]) -> list[tuple[str, float, int]]:
    return [(each.node, each.seconds, each.times) for each in actions if isinstance(each, Hold)]


def test_who_is_lost_once_comes_back_at_once() -> None:
    """A cut that was healed."""
    play = world("a", "b", "c")
    play.lose("c")
    play.rejoin("a", "b")
    actions = play.join("c", rank=2, of=3)
    assert (reasons(actions), holds(actions)) == (["c joins"], [])


def test_who_is_lost_again_waits_as_a_spare_does_and_steps_in() -> None:
    """Case c01: the job restarted without end when a node left and came back quickly."""
    play = world("a", "b", "c")
    lost_twice(play, "c")
    assert play.state.running
    assert play.join("c") == [Hold(node="c", seconds=30.0, times=2)]
    assert next_deadline(play.state, replace(RULES, lease=1000)) == play.now + 30
    assert play.wait(29.5) == []
    assert reasons(play.wait(0.5)) == ["c joins"]
    play.rejoin("b")
    assert formed(play.rejoin("a")) == [("a", "b", "c")]
    play.lose("c")
    play.rejoin("a", "b")
    play.wait(10)  # until its agent has started again
    assert play.join("c") == [Hold(node="c", seconds=50.0, times=3)]


def test_silence_is_held_against_a_node_like_a_closed_connection() -> None:
    play = world("a", "b", "c")
    for _ in range(2):
        play.mute = {"c"}
        play.wait(3)
        play.rejoin("a", "b")
        play.mute = set()
        actions = play.join("c")
        play.rejoin("a", "b")
    assert holds(actions) == [("c", 30.0, 2)]


def test_leaving_in_order_is_not() -> None:
    play = world("a", "b", "c")
    for _ in range(5):
        play.leave("c")
        play.rejoin("a", "b")
        assert reasons(play.join("c")) == ["c joins"]
        play.rejoin("a", "b")


def test_nor_is_what_happens_to_a_spare() -> None:
    play = world("a", "b", "c")
    for _ in range(5):
        assert play.join("d") == []
        assert play.lose("d") == []
    assert play.state.losses == {}


def test_whoever_waits_is_taken_in_at_once_where_the_minimum_is_lost() -> None:
    play = world("a", "b", "c")
    lost_twice(play, "c")
    play.join("c")
    assert formed(play.leave("b")) == []
    assert formed(play.rejoin("a")) == [("a", "c")]
    assert play.state.losses["c"].until == play.now  # nor does another host hold it
    play.rejoin("c")
    assert formed(play.rejoin("a")) == [("a", "c")]
    play.lose("c")
    play.rejoin("a")
    assert formed(play.join("c")) == [("a", "c")]  # its third loss; nothing is gained by waiting


def test_no_more_are_taken_in_early_than_are_needed_and_they_come_last() -> None:
    play = world("a", "b", "c", "d", rules=replace(RULES, max_nodes=4))
    lost_twice(play, "b")
    lost_twice(play, "a")
    play.join("a", "b", rank=0)
    play.leave("d")
    assert formed(play.rejoin("c")) == [("c", "a")]


def test_a_survivor_that_is_busy_is_waited_for_before_anybody_is_needed() -> None:
    play = world("a", "b", "c")
    play.lose("c")
    play.rejoin("a", "b")
    play.join("c")
    play.rejoin("a", "b")
    play.lose("c")
    play.rejoin("a")
    assert holds(play.join("c")) == [("c", 30.0, 2)]
    assert formed(play.wait(20)) == []
    assert formed(play.lose("b")) == [("a", "c")]


def test_a_survivor_is_not_held_for_what_another_agent_on_its_machine_does() -> None:
    play = world("x:1:a", "x:2:b", "y:3:c", rules=ONE)
    play.lose("x:1:a")
    play.rejoin("x:2:b", "y:3:c")
    play.join("x:4:d")
    play.rejoin("x:2:b", "y:3:c")
    play.lose("x:4:d")
    play.rejoin("y:3:c")
    assert formed(play.rejoin("x:2:b")) == [("x:2:b", "y:3:c")]
    assert holds(play.join("x:5:e")) == [("x:5:e", 30.0, 2)]
    told = play.state.losses
    play = Play(ONE, now=play.now)
    assert holds(play.apply(Join(node="x:4:d", rank=2, nodes=3, losses=told))) == [("x:4:d", 30.0, 2)]
    play.join("x:2:b", rank=0, of=2)
    assert formed(play.join("y:3:c", rank=1, of=2)) == [("x:2:b", "y:3:c")]


def test_a_wait_that_ends_in_a_full_world_goes_on_as_a_spares() -> None:
    play = world("a", "b", "c")
    lost_twice(play, "c")
    play.join("c", "d")
    play.rejoin("a", "b")
    assert play.wait(60) == []
    play.leave("d")
    play.rejoin("a")
    assert formed(play.rejoin("b")) == [("a", "b", "c")]


def test_another_host_knows_and_waits_for_its_survivors_first() -> None:
    """Its clock says something else."""
    former = world("a", "b", "c")
    lost_twice(former, "c")
    told = pack(former.state.losses, former.now)  # with the latest round
    play = Play(now=5.0)
    play.join("c")  # started again, it comes first, and alone would make the minimum with the next one
    actions = play.apply(Join(node="a", rank=0, nodes=3, losses=unpack(told, play.now)))
    assert (formed(actions), holds(actions)) == ([], [("c", 30.0, 2)])
    assert formed(play.join("b", rank=1, of=3)) == [("a", "b")]
    assert reasons(play.wait(29.5)) == []
    assert reasons(play.wait(0.5)) == ["c joins"]


def test_another_host_takes_whom_it_has_if_no_survivor_comes() -> None:
    play = Play()
    play.join("c")
    play.apply(Join(node="a", rank=0, nodes=3, losses=unpack([("c", 2, 30.0)], play.now)))
    assert formed(play.wait(4.5)) == []
    assert formed(play.wait(0.5)) == [("a", "c")]


def test_a_world_of_fixed_size_needs_everybody_and_holds_nobody() -> None:
    """A last call would be waited for in vain, and people be told of a wait that is none."""
    play = Play(replace(RULES, min_nodes=2, max_nodes=2))
    play.apply(Join(node="a", rank=0, nodes=2, losses=unpack([("c", 2, 30.0)], play.now)))
    actions = play.join("c")
    assert (formed(actions), holds(actions)) == ([("a", "c")], [])


def test_a_host_learns_from_members_that_come_late_and_puts_nobody_out() -> None:
    """Whoever was lost before had time to make a world of its own."""
    play = world("c", rules=ONE)
    play.apply(Join(node="a", rank=0, nodes=2, losses=unpack([("c", 2, 30.0)], play.now)))
    assert formed(play.rejoin("c")) == [("a", "c")]
    play.lose("c")
    play.rejoin("a")
    assert holds(play.join("c")) == [("c", 60.0, 3)]


@dataclass
class Course:
    """Two steady nodes, which come back at once, and one of which anything may happen, under one host after another.

    Each host's clock begins anywhere; members keep what they were told with their latest round, by their own.
    """

    least: int
    now: float = 0.0
    offset: float = 0.0
    known: Losses = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """When the unsteady node was lost from a world."""

    def __post_init__(self) -> None:
        self.play = Play(replace(RULES, min_nodes=self.least, lease=1e9))
        self.do(*self.play.join("a", "b", "x"))

    def do(self, *actions: Action) -> None:
        """The members' part."""
        for action in actions:
            if formed([action]):
                host = self.now + self.offset
                self.known = unpack(pack(self.play.state.losses, host), self.now)
            elif isinstance(action, Break):
                members = [node for node in action.nodes if node != "x"]
                self.do(*self.play.rejoin(*members, *(["x"] if "x" in action.nodes else [])))

    def wait(self, seconds: float) -> None:
        """Time passes, from one deadline to the next."""
        end = self.now + seconds
        while (due := next_deadline(self.play.state, self.play.rules)) is not None and due - self.offset <= end:
            self.now = due - self.offset
            self.play.now = due
            self.do(*self.play.apply(Alive(nodes=frozenset())))
        self.now, self.play.now = end, end + self.offset

    def lose(self) -> None:
        if "x" in self.play.state.world:
            self.losses.append(self.now)
        self.do(*self.play.lose("x"))

    def come(self) -> None:
        if "x" not in self.play.state.seen:
            self.do(*self.play.join("x"))

    def change_host(self, offset: float) -> None:
        before = self.play.state
        self.offset = offset
        self.play.now = self.now + offset
        self.play.state = Membership()
        for node in (node for node in ("x", "a", "b") if node in before.seen):
            rank = before.world.index(node) if node in before.world else None
            losses = unpack(pack({} if rank is None else self.known, self.now), self.play.now)
            nodes = 0 if rank is None else before.size
            self.do(*self.play.apply(Join(node=node, rank=rank, nodes=nodes, losses=losses)))


def most_within(seconds: float, times: list[float]) -> int:
    return max((sum(begin <= time < begin + seconds for time in times) for begin in times), default=0)


def bound(seconds: float, rule: Backoff) -> int:
    """Losses from worlds, at most, in any time so long that is no longer than the longest wait."""
    return 2 + int(math.log2(1 + seconds / rule.first))


COURSE = st.one_of(
    st.tuples(st.sampled_from(["lose", "come", "leave"]), st.just(0.0)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 10.0, 30.0, 60.0, 100.0, 500.0, 1800.0])),
    st.tuples(st.just("host"), st.floats(-1e6, 1e6).map(round)),
)


@given(st.lists(COURSE, max_size=80), st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_whatever_a_node_does_it_breaks_few_worlds(moves: list[tuple[str, float]], least: int) -> None:
    """In no half hour is it lost from more than 2 + log2(1 + 1800/30) = 7 worlds; in 60 s from no more than 3."""
    course = Course(least)
    for kind, number in moves:
        if kind == "wait":
            course.wait(number)
        elif kind == "host":
            course.change_host(number)
        elif kind == "leave":
            course.do(*course.play.leave("x"))
        else:
            course.lose() if kind == "lose" else course.come()
    rule = RULES.backoff
    for seconds in (29.0, 60.0, 300.0, 1799.0):
        assert most_within(seconds, course.losses) <= bound(seconds, rule), course.losses


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "a new host each time"])
def test_a_node_that_is_always_back_and_always_lost_reaches_the_bound(hosts: bool) -> None:
    course = Course(2)
    while course.now < 3600:
        course.lose()
        course.come()
        if hosts:
            course.change_host(course.offset + 1000)
        course.wait(1)
    assert most_within(1799, course.losses) == bound(1800, RULES.backoff) == 7
    assert len(course.losses) == 8
