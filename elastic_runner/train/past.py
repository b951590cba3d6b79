"""What the attempts before this one came to, and what follows from it for this one. On global rank 0."""

from __future__ import annotations

from functools import cached_property

from elastic_runner.checkpoint.trust import blamed, memory_distrusted
from elastic_runner.config import RunConfig
from elastic_runner.data.skips import Skip
from elastic_runner.history import End, read_ends
from elastic_runner.storage import Storage
from elastic_runner.train.record import RunRecord
from elastic_runner.train.skips import next_skip, unanswered


class Past:
    """Read when it is first asked for, and once."""

    def __init__(self, storage: Storage, record: RunRecord, config: RunConfig) -> None:
        self._storage = storage
        self._record = record
        self._times = config.checkpoint.demote_after
        self._most = config.training.skip_failing

    @cached_property
    def skips(self) -> list[Skip]:
        """Global batches that this attempt skips; one that the latest failures add is put on record."""
        known = self._record.skips()
        more = next_skip(self._ends, known, times=self._times, most=self._most)
        if more is None:
            return known
        self._record.skip(more)
        return [*known, more]

    def blamed(self) -> dict[str, str]:
        """Checkpoints that led to the same failure again and again: why, by path of the manifest."""
        return blamed(self._unanswered, self._times)

    def distrusted(self) -> int:
        """The attempt up to which memory is distrusted: see ``memory_distrusted``."""
        return memory_distrusted(self._unanswered, self._times)

    @cached_property
    def _ends(self) -> list[End]:
        return read_ends(self._storage)

    @property
    def _unanswered(self) -> list[End]:
        return unanswered(self._ends, self.skips)
