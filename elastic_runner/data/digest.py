"""Digests of sample ids, by which the ledger shows which samples a step was given.

Each logical shard's is made where its samples are fetched; the global batch's is made of them, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import xxhash

from elastic_runner.data.order import samples_at

_DROPPED_BITS = 12
"""What is left fits into a float64 exactly, and so travels between ranks with a step's losses."""
_BLOCK = 1 << 14
"""Samples computed at once: numpy is slow on a small batch."""


def shard_digest(samples: Sequence[int] | np.ndarray) -> int:
    """52 bits of the xxh3 of the ids of one logical shard, as 64-bit integers in order."""
    return xxhash.xxh3_64_intdigest(np.asarray(samples, dtype="<i8").tobytes()) >> _DROPPED_BITS


def batch_digest(shards: Sequence[int]) -> str:
    """16 hexadecimal digits for a global batch, from its shards' digests in order of shards."""
    return xxhash.xxh3_64_hexdigest(np.asarray(shards, dtype="<i8").tobytes())


class Recomputed:
    """Digests from (seed, length) and positions alone, for steps that come about in order."""

    def __init__(self, *, seed: int, length: int) -> None:
        self.of = seed, length
        """What the order depends on, besides the epoch."""
        self._seed, self._length = seed, length
        self._blocks: deque[tuple[int, int, np.ndarray]] = deque(maxlen=2)

    def digest(self, *, epoch: int, first: int, size: int, shards: int) -> str:
        """Of the batch of ``size`` samples from position ``first``; past the epoch's end it wraps to its start."""
        samples = self._samples(epoch, (first + np.arange(size)) % self._length)
        return batch_digest([shard_digest(part) for part in samples.reshape(shards, -1)])

    def _samples(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        samples = np.empty_like(positions)
        numbers = positions // _BLOCK
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            samples[inside] = self._block(epoch, number)[positions[inside] - number * _BLOCK]
        return samples

    def _block(self, epoch: int, number: int) -> np.ndarray:
        for known_epoch, known_number, block in self._blocks:
            if (known_epoch, known_number) == (epoch, number):
                return block
        positions = range(number * _BLOCK, min((number + 1) * _BLOCK, self._length))
        block = np.asarray(samples_at(positions, length=self._length, seed=self._seed, epoch=epoch))
        self._blocks.append((epoch, number, block))
        return block
