"""How long a node that keeps being lost is left out."""

from __future__ import annotations

import json

import pytest

from elastic_runner.launch.rendezvous.backoff import Backoff, Loss, machine, pack, release, unpack

RULE = Backoff(first=30, most=1800)
NODE = "gpu-7:4711:3f2a1c"


def loss(node: str, times: int, until: float) -> Loss:
    return Loss(node=node, times=times, until=until)


@pytest.mark.parametrize(
    ("times", "seconds"), [(1, 0), (2, 30), (3, 60), (4, 120), (7, 960), (8, 1800), (9, 1800), (5000, 1800)]
)
def test_a_wait_doubles_with_each_loss_in_a_row(times: int, seconds: float) -> None:
    assert RULE.wait(times) == seconds


def test_a_machine_is_known_by_its_name_whatever_process_comes_from_it() -> None:
    losses = RULE.lose(RULE.lose({}, NODE, 100), "gpu-7:4712:000000", 200)
    assert losses == {"gpu-7": Loss(times=2, until=230, node="gpu-7:4712:000000")}


def test_what_lies_far_enough_back_is_forgotten() -> None:
    losses = RULE.lose(RULE.lose({}, "a", 0), "a", 100)
    assert RULE.lose(losses, "a", 130 + 1799)["a"].times == 3
    assert RULE.lose(losses, "a", 130 + 1800)["a"].times == 1
    assert RULE.lose(losses, "b", 130 + 1800).keys() == {"b"}


def test_a_first_wait_of_nothing_is_no_back_off() -> None:
    off = Backoff(first=0)
    assert off.lose(off.lose({}, "a", 0), "a", 0) == {}


def test_another_machine_is_told_what_is_left_of_a_wait() -> None:
    losses = {"a": Loss(times=3, until=1060.0, node="a:1:x"), "b": Loss(times=1, until=900.0, node="b:2:y")}
    told = {"a": Loss(times=3, until=65.0, node="a:1:x"), "b": Loss(times=1, until=-95.0, node="b:2:y")}
    assert unpack(json.loads(json.dumps(pack(losses, 1000.0))), 5.0) == told


@pytest.mark.parametrize("nonsense", [None, 1, "a", ["a"], [1], [["a", 1]], [["a", "x", 1]], [["a", 1, None]]])
def test_nonsense_is_none_of_it(nonsense: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        unpack(nonsense, 0.0)


def test_of_two_accounts_the_one_with_more_losses_counts_if_it_is_not_forgotten() -> None:
    one = {"a": loss("a", 3, 10), "b": loss("b", 1, 5)}
    other = {"a": loss("a", 2, 99), "b": loss("b", 2, 5), "c": loss("c", 1, 7), "d": loss("d", 9, -1800)}
    both = {"a": loss("a", 3, 10), "b": loss("b", 2, 5), "c": loss("c", 1, 7)}
    assert RULE.learn(one, other, 0) == both


def test_who_is_needed_waits_no_longer_and_is_not_forgiven() -> None:
    losses = {"a": loss("a", 3, 100), "b": loss("b", 3, 100)}
    assert release(losses, ["a"], 50) == {"a": loss("a", 3, 50), "b": loss("b", 3, 100)}


def test_who_is_unsteady() -> None:
    once = RULE.lose({}, NODE, 0)
    twice = RULE.lose(once, NODE, 0)
    assert [RULE.unsteady(each, NODE, 0) for each in ({}, once, twice)] == [False, False, True]
    assert not RULE.unsteady(twice, NODE, 30 + 1800)


def test_names_of_other_forms_are_machines() -> None:
    assert [machine(name) for name in (NODE, "a", "node-7")] == ["gpu-7", "a", "node-7"]
