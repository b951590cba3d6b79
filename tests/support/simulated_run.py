"""Runs without processes: the real loaders of all ranks of a world, a real ledger, and kills that forget the rest."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from elastic_runner import paths
from elastic_runner.config import DataConfig
from elastic_runner.data.digest import batch_digest
from elastic_runner.data.ledger import LedgerWriter, Record, read_records
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.skips import Skip
from elastic_runner.storage import Storage
from elastic_runner.train.lines import missing
from tests.support.place import SoloPlace


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt, from its start to the kill."""

    world: int
    steps: int
    """Committed before the kill."""
    save_every: int = 1000
    """Steps between checkpoints."""
    in_memory: bool = False
    """Whether a copy of the last step outlives the kill."""
    torn: bool = False
    """Whether the kill leaves half a line behind."""
    skips: bool = False
    """Whether it skips the batch that it would begin with."""


class SimulatedRun:
    """A job of so many lives. ``taken`` is what the loaders really gave for each step that led to the present state."""

    def __init__(self, storage: Storage, config: DataConfig, *, length: int, seed: int = 0) -> None:
        self.storage, self.config, self.length, self.seed = storage, config, length, seed
        self.taken: dict[int, tuple[int, list[int]]] = {}
        self.skips: list[Skip] = []
        self._attempt = 0
        self._saved: tuple[int, dict[str, Any] | None] = (0, None)
        self._recovered = b""

    def live(self, life: Life) -> None:
        """Resume from what is left, go on, and be killed."""
        self._attempt += 1
        step, state = self._saved
        loaders = self._loaders(life.world, state)
        ledger = LedgerWriter(self.storage, self._attempt)
        for line in missing(self._recovered, read_records(self.storage), step):
            ledger.append(line)
        ledger.append(self._start(step, life.world))
        if life.skips:
            span = loaders[0].begin(step + 1)
            self.skips.append(Skip(epoch=span.epoch, first=span.first, last=span.last, step=step + 1, reason="fails"))
            ledger.append(self.skips[-1].record())
        ledger.flush()
        for loader in loaders:
            loader.skip(self.skips)
        recent: list[Record] = []
        for number in range(step + 1, step + life.steps + 1):
            recent.append(self._step(number, loaders))
            ledger.append(recent[-1])
            if number % life.save_every == 0:
                ledger.flush()
                self._saved, recent = (number, loaders[0].state_dict()), []
        self._kill(life, step + life.steps, loaders[0], recent)

    def samples_of_epochs(self) -> dict[int, Counter[int]]:
        """How often each epoch has used each sample."""
        result: dict[int, Counter[int]] = {}
        for epoch, samples in self.taken.values():
            result.setdefault(epoch, Counter()).update(samples)
        return result

    def place(self, rank: int, world: int) -> SoloPlace:
        """Where a rank runs."""
        return SoloPlace(seed=self.seed, rank=rank, world_size=world)

    def _loaders(self, world: int, state: dict[str, Any] | None) -> list[ElasticLoader]:
        places = [self.place(rank, world) for rank in range(world)]
        loaders = [ElasticLoader(Numbers(self.length), self.config, place) for place in places]
        for loader in loaders if state else ():
            loader.load_state_dict(state or {})
        for loader in loaders:
            loader.skip(self.skips)
        return loaders

    def _start(self, step: int, world: int) -> Record:
        config = self.config
        facts = {"world": world, "strategy": "ddp", "seed": self.seed, "last_batch": config.last_batch}
        sizes = {"global_batch": config.global_batch, "shards": config.shards}
        return {"event": "start", "resumed_at": step, **facts, **sizes, "attempt": self._attempt}

    def _step(self, number: int, loaders: list[ElasticLoader]) -> Record:
        spans = [loader.begin(number) for loader in loaders]
        assert all(span == spans[0] for span in spans)
        parts = [part for loader in loaders for part in loader.microbatches()]
        assert [part.shard for part in parts] == list(range(self.config.shards))
        for loader in loaders:
            loader.commit()
        self.taken[number] = spans[0].epoch, [sample for part in parts for sample in part.batch.tolist()]
        line = {"event": "step", "step": number, **asdict(spans[0]), "lr": 0.1, "scale": 1.0}
        return line | {"digest": batch_digest([part.digest or 0 for part in parts]), "attempt": self._attempt}

    def _kill(self, life: Life, step: int, loader: ElasticLoader, recent: list[Record]) -> None:
        """What the ledger has not flushed, and the place has not saved, is gone."""
        self._recovered = b""
        if life.in_memory:
            self._saved = step, loader.state_dict()
            self._recovered = b"".join(encoded(line) for line in recent)
        for lost in range(self._saved[0] + 1, step + 1):
            del self.taken[lost]
        if life.torn:
            torn = encoded(self._start(step, life.world))[:-9]
            segment = paths.ledger_segment(self._attempt, 999)
            if not self.storage.append(paths.ledger_segment(self._attempt, 0), torn):
                self.storage.put(segment, torn)


def encoded(record: Record) -> bytes:
    """As a ledger has it."""
    return json.dumps(record).encode() + b"\n"
