"""The plan by which ranks of a node share reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.checkpoint.relay import schedule
from elastic_runner.worker.worker import Worker

Needs = list[tuple[str, dict[str, int]]]
needs_of_ranks = st.lists(
    st.tuples(st.sampled_from("ABC"), st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1))),
    min_size=1,
    max_size=6,
)


@given(needs=needs_of_ranks)
def test_each_file_is_read_once_on_each_node_that_needs_it(needs: Needs) -> None:
    plans = [schedule(rank, needs) for rank in range(len(needs))]
    for node in {node for node, _ in needs}:
        ranks = [rank for rank, (of, _) in enumerate(needs) if of == node]
        wanted = {name for rank in ranks for name in needs[rank][1]}
        if sum(len(needs[rank][1]) for rank in ranks) == len(wanted):  # nobody needs what another one does
            assert all(plans[rank].ranks == (rank,) for rank in ranks)
            assert all(plans[rank].files == (tuple(sorted(needs[rank][1])),) for rank in ranks)
            continue
        assert all(plans[rank].ranks == tuple(ranks) for rank in ranks)
        assert all(plans[rank].files == plans[ranks[0]].files for rank in ranks), "one plan for all of a node"
        read = [name for files in plans[ranks[0]].files for name in files]
        assert Counter(read) == Counter(wanted)
        lengths = [len(files) for files in plans[ranks[0]].files]
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= plans[ranks[0]].count


@given(needs=needs_of_ranks)
def test_all_nodes_go_the_same_number_of_rounds(needs: Needs) -> None:
    plans = [schedule(rank, needs) for rank in range(len(needs))]
    counts = {plan.count for plan in plans}
    assert len(counts) == 1
    assert counts == {max(len(files) for plan in plans for files in plan.files)}


@given(needs=needs_of_ranks, data=st.data())
def test_what_is_begun_stays_with_who_began_it(needs: Needs, data: st.DataObject) -> None:
    owners = data.draw(st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, len(needs) - 1)))
    begun = [tuple(name for name, owner in owners.items() if owner == rank) for rank in range(len(needs))]
    for rank in range(len(needs)):
        plan = schedule(rank, needs, begun)
        wanted = {name for r in plan.ranks for name in needs[r][1]}
        assert Counter(name for files in plan.files for name in files) == Counter(wanted)
        for reader, files in zip(plan.ranks, plan.files, strict=True):
            kept = tuple(name for name in begun[reader] if name in wanted)
            assert files[: len(kept)] == kept, "first what is coming in already"


def test_what_is_not_begun_goes_to_who_has_least_to_read() -> None:
    needs = [("A", dict.fromkeys("abcdef", 1))] * 2
    assert schedule(0, needs, [("f", "a"), ()]).files == (("f", "a", "d"), ("b", "c", "e"))


def test_nothing_to_read_takes_no_round() -> None:
    plan = schedule(1, [("A", {}), ("A", {})])
    assert (plan.ranks, plan.files, plan.count, plan.shared) == ((1,), ((),), 0, False)


def test_hosts_of_the_same_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process namespace has one number everywhere: another host's file handle could be taken for a peer's."""
    worker = object.__new__(Worker)
    here = worker.node
    assert here == object.__new__(Worker).node
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    assert worker.node != here
