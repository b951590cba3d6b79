"""Digests of the state that random generators are really in, by which the ledger shows what was drawn from.

52 bits each: a float64 carries them, and so they travel between ranks with a step's losses.
"""

from __future__ import annotations

import random
from array import array

import numpy as np
import torch
import xxhash

_DROPPED_BITS = 12


def host_generators() -> int:
    """Of Python's, NumPy's and torch's generators on the CPU. 50 µs."""
    digest = xxhash.xxh3_64(array("Q", random.getstate()[1]).tobytes())
    numpy = np.random.get_state(legacy=False)["state"]
    digest.update(numpy["key"].tobytes())
    digest.update(str(numpy["pos"]).encode())
    digest.update(torch.get_rng_state().numpy().data)
    return digest.intdigest() >> _DROPPED_BITS


def model_generators(device: torch.device) -> int:
    """Of torch's generators that a model on ``device`` draws from. 3 µs on the CPU."""
    digest = xxhash.xxh3_64(torch.get_rng_state().numpy().data)
    if device.type != "cpu":
        digest.update(torch.get_device_module(device).get_rng_state(device).numpy().data)
    return digest.intdigest() >> _DROPPED_BITS
