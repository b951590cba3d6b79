"""Runs without processes: the real loaders of all ranks of a world, a real ledger, and kills that forget the rest."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from elastic_runner import paths
from elastic_runner.config import DataConfig
from elastic_runner.data.digest import batch_digest
from elastic_runner.data.ledger import LedgerWriter, Record, read_records
from elastic_runner.data.lineage import OUTSIDE, Lineage, Origin
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
    passes_over: int = 0
    """How many newer states it leaves for the one that it goes on from."""
    torn: bool = False
    """Whether the kill leaves half a line behind."""
    skips: bool = False
    """Whether it skips the batch that it would begin with."""


_NEW = Origin(OUTSIDE, 0)


@dataclass(kw_only=True)
class State:
    """What a life may go on from."""

    origin: Origin = _NEW
    """Whose it is."""
    data: dict[str, Any] | None = None
    """Of the loader; None: a new one."""
    taken: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """The epoch and samples of each step behind it."""
    by: dict[int, int] = field(default_factory=dict)
    """The attempt that did each of them."""
    lines: bytes | None = None
    """What came with it, where it is in memory."""


class SimulatedRun:
    """A job of so many lives. ``taken`` and ``by``: what the loaders really gave for each step that led to the newest
    state that is left, and to whom."""

    def __init__(self, storage: Storage, config: DataConfig, *, length: int, seed: int = 0) -> None:
        self.storage, self.config, self.length, self.seed = storage, config, length, seed
        self.skips: list[Skip] = []
        self._attempt = 0
        self._states = [State()]
        self._go_on_from(self._states[0])

    def live(self, life: Life) -> None:
        """Resume from what is left, go on, and be killed."""
        self._attempt += 1
        state = self._states[max(0, len(self._states) - 1 - life.passes_over)]
        self._states = [one for one in self._states if one is state or one.lines is None]
        self._go_on_from(state)
        attempt, step = state.origin
        loaders = self._loaders(life.world, state.data)
        ledger = LedgerWriter(self.storage, self._attempt)
        for line in missing(state.lines or b"", Lineage(read_records(self.storage)).reached(attempt or 0), step):
            ledger.append(line)
        ledger.append(self._start(step, life.world) | {"rests_on": attempt})
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
                self._keep(number, loaders[0])
                recent = []
        if life.in_memory:
            self._keep(step + life.steps, loaders[0], b"".join(encoded(line) for line in recent))
        self._go_on_from(self._states[-1])
        if life.torn:
            self._tear(step + life.steps, life.world)

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
        self.by[number] = self._attempt
        line = {"event": "step", "step": number, **asdict(spans[0]), "lr": 0.1, "scale": 1.0}
        return line | {"digest": batch_digest([part.digest or 0 for part in parts]), "attempt": self._attempt}

    def _go_on_from(self, state: State) -> None:
        self.taken, self.by = dict(state.taken), dict(state.by)

    def _keep(self, step: int, loader: ElasticLoader, lines: bytes | None = None) -> None:
        origin, data = Origin(self._attempt, step), loader.state_dict()
        self._states.append(State(origin=origin, data=data, taken=dict(self.taken), by=dict(self.by), lines=lines))

    def _tear(self, step: int, world: int) -> None:
        torn = encoded(self._start(step, world))[:-9]
        if not self.storage.append(paths.ledger_segment(self._attempt, 0), torn):
            self.storage.put(paths.ledger_segment(self._attempt, 999), torn)


def encoded(record: Record) -> bytes:
    """As a ledger has it."""
    return json.dumps(record).encode() + b"\n"
