"""The digests of the random generators are of the state that they are in."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from elastic_runner.data.random import seed_all
from elastic_runner.train.generators import host_generators, model_generators

CHANGES: dict[str, Callable[[], object]] = {
    "python drew": random.random,
    "python was seeded": lambda: random.seed(5),
    "numpy drew": np.random.rand,
    "numpy was seeded": lambda: np.random.seed(5),
    "torch drew": lambda: torch.rand(1),
    "torch was seeded": lambda: torch.manual_seed(5),
}
CPU = torch.device("cpu")


def both() -> tuple[int, int]:
    return host_generators(), model_generators(CPU)


@pytest.mark.parametrize("what", CHANGES)
def test_a_number_drawn_and_another_seed_show_until_the_seed_is_set_again(what: str) -> None:
    seed_all(1, "step", 2)
    before = both()
    assert both() == before, "looking changes nothing"
    CHANGES[what]()
    after = both()
    assert after[0] != before[0] and (after[1] != before[1]) == what.startswith("torch")
    seed_all(1, "step", 2)
    assert both() == before
    seed_all(1, "step", 3)
    assert both()[0] != before[0] and both()[1] != before[1]


def test_a_float64_carries_them() -> None:
    assert all(int(float(digest)) == digest for digest in both())
