"""ElasticLoader and ElasticSampler beyond what every data source does; moving batches to a device."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from elastic_runner.config import DataConfig
from elastic_runner.data.loader import ElasticLoader
from elastic_runner.data.order import samples_at
from elastic_runner.data.partition import Cursor
from elastic_runner.data.sampler import ElasticSampler, ShardIndices
from elastic_runner.data.source import to_device
from elastic_runner.errors import ConfigError, Mismatch
from tests.support.place import SoloPlace
from tests.support.simulated_run import Numbers


def take(loader: ElasticLoader, steps: int, *, first_step: int = 1) -> list[int]:
    """The samples of some committed steps of a world of one."""
    samples: list[int] = []
    for step in range(first_step, first_step + steps):
        loader.begin(step)
        for microbatch in loader.microbatches():
            samples += microbatch.batch.tolist()
        loader.commit()
    return samples


# What the order is made of.


def test_the_batch_is_the_keyed_permutation() -> None:
    loader = ElasticLoader(Numbers(20), DataConfig(global_batch=6, shards=3), SoloPlace(seed=5))
    assert take(loader, 3) == samples_at(range(18), length=20, seed=5, epoch=0)
    assert take(loader, 1, first_step=4) == samples_at(range(6), length=20, seed=5, epoch=1)


@pytest.mark.parametrize(("policy", "steps"), [("drop", 3), ("pad", 4)])
def test_steps_per_epoch(policy: Any, steps: int) -> None:
    config = DataConfig(global_batch=6, shards=3, last_batch=policy)
    loader = ElasticLoader(Numbers(20), config, SoloPlace())
    assert loader.steps_per_epoch == steps
    take(loader, steps - 1)
    assert loader.begin(steps).epoch == 0
    take(loader, 1, first_step=steps)
    assert loader.begin(steps + 1).epoch == 1


def test_padded_epoch_uses_every_sample_and_counts_the_padding() -> None:
    loader = ElasticLoader(Numbers(20), DataConfig(global_batch=6, shards=3, last_batch="pad"), SoloPlace())
    used = Counter(take(loader, 3))
    span = loader.begin(4)
    assert (span.first, span.last, span.padded, span.dropped, span.length) == (18, 20, 4, 0, 20)
    used.update(take(loader, 1, first_step=4))
    assert set(used) == set(range(20))
    again = {sample for sample, times in used.items() if times == 2}
    assert again == set(samples_at(range(4), length=20, seed=0, epoch=0))


@pytest.mark.parametrize(("batch", "shards"), [(10, 2), (15, 3), (5, 5), (6, 1)])
def test_other_batch_size_and_shards_go_on_at_the_same_sample(batch: int, shards: int) -> None:
    """c49, c57: the position counts samples; a changed accumulation starts a clean window and loses none of them."""
    first = ElasticLoader(Numbers(50), DataConfig(global_batch=10, shards=5), SoloPlace())
    used = take(first, 2)
    second = ElasticLoader(Numbers(50), DataConfig(global_batch=batch, shards=shards), SoloPlace())
    second.load_state_dict(first.state_dict())
    left = 30 // batch
    used += take(second, left, first_step=3)
    assert used == samples_at(range(20 + left * batch), length=50, seed=0, epoch=0)
    assert second.state_dict()["position"] == (20 + left * batch) % 50


def test_larger_batch_that_no_longer_fits_counts_the_tail_as_dropped() -> None:
    """c57"""
    first = ElasticLoader(Numbers(50), DataConfig(global_batch=10, shards=5), SoloPlace())
    take(first, 4)
    second = ElasticLoader(Numbers(50), DataConfig(global_batch=20, shards=5), SoloPlace())
    second.load_state_dict(first.state_dict())
    span = second.begin(5)
    assert (span.epoch, span.first, span.dropped) == (1, 0, 10)


def test_random_numbers_do_not_depend_on_when_loading_began() -> None:
    """c54: step 3 has the numbers of step 3, also when the steps before were made by another attempt."""

    class Noise(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    config = DataConfig(global_batch=4, shards=2)
    wanted = take(ElasticLoader(Noise(40), config, SoloPlace()), 5)
    first = ElasticLoader(Noise(40), config, SoloPlace())
    second = ElasticLoader(Noise(40), config, SoloPlace())
    got = take(first, 2)
    second.load_state_dict(first.state_dict())
    assert got + take(second, 3, first_step=3) == wanted


# What datasets may be.


def test_dataset_that_fetches_whole_batches_is_asked_for_them() -> None:
    class Batched(Numbers):
        asked: list[list[int]]

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            self.asked.append(indices)
            return [torch.tensor(index) for index in indices]

    dataset = Batched(20)
    dataset.asked = []
    loader = ElasticLoader(dataset, DataConfig(global_batch=6, shards=2), SoloPlace())
    samples = take(loader, 2)
    assert [len(indices) for indices in dataset.asked] == [3, 3, 3, 3]
    assert [index for indices in dataset.asked for index in indices] == samples
    assert type(dataset.asked[0]) is list


def test_set_epoch_is_called_once_per_epoch_and_again_after_a_load() -> None:
    """c52"""

    class Told(Numbers):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told(8)
    loader = ElasticLoader(dataset, DataConfig(global_batch=4, shards=2), SoloPlace())
    take(loader, 5)
    assert dataset.epochs == [0, 1, 2]
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 4})
    take(loader, 2, first_step=4)
    assert dataset.epochs == [0, 1, 2, 1, 2]


def test_streams_are_sent_to_sharded_streams() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0

        def __len__(self) -> int:
            return 100

    with pytest.raises(ConfigError, match="ShardedStreams"):
        ElasticLoader(Endless(), DataConfig(), SoloPlace())


def test_impossible_sizes_are_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch=32"):
        ElasticLoader(Numbers(31), DataConfig(), SoloPlace())
    with pytest.raises(ConfigError, match=r"data\.shards=8"):
        ElasticLoader(Numbers(100), DataConfig(), SoloPlace(world_size=9))
    with pytest.raises(ConfigError, match="empty"):
        ElasticLoader(Numbers(0), DataConfig(last_batch="pad"), SoloPlace())


def test_state_of_another_dataset_is_refused_in_words() -> None:
    state = ElasticLoader(Numbers(40), DataConfig(), SoloPlace()).state_dict()
    loader = ElasticLoader(Numbers(41), DataConfig(), SoloPlace(seed=2))
    with pytest.raises(Mismatch, match="length was 40, is 41; seed was 0, is 2"):
        loader.load_state_dict(state)


def test_error_in_a_loader_process_reaches_the_training() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError(f"no sample {index}")

    loader = ElasticLoader(Broken(40), DataConfig(loader_workers=1), SoloPlace())
    loader.begin(1)
    with pytest.raises(KeyError, match="no sample"):
        next(loader.microbatches())


# ElasticSampler with torch's own DataLoader.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sampler_is_a_batch_sampler_of_torchs_dataloader(num_workers: int) -> None:
    config = DataConfig(global_batch=6, shards=3)
    ranks = []
    for rank in range(2):
        sampler = ElasticSampler(20, config, seed=0, rank=rank, world_size=2)
        iterator = iter(DataLoader(Numbers(20), batch_sampler=sampler, num_workers=num_workers))
        ranks.append([next(iterator).tolist() for _ in range(3 * (1 + rank))])
    steps = [part for a, b, c in zip(ranks[0], ranks[1][::2], ranks[1][1::2], strict=True) for part in (a, b, c)]
    assert [s for part in steps for s in part] == samples_at(range(18), length=20, seed=0, epoch=0)


def test_sampler_starts_after_a_cursor_and_numbers_its_items() -> None:
    sampler = ElasticSampler(
        20, DataConfig(global_batch=6, shards=2), seed=0, rank=1, world_size=2, cursor=Cursor(position=12), step=9
    )
    items = list(islice(sampler, 2))
    assert all(isinstance(item, ShardIndices) for item in items)
    assert [(i.epoch, i.step, i.shard) for i in items if isinstance(i, ShardIndices)] == [(0, 9, 1), (1, 10, 1)]
    assert items[0] == samples_at(range(15, 18), length=20, seed=0, epoch=0)
    assert list(islice(sampler, 2)) == items, "iterating anew starts anew"


def test_sampler_refuses_impossible_sizes() -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch"):
        ElasticSampler(3, DataConfig(), seed=0, rank=0, world_size=1)


# Moving batches. The meta device stands for an accelerator.


def test_to_device_moves_tensors_wherever_they_are() -> None:
    pair = namedtuple("pair", ["x", "y"])
    batch = {"a": torch.ones(1), "b": [torch.ones(1), "word"], "c": (torch.ones(1), 3), "d": pair(torch.ones(1), None)}
    moved = to_device(batch, torch.device("meta"))
    tensors = moved["a"], moved["b"][0], moved["c"][0], moved["d"].x
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved["b"][1], moved["c"][1], moved["d"].y) == ("word", 3, None)
    assert [type(value) for value in moved.values()] == [torch.Tensor, list, tuple, pair]


def test_to_device_leaves_the_lengths_of_packed_sequences_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device([packed], torch.device("meta"))[0]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
