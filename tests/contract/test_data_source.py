"""One suite for every data source: ElasticLoader (without and with loader processes) and ShardedStreams.

Ranks are threads of this process that take turns: one runs until its next collective, so that they can share the
global random generators. tests/integration/test_data_streams.py has real ranks.
"""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from elastic_runner.config import DataConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.random import kept, seed_all
from elastic_runner.data.source import DataSource, Span
from elastic_runner.data.streams import ShardedStreams
from elastic_runner.errors import LoopError, Mismatch
from tests.support.place import SoloPlace

T = TypeVar("T")

LENGTH = 26
SHARDS = 4
BATCH = 8
STEPS_PER_EPOCH = LENGTH // BATCH


class Samples(Dataset[dict[str, Any]]):
    """Says which sample it is, which epoch it was told, and what random numbers it was given."""

    epoch = -1

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(1).item(), float(np.random.rand())
        return {"sample": index, "epoch": self.epoch, "noise": noise}


class Lines:
    """A stream over every ``shards``-th sample, from a shuffled order; each epoch has its own."""

    def __init__(self, shard: int, shards: int, epoch: int) -> None:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
        self._mine = order[shard::shards]
        self._epoch = epoch
        # Nested, and changed in place: a source that keeps a reference would see the future in it.
        self._state = {"at": {"line": 0}}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._state["at"]["line"] < len(self._mine):
            sample = self._mine[self._state["at"]["line"]]
            self._state["at"]["line"] += 1
            yield {"sample": sample, "epoch": self._epoch, "noise": (torch.rand(1).item(), float(np.random.rand()))}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Draws too, as one that mixes samples up does."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {**columns, "mix": torch.rand(1).item()}


@dataclass(frozen=True)
class Taken:
    """One microbatch."""

    step: int
    shard: int
    epoch: int
    samples: tuple[int, ...]
    noise: tuple[Any, ...]


class Table:
    """Where the ranks of one world meet; whoever runs holds ``turn``."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.turn = threading.Condition()
        self._brought: dict[int, Any] = {}
        self._result: list[Any] = []
        self._round = 0
        self._broken = False

    def exchange(self, rank: int, value: Any) -> list[Any]:
        number = self._round
        self._brought[rank] = value
        if len(self._brought) == self.world_size:
            self._result = [self._brought[r] for r in range(self.world_size)]
            self._brought, self._round = {}, number + 1
            self.turn.notify_all()
        elif not self.turn.wait_for(lambda: self._round > number or self._broken, timeout=60) or self._round == number:
            raise AssertionError("a rank did not come")
        labels = {label for label, _ in self._result}
        assert len(labels) == 1, f"ranks are in different places: {labels}"
        return [item for _, item in self._result]

    def everywhere(self, action: Callable[[int], T]) -> list[T]:
        """``action(rank)`` on all ranks; the first error is raised."""
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def run(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = action(rank)
                except Exception as error:
                    errors.append(error)
                    self._broken = True
                    self.turn.notify_all()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.world_size)]


class TurnCoordinator(Coordinator):
    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self._table = table
        self.rank, self.world_size = rank, table.world_size

    def gather(self, label: str, value: T) -> list[T]:
        return self._table.exchange(self.rank, (label, deepcopy(value)))

    def sum(self, label: str, values: torch.Tensor) -> torch.Tensor:
        parts = self._table.exchange(self.rank, (label, values.clone()))
        return values.copy_(torch.stack(parts).sum(0))


Make = Callable[[SoloPlace, DataConfig], DataSource]


class World:
    """A job's ranks, from one start to the next."""

    def __init__(self, make: Make, config: DataConfig, world_size: int, *, seed: int = 0) -> None:
        self.config = config
        self.table = Table(world_size)
        self.step = 0
        self.taken: list[Taken] = []
        self.spans: list[Span] = []
        places = [SoloPlace(seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)]
        for place in places:
            place.coordinator = TurnCoordinator(self.table, place.coordinator.rank)
        self.sources = self.table.everywhere(lambda rank: make(places[rank], config))

    def begin(self) -> World:
        """Take one global batch on all ranks, without committing it."""
        self.step += 1
        spans = self.table.everywhere(lambda rank: self.sources[rank].begin(self.step))
        assert all(span == spans[0] for span in spans), "ranks that call begin see the same batch"
        self.spans.append(spans[0])
        for part in self.table.everywhere(lambda rank: self._take(self.sources[rank], spans[0])):
            self.taken += part
        return self

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.begin()
            self.table.everywhere(lambda rank: self.sources[rank].commit())
        return self

    def state(self) -> dict[str, Any]:
        """What rank 0 saves; all ranks have the same."""
        states = self.table.everywhere(lambda rank: self.sources[rank].state_dict())
        assert all(state == states[0] for state in states)
        return pickle.loads(pickle.dumps(states[0]))

    def load(self, state: Mapping[str, Any], step: int) -> World:
        self.table.everywhere(lambda rank: self.sources[rank].load_state_dict(deepcopy(state)))
        self.step = step
        return self

    def _take(self, source: DataSource, span: Span) -> list[Taken]:
        microbatches = list(source.microbatches())
        assert len(microbatches) == source.count()
        taken = []
        for microbatch in microbatches:
            batch = microbatch.batch
            assert len(batch["sample"]) == microbatch.samples == self.config.global_batch // self.config.shards
            assert set(batch["epoch"]) == {span.epoch}
            noise = (*batch["noise"], batch["mix"])
            taken.append(Taken(self.step, microbatch.shard, span.epoch, tuple(batch["sample"]), noise))
        return taken


