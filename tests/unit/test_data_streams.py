"""ShardedStreams beyond what every data source does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from elastic_runner.config import DataConfig
from elastic_runner.data.streams import ShardedStreams
from elastic_runner.errors import ConfigError, Mismatch
from tests.support.place import SoloPlace


class Counting:
    """Yields ``samples`` in order."""

    def __init__(self, samples: range) -> None:
        self._samples = samples
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        while self._at < len(self._samples):
            self._at += 1
            yield self._samples[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at = state["at"]


def streams_of(*lengths: int) -> Callable[[int, int, int], Counting]:
    """A maker of streams of so many samples, by shard."""
    return lambda shard, shards, epoch: Counting(range(100 * shard, 100 * shard + lengths[shard]))


def source_of(make: Callable[[int, int, int], Any], *, batch: int = 4, shards: int = 2) -> ShardedStreams:
    return ShardedStreams(make, DataConfig(global_batch=batch, shards=shards), SoloPlace())


def take(source: ShardedStreams, step: int) -> list[int]:
    source.begin(step)
    samples = [sample for microbatch in source.microbatches() for sample in microbatch.batch.tolist()]
    source.commit()
    return samples


def test_epoch_ends_when_the_first_stream_runs_dry_and_what_was_pulled_is_counted() -> None:
    """c14, c53: the longer stream does not leave its rank alone in a step."""
    source = source_of(streams_of(5, 9))
    assert [take(source, step) for step in (1, 2)] == [[0, 1, 100, 101], [2, 3, 102, 103]]
    span = source.begin(3)
    assert (span.epoch, span.first, span.last, span.dropped) == (1, 0, 4, 1 + 2)
    assert take(source, 3) == [0, 1, 100, 101]


def test_end_of_an_epoch_that_was_not_committed_is_found_again() -> None:
    """The count of what was dropped is not lost with the process that counted it."""
    source = source_of(streams_of(3, 2))
    take(source, 1)
    state = source.state_dict()
    span = source.begin(2)
    assert (span.epoch, span.dropped) == (1, 1)
    assert source.state_dict() == state
    resumed = source_of(streams_of(3, 2))
    resumed.load_state_dict(state)
    assert resumed.begin(2) == span


def test_make_stream_is_told_shard_shards_and_epoch() -> None:
    told: list[tuple[int, int, int]] = []

    def make(shard: int, shards: int, epoch: int) -> Counting:
        told.append((shard, shards, epoch))
        return Counting(range(shard, shard + 2))

    source = source_of(make)
    take(source, 1)
    take(source, 2)
    assert told == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]


def test_stream_shuffled_when_it_is_made_has_its_order_back_after_a_resume() -> None:
    """c54: what a stream draws when it is made is keyed by epoch and shard, not by the step of the resume."""

    def make(shard: int, shards: int, epoch: int) -> Counting:
        stream = Counting(range(0))
        stream._samples = torch.randperm(50).tolist()  # type: ignore[assignment]
        return stream

    source = source_of(make)
    wanted = [take(source, step) for step in range(1, 6)]
    first = source_of(make)
    got = [take(first, step) for step in (1, 2)]
    second = source_of(make)
    second.load_state_dict(first.state_dict())
    assert got + [take(second, step) for step in (3, 4, 5)] == wanted


def test_stream_that_failed_half_way_is_read_again_from_what_is_committed() -> None:
    class Failing(Counting):
        fail = True

        def __iter__(self) -> Iterator[int]:
            for sample in super().__iter__():
                if sample == 103 and Failing.fail:
                    Failing.fail = False
                    raise OSError("the network was away")
                yield sample

    source = source_of(lambda shard, shards, epoch: Failing(range(100 * shard, 100 * shard + 9)))
    take(source, 1)
    with pytest.raises(OSError, match="away"):
        source.begin(2)
    assert take(source, 2) == [2, 3, 102, 103]


@pytest.mark.parametrize("lengths", [(1, 9), (0, 0)])
def test_streams_too_short_for_a_microbatch_name_the_field(lengths: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"fewer than 2 samples in epoch 0: lower data\.global_batch"):
        source_of(streams_of(*lengths)).begin(1)


def test_later_epoch_that_is_empty_ends_the_run_instead_of_turning_for_ever() -> None:
    source = source_of(lambda shard, shards, epoch: Counting(range(shard, shard + (2 if epoch == 0 else 0))))
    take(source, 1)
    with pytest.raises(ConfigError, match="in epoch 1"):
        source.begin(2)


def test_other_number_of_shards_is_refused_and_other_batch_size_is_not() -> None:
    """c57: the split of the data is by shard; the position of each stream counts samples."""
    source = source_of(streams_of(9, 9))
    take(source, 1)
    with pytest.raises(Mismatch, match=r"2 shards, data\.shards is 4"):
        source_of(streams_of(9, 9, 9, 9), shards=4).load_state_dict(source.state_dict())
    larger = source_of(streams_of(9, 9), batch=6)
    larger.load_state_dict(source.state_dict())
    span = larger.begin(2)
    assert (span.first, span.last) == (4, 10)
    assert take(larger, 2) == [2, 3, 4, 102, 103, 104]


def test_data_that_nobody_has_split_are_noticed_on_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """c53"""
    with caplog.at_level(logging.WARNING):
        source = source_of(lambda shard, shards, epoch: Counting(range(12)), batch=6, shards=3)
        take(source, 1)
        take(source, 2)
    assert len(caplog.records) == 1
    assert "shards 0, 1, 2 begin with the same samples" in caplog.text


def test_split_data_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        take(source_of(streams_of(9, 9)), 1)
    assert not caplog.records


def test_samples_that_cannot_be_compared_are_trained_on() -> None:
    def make(shard: int, shards: int, epoch: int) -> Any:
        stream = Counting(range(0))
        stream._samples = [lambda: shard] * 4  # type: ignore[assignment]
        return stream

    config = DataConfig(global_batch=2, shards=2)
    source = ShardedStreams(make, config, SoloPlace(), collate_fn=lambda functions: [f() for f in functions])
    source.begin(1)
    assert [microbatch.batch for microbatch in source.microbatches()] == [[0], [1]]
