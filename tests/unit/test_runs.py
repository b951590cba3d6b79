"""Runs of positions are what a set of positions would be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.data.runs import Run, Runs, total

RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda run: (run[0], sum(run))), max_size=12)


@given(added=RUNS, end=st.integers(0, 45))
def test_like_a_set(added: list[Run], end: int) -> None:
    runs, whole = Runs(), set[int]()
    for first, last in added:
        again = runs.add(first, last)
        assert {p for a, b in again for p in range(a, b)} == whole & set(range(first, last))
        assert total(again) == len(whole & set(range(first, last)))
        whole |= set(range(first, last))
    assert runs.end == max(whole, default=-1) + 1
    assert {p for a, b in runs.holes(end) for p in range(a, b)} == set(range(end)) - whole
    assert all(before[1] < after[0] for before, after in pairwise(runs._runs)), "they lie apart"