def loader(place: SoloPlace, config: DataConfig) -> DataSource:
    return ElasticLoader(Samples(), config, place, collate_fn=collate)


def streams(place: SoloPlace, config: DataConfig) -> DataSource:
    return ShardedStreams(Lines, config, place, collate_fn=collate)


Start = Callable[[int], World]


@pytest.fixture(params=["loader", "loader with 2 processes", "streams"])
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a world of so many ranks over the kind of source under test."""
    make = streams if request.param == "streams" else loader
    config = DataConfig(global_batch=BATCH, shards=SHARDS, loader_workers=2 if "processes" in request.param else 0)
    return lambda world_size: World(make, config, world_size)


def samples_by_epoch(taken: list[Taken]) -> dict[int, Counter[int]]:
    result: dict[int, Counter[int]] = {}
    for part in taken:
        result.setdefault(part.epoch, Counter()).update(part.samples)
    return result


def test_each_epoch_takes_each_sample_once_and_counts_what_it_drops(start: Start) -> None:
    """c14, c53: every rank has the same number of batches, without duplicates, and the epoch ends for all together."""
    world = start(2).run(2 * STEPS_PER_EPOCH + 1)
    epochs = samples_by_epoch(world.taken)
    for epoch in (0, 1):
        assert set(epochs[epoch].values()) == {1}
        assert epochs[epoch].total() == STEPS_PER_EPOCH * BATCH
    assert sum(span.dropped for span in world.spans) == 2 * (LENGTH % BATCH)
    assert [(span.epoch, span.first, span.last) for span in world.spans] == [
        *((0, BATCH * i, BATCH * (i + 1)) for i in range(3)),
        *((1, BATCH * i, BATCH * (i + 1)) for i in range(3)),
        (2, 0, BATCH),
    ]


def test_epochs_have_different_orders_and_the_dataset_is_told_which_one_it_is(start: Start) -> None:
    """c48, c52: World checks that the epoch has reached whichever process loads."""
    world = start(1).run(3 * STEPS_PER_EPOCH)
    assert {part.epoch for part in world.taken} == {0, 1, 2}
    orders = {tuple(s for part in world.taken if part.epoch == epoch for s in part.samples) for epoch in range(3)}
    assert len(orders) == 3


def test_order_and_random_numbers_are_the_same_at_every_world_size(start: Start) -> None:
    """c49, c54: augmentations by the dataset (torch and NumPy) and by the collate function too."""
    wanted = start(1).run(4).taken
    for world_size in (2, 3, 4):
        assert start(world_size).run(4).taken == wanted


def test_random_numbers_differ_between_shards_and_steps(start: Start) -> None:
    """c54"""
    taken = start(2).run(4).taken
    assert len({part.noise for part in taken}) == len(taken) == 4 * SHARDS
    assert len({part.noise[-1] for part in taken}) == len(taken), "the collate function draws keyed numbers too"
    numbers = [number for part in taken for sample in part.noise[:-1] for number in sample]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("killed_at", range(2 * STEPS_PER_EPOCH))
def test_killed_after_any_step_and_resumed_at_another_world_size(start: Start, killed_at: int) -> None:
    """c48, c49, c50, c54: as if nothing had happened, for a kill in the middle of the step after the save."""
    wanted = start(1).run(2 * STEPS_PER_EPOCH + 1).taken
    before, after = ((2, 3), (4, 1))[killed_at % 2]
    first = start(before).run(killed_at)
    state = first.state()
    first.begin()
    assert first.state() == state, "what is taken and not committed does not count"
    second = start(after).load(state, killed_at).run(2 * STEPS_PER_EPOCH + 1 - killed_at)
    committed = [part for part in first.taken if part.step <= killed_at]
    assert committed + second.taken == wanted


def test_checkpoint_right_after_a_resume_is_the_one_resumed_from(start: Start) -> None:
    """c50"""
    state = start(2).run(2).state()
    resumed = start(3).load(state, 2)
    assert resumed.state() == state
    assert resumed.begin().state() == state
    assert start(1).load(resumed.state(), 2).run(3).taken == start(1).load(state, 2).run(3).taken


def test_state_loaded_after_loading_has_begun_wins(start: Start) -> None:
    """c50: an iterator made before the state was loaded went on where it stood."""
    wanted = start(2).run(5).taken
    world = start(2).run(4)
    early = start(2).run(1).state()
    world.taken = []
    assert world.load(early, 1).run(4).taken == [part for part in wanted if part.step > 1]


def test_batch_that_was_begun_and_not_committed_is_begun_again(start: Start) -> None:
    """A step that failed and is tried again gets its own samples, not the next ones."""
    wanted = start(2).run(3).taken
    world = start(2).run(1)
    world.begin()
    world.step -= 1
    del world.taken[SHARDS:]
    assert world.run(2).taken == wanted


def test_batch_left_half_way_is_begun_again(start: Start) -> None:
    wanted = start(1).run(3).taken
    world = start(1).run(1)
    source = world.sources[0]
    world.table.everywhere(lambda _: source.begin(2))
    next(source.microbatches())
    assert world.run(2).taken == wanted


def test_calls_out_of_order_are_refused(start: Start) -> None:
    world = start(1)
    source = world.sources[0]
    for call in (source.commit, lambda: list(source.microbatches())):
        with pytest.raises(LoopError, match="begin"):
            call()
    world.run(1)
    for call in (source.commit, lambda: list(source.microbatches())):
        with pytest.raises(LoopError, match="begin"):
            call()


def test_state_is_plain_data(start: Start) -> None:
    """A checkpoint keeps it as JSON or by torch.load(weights_only=True)."""
    state = start(2).run(2).state()
    assert json.loads(json.dumps(state)) == state


def test_loading_leaves_the_training_generators_alone(start: Start) -> None:
    """c54: the model's random numbers must not depend on who loads, or on how many processes do."""
    world = start(1)
    with kept():
        seed_all("training")
        wanted = (random.random(), float(np.random.rand()), torch.rand(2).tolist())
        seed_all("training")
        world.run(STEPS_PER_EPOCH + 1)
        assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == wanted


def test_another_seed_is_another_run_and_its_state_is_refused() -> None:
    """Streams order their data themselves, so this is ElasticLoader's alone."""
    config = DataConfig(global_batch=BATCH, shards=SHARDS)
    first, other = World(loader, config, 1).run(1), World(loader, config, 1, seed=1).run(1)
    assert first.taken[0].samples != other.taken[0].samples
    assert first.taken[0].noise != other.taken[0].noise
    with pytest.raises(Mismatch, match="seed was 0, is 1"):
        other.load(first.state(), 1)


@pytest.mark.parametrize("make", [loader, streams])
def test_random_numbers_of_another_seed_differ(make: Make) -> None:
    """c54"""
    config = DataConfig(global_batch=BATCH, shards=SHARDS)
    noise = [{part.noise for part in World(make, config, 1, seed=seed).run(3).taken} for seed in (0, 1)]
    assert not noise[0] & noise[1]
