"""The host's decisions, with times given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.launch.rendezvous.backoff import Backoff
from elastic_runner.launch.rendezvous.membership import (
    Action,
    Alive,
    Break,
    Event,
    Finish,
    Form,
    Join,
    Leave,
    Membership,
    Resign,
    Rules,
    Tick,
    next_deadline,
    transition,
)
from tests.support.play import ONE, RULES, Play, formed, reasons, world


def test_the_first_round_begins_at_once_when_the_maximum_is_there() -> None:
    play = Play()
    assert play.join("a", "b") == []
    assert formed(play.join("c")) == [("a", "b", "c")]


def test_the_first_round_waits_a_last_call_for_more() -> None:
    play = Play()
    play.join("a")
    assert play.wait(20) == []  # one is too few; its wait does not count
    play.join("b")
    assert play.wait(4.5) == []
    assert formed(play.wait(0.5)) == [("a", "b")]


def test_the_last_call_begins_anew_when_the_minimum_is_lost() -> None:
    play = Play()
    play.join("a", "b")
    play.wait(4)
    play.leave("b")
    play.wait(2)
    play.join("c")
    assert formed(play.wait(4.5)) == []
    assert formed(play.wait(0.5)) == [("a", "c")]


def test_a_clock_that_reads_zero_is_a_clock() -> None:
    play = Play(rules=replace(RULES, lease=100))
    play.join("a", "b")
    play.now = 5.0
    assert formed(play.apply(Tick())) == [("a", "b")]


def test_a_member_that_comes_back_breaks_the_round_for_all() -> None:
    play = world("a", "b", "c")
    (broken,) = play.rejoin("b")
    assert isinstance(broken, Break)
    assert (broken.round, broken.nodes) == (1, ("a", "b", "c"))
    assert "b" in broken.reason


def test_the_next_round_begins_at_once_when_all_survivors_are_back_in_their_order() -> None:
    play = world("a", "b", "c")
    play.rejoin("c")
    assert play.rejoin("a") == []
    assert formed(play.rejoin("b")) == [("a", "b", "c")]
    assert play.state.round == 2


def test_a_lost_member_is_not_waited_for() -> None:
    play = world("a", "b", "c")
    play.mute = {"a"}
    assert reasons(play.wait(2.5)) == []
    assert reasons(play.wait(0.5)) == ["a gave no sign of life for 3 s"]
    play.rejoin("c")
    assert formed(play.rejoin("b")) == [("b", "c")]


def test_a_survivor_that_is_busy_is_waited_for_with_patience() -> None:
    play = world("a", "b", "c")
    play.rejoin("a", "b")
    assert formed(play.wait(59.5)) == []
    assert formed(play.wait(0.5)) == [("a", "b")]
    (broken,) = play.join("c", rank=2, of=3)  # late, it is a newcomer
    assert isinstance(broken, Break)
    play.rejoin("b")
    assert formed(play.rejoin("a")) == [("a", "b", "c")]


def test_a_busy_survivor_that_dies_meanwhile_is_not_waited_for() -> None:
    play = world("a", "b", "c")
    play.rejoin("a", "b")
    assert formed(play.leave("c")) == [("a", "b")]


def test_a_newcomer_is_taken_in_behind_the_others() -> None:
    play = world("b", "c")
    assert reasons(play.join("a")) == ["a joins"]
    play.rejoin("c")
    assert formed(play.rejoin("b")) == [("b", "c", "a")]


def test_two_newcomers_cost_one_restart_if_they_come_before_the_members_are_back() -> None:
    play = world("a", rules=ONE)
    assert reasons(play.join("b", "c")) == ["b joins"]
    assert formed(play.rejoin("a")) == [("a", "b", "c")]


def test_a_spare_waits_without_harm_and_steps_in() -> None:
    play = world("a", "b", "c")
    assert play.join("d") == []
    assert play.wait(1000) == []
    assert reasons(play.leave("b")) == ["b has left"]
    play.rejoin("c")
    assert formed(play.rejoin("a")) == [("a", "c", "d")]


def test_a_spare_that_goes_is_no_news() -> None:
    play = world("a", "b", "c")
    play.join("d", "e")
    assert play.leave("d") == []
    play.mute = {"e"}
    assert play.wait(10) == []
    assert play.state.waiting == {}


def test_order_is_kept_under_another_host() -> None:
    """Its first round is complete with all but one: the one that hosted."""
    play = Play()
    assert play.join("x", rank=2, of=3) == []
    assert formed(play.join("b", rank=1, of=3)) == [("b", "x")]


def test_under_another_host_a_survivor_that_does_not_come_is_waited_for_a_last_call() -> None:
    play = Play(ONE)
    play.join("x", rank=2, of=3)
    assert formed(play.wait(4.5)) == []
    assert formed(play.wait(0.5)) == [("x",)]


def test_survivors_come_before_newcomers_under_another_host() -> None:
    play = Play()
    play.join("new")
    assert formed(play.join("old", rank=1, of=3)) == [("old", "new")]


def test_leaving_with_the_work_done_breaks_nothing() -> None:
    play = world("a", "b", "c")
    assert play.leave("a", done=True) == []
    assert play.join("late") == []  # no newcomer in a world that is ending
    assert play.leave("c", done=True) == []
    assert play.wait(100) == []
    assert play.state.world == ("b",)


def test_spares_are_told_when_all_are_done_and_later_ones_are_not() -> None:
    play = world("a", "b", "c")
    play.join("spare")
    play.leave("a", done=True)
    play.leave("b", done=True)
    assert play.leave("c", done=True) == [Finish(spares=("spare",), stranded=())]
    assert play.join("of another start") == []
    assert play.wait(2) == []


def test_who_fails_after_the_others_are_done_goes_on_if_it_may_alone() -> None:
    play = world("a", "b", rules=ONE)
    play.leave("a", done=True)
    actions = play.rejoin("b")
    assert formed(actions) == [("b",)]


def test_who_fails_after_the_others_are_done_is_told_when_it_may_not_alone() -> None:
    play = world("a", "b")
    play.leave("a", done=True)
    actions = play.rejoin("b")
    assert actions[-1] == Finish(spares=(), stranded=("b",))


def test_a_spare_that_leaves_is_not_the_end_of_the_work() -> None:
    play = world("a", "b", "c")
    play.join("spare")
    play.leave("spare", done=True)
    assert not play.state.done


def test_a_host_that_loses_most_of_its_world_to_silence_gives_way() -> None:
    play = world("a", "b", "c")
    play.mute = {"b", "c"}
    actions = play.wait(3)
    assert [type(action) for action in actions] == [Break, Resign]


def test_most_of_the_world_may_be_lost_one_shortly_after_the_other() -> None:
    play = world("a", "b", "c")
    play.mute = {"b"}
    play.wait(1)
    play.mute = {"b", "c"}
    actions = play.wait(3)
    assert [type(action) for action in actions] == [Break, Resign]


def test_nodes_whose_connections_closed_are_gone_and_no_reason_to_give_way() -> None:
    play = world("a", "b", "c", rules=ONE)
    actions = play.lose("b", "c")
    assert [type(action) for action in actions] == [Break]
    assert formed(play.rejoin("a")) == [("a",)]


def test_of_two_nodes_the_host_goes_on_alone() -> None:
    play = world("a", "b", rules=replace(ONE, max_nodes=2))
    play.mute = {"b"}
    assert [type(action) for action in play.wait(3)] == [Break]
    assert formed(play.rejoin("a")) == [("a",)]


def test_silence_in_one_round_is_not_held_against_the_next() -> None:
    play = world("a", "b", "c", rules=ONE)
    play.mute = {"c"}
    play.wait(3)
    play.rejoin("a", "b")
    play.mute = {"b"}
    assert [type(action) for action in play.wait(3)] == [Break]


def test_below_the_minimum_nothing_begins() -> None:
    play = world("a", "b")
    play.leave("b")
    play.rejoin("a")
    assert formed(play.wait(1000)) == []
    assert formed(play.join("c")) == [("a", "c")]


def test_deadlines_are_those_at_which_something_changes() -> None:
    play = Play(ONE)
    assert next_deadline(play.state, ONE) is None
    play.join("a")
    assert next_deadline(play.state, ONE) == 3  # its lease
    play.wait(4)
    assert next_deadline(play.state, ONE) == 5  # the last call


def test_below_the_minimum_time_alone_changes_nothing() -> None:
    """The host's thread turned a thousand times a second once the survivors' time to come back was over."""
    play = world("a", "b")
    play.leave("b")
    play.rejoin("a")
    play.wait(61)
    assert next_deadline(play.state, RULES) == play.now + 3  # its lease


NODES = "abcdef"
MOVES = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(NODES)),
    st.tuples(st.just("leave"), st.sampled_from(NODES)),
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
    st.tuples(st.just("done"), st.sampled_from(NODES)),
    st.tuples(st.just("mute"), st.sampled_from(NODES)),
    st.tuples(st.just("unmute"), st.sampled_from(NODES)),
    st.tuples(st.just("wait"), st.sampled_from(["0.5", "1", "4", "70"])),
)


def check(before: Membership, after: Membership, actions: Sequence[Action], rules: Rules, now: float) -> None:
    """What holds at any time."""
    for action in actions:
        if isinstance(action, Form):
            assert rules.min_nodes <= len(action.nodes) <= rules.max_nodes
            assert len(set(action.nodes)) == len(action.nodes)
            assert action.round == before.round + 1 == after.round
            for node in action.nodes:
                assert node in before.waiting or node in after.seen
                assert now - after.seen[node] < rules.lease
                loss = None if node in before.world else before.losses.get(node)
                assert loss is None or loss.until <= now or len(action.nodes) == rules.min_nodes, "held, unless needed"
        elif isinstance(action, Break):
            assert before.running and action.round == before.round
            assert set(action.nodes) <= set(before.world)
            assert set(action.nodes) <= set(after.seen) | (set(before.seen) - set(after.seen))
    assert sum(isinstance(action, Form) for action in actions) <= 1
    assert set(after.world) <= set(after.seen)
    assert set(after.waiting) <= set(after.seen)
    assert len(after.world) <= after.size
    if after.running:
        assert not set(after.world) & set(after.waiting)
        if len(after.world) == after.size < rules.max_nodes:
            assert set(after.waiting) == set(after.held), "where there is room, nobody else waits"
    assert not set(after.held) & set(after.world)
    due = next_deadline(after, rules)
    assert due is None or due > now or any(isinstance(action, Resign) for action in actions)


@given(
    st.lists(MOVES, max_size=60),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=400, deadline=None)
def test_whatever_happens(moves: list[tuple[str, str]], least: int, more: int) -> None:
    rules = replace(RULES, min_nodes=least, max_nodes=least + more, backoff=Backoff(first=3, most=20))
    play = Play(rules)
    gone: set[str] = set()
    resigned = False

    def apply(event: Event) -> None:
        nonlocal resigned
        before = play.state
        actions = play.apply(event)
        check(before, play.state, actions, rules, play.now)
        told = {
            node
            for action in actions
            if isinstance(action, Break | Form)
            for node in action.nodes
        }  # fmt: skip
        assert not told & gone, "a node that has left hears nothing"
        resigned = resigned or any(isinstance(action, Resign) for action in actions)

    def pass_time(seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            play.now += 0.5
            apply(Alive(nodes=frozenset(play.state.seen) - play.mute))

    for kind, what in moves:
        if resigned:
            return
        if kind == "join":
            gone.discard(what)
            world = play.state.world
            apply(Join(node=what, rank=world.index(what) if what in world else None, nodes=play.state.size))
        elif kind in ("leave", "done", "lose"):
            gone.add(what)
            apply(Leave(node=what, done=kind == "done", lost=kind == "lose"))
        elif kind == "mute":
            play.mute.add(what)
        elif kind == "unmute":
            play.mute.discard(what)
        else:
            pass_time(float(what))
    pass_time(100)
    state = play.state
    live = set(state.waiting) - play.mute
    if not resigned and not state.running and set(state.world) <= set(state.waiting):
        assert len(live) < rules.min_nodes, "with enough that wait and time gone by, there is a round"


@pytest.mark.parametrize("seed", range(3))
def test_a_deadline_is_never_missed(seed: int) -> None:
    """Waiting exactly until next_deadline is enough: time in between changes nothing."""
    play = world("a", "b", "c")
    play.mute = {"abc"[seed]}
    due = next_deadline(play.state, RULES)
    assert due is not None
    between, actions = transition(play.state, Tick(), due - 0.001, RULES)
    assert (between, actions) == (play.state, [])
    assert transition(play.state, Tick(), due, RULES)[1] != []
