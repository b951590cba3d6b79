"""Random numbers keyed by what is computed, never by who computes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from elastic_runner.data.order import key_of


def seed_all(*parts: int | str) -> None:
    """Seed Python, NumPy and torch (all devices) from a key such as (seed, "compute", step, shard)."""
    key = key_of(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def seed_cpu(*parts: int | str) -> None:
    """``seed_all`` for what ``kept`` puts back: loading data must not touch an accelerator's generators."""
    key = key_of(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def kept() -> Iterator[None]:
    """Leave the CPU generators as they were found."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
