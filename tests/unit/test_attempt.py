"""What an agent makes of the end of an attempt: the cause is named first, not a victim (case c08)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from elastic_runner.errors import ExitCode
from elastic_runner.history import HANG, End
from elastic_runner.launch.attempt import Over, Seen, describe, end_of, last_word, time_to_save
from elastic_runner.launch.watchdog import Hang
from elastic_runner.verdict import RunPlace, Verdict

PLACE = RunPlace(url="runs/x", options={}, attempt=7, restored="step-0000000020/manifest-000006.json")


def seen(codes: dict[int, int], steps: dict[int, int] | None = None, place: RunPlace | None = PLACE) -> Seen:
    stands = {local: f"in phase step after step {step}" for local, step in (steps or {}).items()}
    ranks = {0: 4, 1: 5, 2: 6}
    return Seen(number=2, codes=codes, ranks=ranks, steps=steps or {}, stands=stands, host="node-3", place=place)


def said(**more: Any) -> Verdict:
    return Verdict(**{"code": 1, "message": "rank 4: ValueError: bad", "final": False, "kind": "ValueError", **more})


def test_a_killed_worker_comes_before_the_peers_that_noticed() -> None:
    victim = said(consequence=True, kind="PeerLost", rank=4, step=41)
    over, known = Over(cause="workers", verdict=victim), seen({0: 1, 1: -9}, {0: 41, 1: 41})
    end = end_of(over, known)
    message = "rank 5 on node-3 was killed by SIGKILL in phase step after step 41"
    assert end == End(attempt=7, kind="SIGKILL", step=42, restored=PLACE.restored, rank=5, message=message)
    assert describe(over, end, known) == f"attempt 7 is over after step 41: {message} (then rank 4 exit code 1)"


def test_want_of_memory_is_named() -> None:
    known = replace(seen({1: -9}), out_of_memory=True)
    end = end_of(Over(cause="workers"), known)
    assert end is not None and end.message == (
        "rank 5 on node-3 was killed by SIGKILL: the kernel has killed for want of memory"
    )


def test_an_error_of_its_own_comes_before_a_signal() -> None:
    own = said(rank=4, step=41)
    end = end_of(Over(cause="workers", verdict=own), seen({1: -9, 0: 1}))
    assert end is not None and (end.kind, end.step, end.rank) == ("ValueError", 42, 4)


def test_where_all_have_lost_a_peer_that_is_what_is_known() -> None:
    end = end_of(Over(cause="workers", verdict=said(consequence=True, kind="PeerLost", rank=4)), seen({0: 1}))
    assert end is not None and (end.kind, end.step) == ("PeerLost", None)


def test_one_that_left_without_a_word_comes_before_the_peers_that_noticed() -> None:
    victim = said(consequence=True, kind="PeerLost", rank=4, step=41)
    end = end_of(Over(cause="workers", verdict=victim), seen({1: 11, 0: 1}, {0: 41, 1: 41}))
    assert end is not None and (end.kind, end.rank, end.step) == ("exit code 11", 5, 42)


@pytest.mark.parametrize("codes", [{1: 0, 0: 1}, {0: 1, 1: 0}], ids=["at once", "later"])
def test_one_that_left_as_if_all_were_well_comes_before_the_peers_that_noticed(codes: dict[int, int]) -> None:
    over = Over(cause="workers", verdict=said(consequence=True, kind="PeerLost", rank=4, step=41))
    known = seen(codes, {0: 41, 1: 41})
    end = end_of(over, known)
    message = "rank 5 on node-3 left with exit code 0 in phase step after step 41"
    assert end == End(attempt=7, kind="exit code 0", step=42, restored=PLACE.restored, rank=5, message=message)
    assert describe(over, end, known) == f"attempt 7 is over after step 41: {message} (then rank 4 exit code 1)"


@pytest.mark.parametrize(
    ("codes", "verdict", "kind"),
    [
        ({2: 0, 1: -9, 0: 1}, said(consequence=True, kind="PeerLost", rank=4), "SIGKILL"),
        ({2: 0, 0: 1}, said(rank=4), "ValueError"),
        ({2: 0, 0: 9}, None, "exit code 9"),
        ({0: 0, 1: 1}, said(consequence=True, kind="PeerLost", rank=4), "PeerLost"),
    ],
)
def test_one_that_left_with_0_is_not_blamed_for_what_another_one_has_said_or_done(
    codes: dict[int, int], verdict: Verdict | None, kind: str
) -> None:
    end = end_of(Over(cause="workers", verdict=verdict), seen(codes))
    assert end is not None and end.kind == kind


@pytest.mark.parametrize("place", [PLACE, None])
def test_a_program_that_says_nothing(place: RunPlace | None) -> None:
    end = end_of(Over(cause="workers"), seen({1: 9}, place=place))
    assert end is not None and (end.kind, end.step, end.attempt) == ("exit code 9", None, 7 if place else 2)
    assert end.message == "rank 5 on node-3 ended with exit code 9"


def test_a_hang_is_told_by_the_watchdog() -> None:
    hang = Hang(local_rank=1, rank=5, pid=9, attempt=7, phase="step", step=41, seconds=2.0, reason="rank 5 is stopped")
    end = end_of(Over(cause="hang", hang=hang, reason=hang.reason), seen({}, {0: 41, 1: 41}))
    assert end is not None and (end.kind, end.rank, end.step, end.learned_limit) == (HANG, 5, 42, False)
    doubtful = end_of(Over(cause="hang", hang=replace(hang, learned=True)), seen({}))
    assert doubtful is not None and doubtful.learned_limit


def test_a_program_that_fails_after_its_run_is_finished_has_failed() -> None:
    finished = Over(cause="workers", verdict=said(code=ExitCode.FINISHED, message="", final=True))
    word = last_word(finished, seen({0: 0, 1: 1}))
    assert word is not None and word.code == ExitCode.FAILED
    assert word.message == "rank 5 on node-3 ended with exit code 1 after the run was finished"
    assert last_word(finished, seen({0: 0, 1: -6})) == finished.verdict, "its work is done"
    assert last_word(Over(cause="workers", verdict=said()), seen({0: 1})) is None
    final = Over(cause="workers", verdict=said(code=3, final=True))
    assert last_word(final, seen({0: 3})) == final.verdict


def test_an_error_after_a_run_is_finished_is_told() -> None:
    over = Over(cause="workers", verdict=said(message="after the run was finished: rank 5: bad", final=True, rank=5))
    known = seen({1: 1, 0: 1}, {0: 60, 1: 60})
    assert last_word(over, known) == over.verdict
    assert describe(over, end_of(over, known), known) == (
        "attempt 7 is over after step 60: after the run was finished: rank 5: bad (then rank 4 exit code 1)"
    )


def test_nothing_is_said_to_follow_from_nothing() -> None:
    over, known = Over(cause="workers", verdict=said(code=0, message="", final=True)), seen({1: 5}, {1: 60})
    assert describe(over, end_of(over, known), known) == "attempt 7 is over after step 60: rank 5 exit code 5"


def test_whoever_has_said_it_is_not_named_again_as_what_followed() -> None:
    word = said(code=ExitCode.INTERRUPTED, message="rank 5: Interrupted: enough", final=True, rank=5)
    over, known = Over(cause="workers", verdict=word), seen({1: 75, 0: 1})
    assert end_of(over, known) is None
    assert describe(over, None, known) == "attempt 7 is over: rank 5: Interrupted: enough (then rank 4 exit code 1)"


@pytest.mark.parametrize("code", ExitCode)
def test_no_attempt_ends_without_a_cost_where_another_one_may_follow(code: ExitCode) -> None:
    """Else it would be started again for ever."""
    over, known = Over(cause="workers", verdict=said(code=code, rank=5, message="rank 5: bad")), seen({1: 75})
    end = end_of(over, known)
    assert end is not None and last_word(over, known) is None
    assert describe(over, end, known) == "attempt 7 is over: rank 5: bad"


@pytest.mark.parametrize(
    ("codes", "running", "seconds"),
    [
        ((), (41, 41), math.inf),
        ((0, 75), (41,), math.inf),
        ((-15,), (41, -1), 20),
        ((3, 0), (41,), 20),
        ((-15,), (-1, -1), 0),
        ((75,), (-1,), 0),
        ((0,), (-1,), math.inf),
        ((), (-1,), math.inf),
        ((-15,), (None,), math.inf),
        ((-15,), (-1, None), math.inf),
    ],
    ids=str,
)
def test_who_was_asked_to_stop_does_not_wait_for_peers_that_are_gone(
    codes: tuple[int, ...], running: tuple[int | None, ...], seconds: float
) -> None:
    """Not where there is nothing to save, nor for long; a program without er.Worker has all the time."""
    assert time_to_save(codes, running, 20) == seconds


@pytest.mark.parametrize(
    "over",
    [
        Over(cause="membership", reason="node b gave no sign of life for 3 s"),
        Over(cause="workers", verdict=said(code=ExitCode.INTERRUPTED, message="asked to stop (SIGTERM)", final=True)),
    ],
)
def test_what_is_no_failure_is_not_on_record_and_costs_nothing(over: Over) -> None:
    assert end_of(over, seen({0: 75})) is None
    assert (over.reason or "asked to stop") in describe(over, None, seen({0: 75}))
