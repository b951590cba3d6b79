"""Which records led to a state: attempts form a tree, of which the newest one is not always a continuation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.data.ledger import Record
from elastic_runner.data.lineage import OUTSIDE, Lineage, Origin, effective, from_outside
from elastic_runner.train.lines import missing
from elastic_runner.train.replay import done_beyond
from tests.support.simulated_run import encoded
from tests.unit.test_tally import FINE, counts, steps


def start(attempt: int, resumed_at: int, rests_on: int | None) -> Record:
    return {"event": "start", "attempt": attempt, "resumed_at": resumed_at, "rests_on": rests_on}


def did(attempt: int, first: int, last: int) -> list[Record]:
    return [{"event": "step", "attempt": attempt, "step": step} for step in range(first, last + 1)]


def whose(records: list[Record], origin: Origin | None = None) -> tuple[list[tuple[int, int]], int]:
    """Attempt and step of each step that led there, and how many did not."""
    kept, lost = effective(records, origin)
    return [(r["attempt"], r["step"]) for r in kept if r["event"] == "step"], lost


def course(*parts: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [(attempt, step) for attempt, first, last in parts for step in range(first, last + 1)]


PASSED_OVER = [start(1, 0, OUTSIDE), *did(1, 1, 23), start(2, 10, 1), *did(2, 11, 15)]
"""The checkpoint of step 20 could not be read when attempt 2 began, and can be again."""


def test_a_start_takes_up_what_the_attempt_before_it_had_passed_over() -> None:
    records = [*PASSED_OVER, start(3, 20, 1), *did(3, 21, 22)]
    assert whose(records) == (course((1, 1, 20), (3, 21, 22)), 3 + 5)
    assert whose(PASSED_OVER, Origin(1, 20)) == (course((1, 1, 20)), 3 + 5)
    assert whose(PASSED_OVER, Origin(2, 15)) == (course((1, 1, 10), (2, 11, 15)), 13)
    assert [r["attempt"] for r in effective(records)[0] if r["event"] == "start"] == [1, 3]


def test_what_a_flush_saved_rests_on_what_it_found_in_memory() -> None:
    """Step 5 was not on record when attempt 1 was killed."""
    records = [start(1, 0, OUTSIDE), *did(1, 1, 4), *did(1, 5, 5), start(2, 5, 1), start(3, 5, 2), *did(3, 6, 7)]
    assert whose(records) == (course((1, 1, 5), (3, 6, 7)), 0)


@pytest.mark.parametrize("rests_on", [2, None])
def test_a_program_that_goes_back_to_its_own_checkpoint(rests_on: int | None) -> None:
    records = [start(1, 0, OUTSIDE), *did(1, 1, 5), start(2, 5, 1), *did(2, 6, 9), start(2, 7, rests_on)]
    assert whose(records) == (course((1, 1, 5), (2, 6, 7)), 2)
    assert whose([*records, *did(2, 8, 8), start(3, 8, 2)]) == (course((1, 1, 5), (2, 6, 8)), 2)
    assert whose([*records, *did(2, 8, 8), start(3, 9, 2)]) == (course((1, 1, 5), (2, 6, 9)), 1)


def test_a_line_that_is_there_twice_counts_once() -> None:
    """A flush and the next attempt have both found it in memory."""
    records = [start(1, 0, OUTSIDE), *did(1, 1, 4)]
    found = [*did(1, 5, 5), start(2, 5, 1), *did(1, 5, 5), start(3, 5, 1), *did(3, 6, 6)]
    assert whose([*records, *found]) == (course((1, 1, 5), (3, 6, 6)), 0)


def test_new_runs_and_imported_states_have_nothing_behind_them() -> None:
    anew = [*PASSED_OVER, start(3, 0, OUTSIDE), *did(3, 1, 2)]
    assert whose(anew) == (course((3, 1, 2)), 23 + 5)
    imported = [*PASSED_OVER, start(3, 30, OUTSIDE), *did(3, 31, 32)]
    assert whose(imported) == (course((3, 31, 32)), 23 + 5)
    assert [from_outside(r) for r in imported if r["event"] == "start"] == [False, False, True]


def test_what_is_not_on_record_is_taken_for_the_newest() -> None:
    """Lines are gone: it is for the audit to say that the record ends too early."""
    assert whose([*PASSED_OVER, start(4, 15, 3)]) == (course((1, 1, 10), (2, 11, 15)), 13)
    assert whose([*PASSED_OVER, *did(3, 16, 17), start(4, 17, 3)])[0][-3:] == course((2, 15, 15), (3, 16, 17))


def test_attempts_that_have_begun_since_it_was_read_are_left_out() -> None:
    more = [*PASSED_OVER, *did(2, 16, 16), start(3, 20, 1), *did(3, 21, 22)]
    placed = list(Lineage(PASSED_OVER).marked(more))
    assert [p.record["step"] for p in placed if p.led and p.record["event"] == "step"] == list(range(1, 17))
    assert {p.record["attempt"] for p in placed} == {1, 2}


def test_skips_are_for_good() -> None:
    skip = {"event": "skip", "attempt": 2, "epoch": 0, "first": 0, "last": 4, "step": 11, "reason": "bad"}
    assert skip in effective([*PASSED_OVER, skip, start(3, 20, 1)])[0]


# What steps done again are compared with.


def measure(records: list[Record], origin: Origin) -> dict[int, int]:
    """Whose line each step is compared with."""
    fed = [p.record for p in Lineage(records).marked(records, origin) if not p.other]
    return {step: done.line["attempt"] for step, done in done_beyond(fed, origin.step).items()}


def test_steps_of_an_attempt_that_had_diverged_are_no_measure_for_one_that_did_not_follow() -> None:
    """Attempt 2 came to something else in step 13 and went on; attempt 3 takes up what attempt 1 had at step 20."""
    diverged = {"event": "replay", "attempt": 2, "equal": 2, "agreed": 12, "stops": False}
    records = [*PASSED_OVER[:-3], diverged, *did(2, 13, 22), start(3, 14, 2), *did(3, 15, 30)]
    assert measure(records, Origin(1, 20)) == {21: 1, 22: 1, 23: 1}
    assert measure(records, Origin(2, 14)) == {n: 3 for n in range(15, 31)}
    assert measure(records, Origin(1, 10)) == {11: 2, 12: 2, 13: 2, 14: 2, **{n: 3 for n in range(15, 31)}}
    assert measure([*records[:-17], start(3, 12, 2), *did(3, 13, 30)], Origin(1, 20)) == {n: 3 for n in range(21, 31)}


# Ledgers that do not say what a start rests on.


def old_start(resumed_at: int) -> Record:
    return {"event": "start", "resumed_at": resumed_at}


def test_without_a_word_each_start_rests_on_the_newest_attempt() -> None:
    run = steps(10)
    evaluation = {"event": "evaluation", "step": 5, "metrics": {}}
    saved = {"event": "saved", "step": 5}
    records = [old_start(0), *run[:5], evaluation, saved, old_start(4), *run[4:8], old_start(6), *run[6:]]
    kept, lost = effective(records)
    assert lost == 1 + 2
    assert [record for record in kept if record["event"] == "step"] == run
    assert evaluation not in kept
    assert saved not in kept
    assert counts(kept) == FINE


def test_a_program_that_restores_by_itself_is_taken_to_go_on_from_the_newest_attempt() -> None:
    kept, lost = effective([old_start(0), *steps(7)], Origin(None, 5))
    assert ([record["step"] for record in kept if record["event"] == "step"], lost) == ([1, 2, 3, 4, 5], 2)
    assert whose([*PASSED_OVER, start(3, 12, None)]) == (course((1, 1, 10), (2, 11, 12)), 13 + 3)


def test_foreign_records_are_passed_on() -> None:
    records = [{"note": "by hand"}, old_start(0)]
    assert effective(records, Origin(None, 0)) == (records, 0)


@given(cuts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=6))
def test_any_history_of_kills_ends_in_the_undisturbed_run(cuts: list[tuple[int, int]]) -> None:
    """Each attempt does some steps; the next resumes some steps further back. Every sample is still used once, and a
    reader gets each step once, from the attempt that led to the result (case c67)."""
    run, records, at, done, lost = steps(100), [old_start(0)], 0, 0, 0
    for forward, back in [*cuts, (8, 0)]:
        records += run[at : at + forward]
        done, at = at + forward, max(0, at + forward - back)
        records.append(old_start(at))
        lost += done - at
    kept, counted = effective(records)
    assert counted == lost
    assert [record for record in kept if record["event"] == "step"] == run[:at]
    assert counts(kept) == FINE


# Any tree.


class Left(NamedTuple):
    """A state that outlived its attempt."""

    origin: Origin
    course: tuple[tuple[int, int], ...]
    """Attempt and step of all that led to it."""
    lines: bytes | None = None
    """What came with it, where it is in memory."""


@dataclass(frozen=True, kw_only=True)
class Life:
    passes_over: int
    """States newer than the one that it goes on from."""
    steps: list[bool]
    """Of each, whether it is saved."""
    in_memory: bool
    goes_back: int | None
    """Of its own checkpoints, the one that the program goes back to by itself before it goes on."""


@dataclass
class Tree:
    """A run by the book: what is on record, and whose steps each state really has behind it."""

    appends: bool
    """Whether lines outlive the process; else only with a save, or in memory."""
    records: list[Record] = field(default_factory=list)
    states: list[Left] = field(default_factory=lambda: [Left(Origin(OUTSIDE, 0), ())])
    course: tuple[tuple[int, int], ...] = ()

    def live(self, attempt: int, life: Life) -> None:
        state = self.states[max(0, len(self.states) - 1 - life.passes_over)]
        self.states = [one for one in self.states if one is state or one.lines is None]
        known = Lineage(self.records)
        assert state.origin.attempt is not None
        self.records += missing(state.lines or b"", known.reached(state.origin.attempt), state.origin.step)
        self._go_on(attempt, state, life.steps, life.in_memory)
        own = [one for one in self.states if one.origin.attempt == attempt and one.lines is None]
        if life.goes_back is not None and own:
            state = own[life.goes_back % len(own)]
            # It would have taken a newer one, had that been usable.
            newer = own[own.index(state) + 1 :]
            self.states = [one for one in self.states if one not in newer]
            self._go_on(attempt, state, life.steps, life.in_memory)

    def _go_on(self, attempt: int, state: Left, saves: list[bool], in_memory: bool) -> None:
        self.records.append(start(attempt, state.origin.step, state.origin.attempt))
        self.course, at = state.course, state.origin.step
        waiting: list[Record] = []
        recent: list[Record] = []
        for step, saved in enumerate(saves, at + 1):
            (line,) = did(attempt, step, step)
            (self.records if self.appends else waiting).append(line)
            recent.append(line)
            self.course = (*self.course, (attempt, step))
            if saved:
                self.records += waiting
                waiting, recent = [], []
                self.states.append(Left(Origin(attempt, step), self.course))
        if in_memory:
            lines = b"".join(map(encoded, recent))
            self.states.append(Left(Origin(attempt, at + len(saves)), self.course, lines))


LIVES = st.lists(
    st.builds(
        Life,
        passes_over=st.sampled_from([0, 0, 0, 1, 2, 5, 100]),
        steps=st.lists(st.booleans(), max_size=6),
        in_memory=st.booleans(),
        goes_back=st.none() | st.integers(0, 5),
    ),
    min_size=1,
    max_size=7,
)


@given(lives=LIVES, appends=st.booleans())
@settings(max_examples=400, deadline=None)
def test_of_any_tree_of_attempts_each_step_is_found_once_from_the_attempt_that_led_there(
    lives: list[Life], appends: bool
) -> None:
    """Case c67, with checkpoints passed over and taken up again, lines lost, and lines that came from memory."""
    tree = Tree(appends)
    for attempt, life in enumerate(lives, 1):
        tree.live(attempt, life)
        on_record = sum(r["event"] == "step" for r in tree.records)
        for state in tree.states:
            if state.lines is None:
                found, lost = whose(tree.records, state.origin)
                assert (tuple(found), lost) == (state.course, on_record - len(state.course))
    last = Life(passes_over=0, steps=[True], in_memory=False, goes_back=None)
    tree.live(len(lives) + 1, last)
    found, lost = whose(tree.records)
    assert tuple(found) == tree.course
    assert [step for _, step in found] == list(range(1, len(found) + 1))
    assert lost == sum(r["event"] == "step" for r in tree.records) - len(found)
