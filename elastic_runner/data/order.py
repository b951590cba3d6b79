"""The order of an epoch: a keyed permutation of sample positions, evaluated in O(1) memory.

A balanced Feistel network over the next even power of two, walked until it lands inside the range
(cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

_ROUNDS = 6
_64_BITS = (1 << 64) - 1


def key_of(*parts: int | str) -> int:
    """A 64-bit key from integers and words, the same on every machine."""
    text = b"\0".join(struct.pack("<Q", p & _64_BITS) if isinstance(p, int) else p.encode() for p in parts)
    return xxhash.xxh3_64_intdigest(text)


def samples_at(positions: Sequence[int], *, length: int, seed: int, epoch: int) -> list[int]:
    """Dataset indices of ``positions`` within an epoch over ``length`` samples.

    A pure function of (seed, epoch) and position: neither rank nor world size enters.
    """
    if length <= 0:
        raise ValueError(f"length must be positive, not {length}")
    asked = np.asarray(positions, dtype=np.int64)
    if asked.size and not 0 <= asked.min() <= asked.max() < length:
        raise ValueError(f"positions {asked.min()}..{asked.max()} are not within the epoch's {length} samples")
    values = asked.astype(np.uint64)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key_of("order", seed, epoch, number)) for number in range(_ROUNDS)]
    values = _feistel(values, half, keys)
    outside = values >= length
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= length
    samples: list[int] = values.tolist()
    return samples


def _feistel(values: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
