"""ShardedStreams among real ranks, whose number changes in the middle of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from elastic_runner.config import DataConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.data.streams import ShardedStreams
from tests.support.place import SoloPlace
from tests.support.ranks import run_ranks

CONFIG = DataConfig(global_batch=8, shards=4)
LENGTHS = (11, 12, 9, 10)
"""Samples of each shard: 4 microbatches of 2 on every one, and 3 + 4 + 1 + 2 samples left."""
STEPS_PER_EPOCH = 4


class File:
    """A stream of one file's lines."""

    def __init__(self, shard: int, shards: int, epoch: int) -> None:
        assert shards == len(LENGTHS)
        self._lines = [(shard, epoch, line) for line in range(LENGTHS[shard])]
        self._at = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        while self._at < len(self._lines):
            self._at += 1
            yield self._lines[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at = state["at"]


def play(schedule: list[tuple[int, int]]) -> list[tuple[int, Any, int]]:
    """A job that starts again at each (world size, steps) of ``schedule``; (step, sample, dropped) of this rank."""
    dist.init_process_group("gloo")
    groups = {world: dist.new_group(list(range(world))) for world, _ in schedule}
    rank, taken, step, state = dist.get_rank(), [], 0, None
    for world, steps in schedule:
        if rank < world:
            place = SoloPlace()
            place.coordinator = Coordinator(groups[world])
            source = ShardedStreams(File, CONFIG, place, collate_fn=list)
            if state is not None:
                source.load_state_dict(state)
            for number in range(step + 1, step + 1 + steps):
                span = source.begin(number)
                for microbatch in source.microbatches():
                    taken += [(number, sample, span.dropped) for sample in microbatch.batch]
                source.commit()
            state = source.state_dict()
            # A kill in the middle of the next step: it is taken and never committed.
            source.begin(step + 1 + steps)
            assert source.state_dict() == state
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        step, state = step + steps, states[0]
    dist.destroy_process_group()
    return taken


def test_each_line_once_per_epoch_while_the_world_changes() -> None:
    """c14, c49, c53: files of unequal length; all ranks end the epoch in the same step and know what was left out."""
    schedule = [(2, 3), (3, 2), (1, 1), (2, 3)]
    parts = run_ranks(play, 3, schedule)
    taken = sorted(entry for part in parts for entry in part)
    wanted = Counter(
        (epoch * STEPS_PER_EPOCH + line // 2 + 1, (shard, epoch, line))
        for epoch in range(3)
        for shard in range(4)
        for line in range(2 * STEPS_PER_EPOCH)
        if epoch * STEPS_PER_EPOCH + line // 2 < sum(steps for _, steps in schedule)
    )
    assert Counter((step, sample) for step, sample, _ in taken) == wanted
    # 3, 4, 1 and 2 lines are left; the fourth of the second file is not read, since the epoch is over without it.
    assert {step: dropped for step, _, dropped in taken if dropped} == {5: 2 + 2 + 1 + 2, 9: 2 + 2 + 1 + 2}
