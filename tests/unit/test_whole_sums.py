"""Gradients that each rank has whole: what is collected when, and when it is sent."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from elastic_runner.errors import LoopError, ModelError
from elastic_runner.train.buckets import Bucket, buckets_of
from elastic_runner.train.exact import WholeSums
from elastic_runner.train.placement import Placement

ALONE = Placement(rank=0, world_size=1, shards=3)
FIRST_OF_TWO = Placement(rank=0, world_size=2, shards=2)


class Noting(Bucket):
    """Says what it is asked for, instead of meeting a peer."""

    def __init__(self, parameters: list[nn.Parameter], said: list[str]) -> None:
        super().__init__(parameters, FIRST_OF_TWO)
        self._said = said

    def send(self) -> None:
        self._said.append(f"sent {len(self.parameters)}")


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def test_a_bucket_is_sent_when_the_last_backward_has_its_gradients() -> None:
    early, late, other = parameters(2, 3, 4)
    said: list[str] = []
    sums = WholeSums([Noting([late, other], said), Noting([early], said)], FIRST_OF_TWO)
    with sums.backward(0, last=True):
        early.sum().backward()
        said.append("early")
        late.sum().backward()
        said.append("late")
        other.sum().backward()
    assert said == ["early", "late", "sent 2", "sent 1"], "in one order on all ranks"


def test_what_is_not_used_does_not_keep_the_others_from_being_sent() -> None:
    used, unused = parameters(2, 3)
    said: list[str] = []
    with WholeSums([Noting([unused], said), Noting([used], said)], FIRST_OF_TWO).backward(0, last=True):
        used.sum().backward()
    assert said == ["sent 1", "sent 1"]


def test_a_gradient_that_comes_after_its_bucket_has_left_is_an_error() -> None:
    [parameter] = parameters(2)
    sums = WholeSums([Noting([parameter], [])], FIRST_OF_TWO)
    with pytest.raises(ModelError, match="checkpoint_classes"), sums.backward(0, last=True):
        parameter.sum().backward()
        parameter.sum().backward()
    parameter.sum().backward()  # nobody listens any more


def test_the_sum_has_the_order_of_the_tree() -> None:
    """The first is a half, the other two are the other. One after the other, 1 + 1e8 - 1e8 is 0 in float32."""
    for values, expected in (((1.0, 1e8, -1e8), 1.0), ((1e8, 1.0, -1e8), 0.0)):
        [parameter] = parameters(2)
        sums = WholeSums([Bucket([parameter], ALONE)], ALONE)
        for shard, value in enumerate(values):
            with sums.backward(shard, last=shard == 2):
                (parameter * value).sum().backward()
            assert parameter.grad is None
        sums.finish()
        assert parameter.grad is not None and parameter.grad.tolist() == [expected] * 2


def test_only_what_some_shard_used_has_a_gradient() -> None:
    always, once, never = parameters(2, 3, 4)
    sums = WholeSums([Bucket([always, once, never], ALONE)], ALONE)
    for step in range(2):  # memory is used again in the second
        for shard in range(3):
            with sums.backward(shard, last=shard == 2):
                (always.sum() + (once.sum() if shard == 1 and step == 0 else 0)).backward()
        sums.finish()
        assert always.grad is not None and always.grad.tolist() == [3.0, 3.0] and never.grad is None
        assert (once.grad is not None) == (step == 0)
        always.grad = once.grad = None


def test_a_shard_that_is_missing_is_noticed() -> None:
    [parameter] = parameters(2)
    sums = WholeSums([Bucket([parameter], ALONE)], ALONE)
    with pytest.raises(LoopError, match="needs 0 to 2"), sums.backward(0, last=True):
        parameter.sum().backward()


def test_memory_is_that_of_a_few_gradients() -> None:
    """Sixteen shards on one rank: log2(16) + 1 at most, and the same ones in the next step."""
    [parameter] = parameters(8)
    bucket = Bucket([parameter], Placement(rank=0, world_size=1, shards=16))
    sums = WholeSums([bucket], ALONE)
    for _ in range(2):
        for shard in range(16):
            with sums.backward(shard, last=shard == 15):
                parameter.sum().backward()
        sums.finish()
        assert parameter.grad is not None and parameter.grad.tolist() == [16.0] * 8
        parameter.grad = None
    assert len(bucket._free) <= 4


def test_buckets_hold_one_type_and_at_most_the_cap() -> None:
    sizes = [3, 5, 100, 2, 2]
    mixed = [
        nn.Parameter(torch.zeros(n, dtype=t)) for n, t in zip(sizes, itertools.cycle([torch.float32, torch.float64]))
    ]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    buckets = buckets_of([*mixed, frozen], ALONE, cap=48)
    members = [p for bucket in buckets for p in bucket.parameters]
    assert sorted(map(id, members)) == sorted(map(id, mixed))
    assert members[0] is mixed[-1], "the backward begins with the last"
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        bytes_in_it = sum(p.numel() * p.element_size() for p in bucket.parameters)
        assert bytes_in_it <= 48 or len(bucket.parameters) == 1
