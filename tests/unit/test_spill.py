"""Which spilled checkpoint is brought back, and by whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.checkpoint.manifest import Manifest
from elastic_runner.checkpoint.spill import Held, newest_whole
from elastic_runner.storage import Written
from tests.support.committed import manifest

FILES = ("data-000001/a", "data-000001/b", "data-000001/c")


def of(step: int, attempt: int = 1) -> Manifest:
    return manifest(step, attempt, files=tuple(Written(path=path, size=1, digest="") for path in FILES))


def held(*there: tuple[Manifest, str]) -> Held:
    """What one rank sees: the files of a manifest by their last letters."""
    return {m.path: (m, frozenset(path for path in FILES if path[-1] in letters)) for m, letters in there}


def test_nothing_is_nothing() -> None:
    assert newest_whole([{}, {}], 0) is None


def test_files_may_come_from_several_nodes_each_from_one() -> None:
    made = of(5)
    found = newest_whole([held((made, "a")), held((made, "ab")), held((made, "bc"))], 4)
    assert found == (made, {FILES[0]: 0, FILES[1]: 1, FILES[2]: 2})


def test_the_newest_that_is_whole() -> None:
    whole, torn, old = of(5), of(6), of(4)
    ranks = [held((whole, "ab"), (torn, "ab"), (old, "abc")), held((whole, "c"), (torn, ""))]
    found = newest_whole(ranks, 0)
    assert found is not None and found[0] == whole


def test_of_one_step_the_latest_attempt() -> None:
    found = newest_whole([held((of(5, 2), "abc"), (of(5, 10), "abc"))], 0)
    assert found is not None and found[0].attempt == 10


def test_what_is_committed_already_is_left() -> None:
    for committed in (5, 6):
        assert newest_whole([held((of(5), "abc"), (of(4), "abc"))], committed) is None


def test_nothing_whole_is_nothing() -> None:
    assert newest_whole([held((of(5), "ab")), held((of(6), "c"))], 0) is None


@given(
    there=st.lists(st.dictionaries(st.integers(1, 4), st.text("abc", max_size=3), max_size=4), min_size=1, max_size=4),
    committed=st.integers(0, 4),
)
def test_any_distribution(there: list[dict[int, str]], committed: int) -> None:
    ranks = [held(*((of(step), letters) for step, letters in each.items())) for each in there]
    whole = [step for step in range(committed + 1, 5) if set("abc") <= set("".join(d.get(step, "") for d in there))]
    found = newest_whole(ranks, committed)
    assert (found[0].step if found else None) == max(whole, default=None)
    for path, rank in (found[1] if found else {}).items():
        assert found is not None and path in ranks[rank][found[0].path][1]
