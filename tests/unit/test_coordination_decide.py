"""One rank decides, each gets its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic_runner.coordination import Coordinator
from elastic_runner.errors import LoopError, StateError
from tests.unit.test_coordination import Unusual, fail, on_ranks, raised


def decided(c: Coordinator) -> Any:
    asked: list[list[int]] = []

    def action(values: list[int]) -> list[str]:
        asked.append(values)
        return [f"{value} of {sum(values)}" for value in values]

    return c.decide("d", c.rank + 1, action), asked


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_its_part_of_what_rank_0_made_of_all(world_size: int) -> None:
    total = world_size * (world_size + 1) // 2
    asked = [[list(range(1, world_size + 1))]] + [[]] * (world_size - 1)
    expected = [(f"{rank + 1} of {total}", asked[rank]) for rank in range(world_size)]
    assert on_ranks(world_size, decided) == expected


def test_without_a_group_it_is_a_call() -> None:
    assert decided(Coordinator()) == ("1 of 1", [[1]])
    with pytest.raises(StateError):
        Coordinator().decide("d", 1, lambda values: fail(StateError("sparse"))())


class Stubborn:
    """Cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


def errors(c: Coordinator) -> Any:
    def deciding(action: Callable[[list[Any]], Any], value: Any = None) -> tuple[str, str]:
        return raised(lambda: c.decide("layout", value, action))[:2]

    return (
        deciding(lambda values: fail(StateError("w is sparse"))()),
        deciding(lambda values: fail(Unusual(1, 2))()),
        deciding(lambda values: [Stubborn() if rank == 1 else rank for rank in range(c.world_size)]),
        deciding(lambda values: values, Stubborn() if c.rank == 1 else c.rank),
        deciding(lambda values: [0]),
        c.gather("still in step", c.rank),
        c.decide("and again", c.rank, lambda values: values),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_is_everybodys_and_nobody_is_left_waiting(world_size: int) -> None:
    for rank, found in enumerate(on_ranks(world_size, errors)):
        own, foreign, answer, question, too_few, after, again = found
        assert own[0] == StateError.__name__ and own[1].startswith("w is sparse")
        assert ("raised on rank 0" in own[1]) == (rank != 0)
        assert foreign[1].startswith("Unusual: 1 and 2") or foreign == (Unusual.__name__, "1 and 2")
        assert answer[0] == LoopError.__name__ and "a Stubborn cannot be sent" in answer[1]
        assert question[0] == LoopError.__name__ and "a Stubborn cannot be sent" in question[1]
        assert too_few[0] == LoopError.__name__ and f"1 parts for {world_size} ranks" in too_few[1]
        assert (after, again) == (list(range(world_size)), rank)
