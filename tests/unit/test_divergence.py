"""Which rank differs from its replicas, and by what that is seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.train.divergence import Opinion, Replica, describe, digests, integer_sums, judge


def of(*digests: int, parts: int = 1) -> list[Replica]:
    return [Replica(part=rank % parts, digest=digest) for rank, digest in enumerate(digests)]


@pytest.mark.parametrize(
    ("replicas", "opinion"),
    [
        (of(7, 7, 7), ((), True)),
        (of(7, 8, 7), ((1,), True)),
        (of(8, 7, 7, 9, 7), ((0, 3), True)),
        (of(7, 8), ((0, 1), False)),
        (of(7, 7, 8, 8), ((0, 1, 2, 3), False)),
        (of(7, 8, 9), ((0, 1, 2), False)),
        (of(1, 2, 1, 2, parts=2), ((), True)),  # hsdp: ranks 0 and 2, and 1 and 3, are replicas
        (of(1, 2, 1, 3, parts=2), ((1, 3), False)),
        (of(1, 2, 1, 3, 1, 2, parts=2), ((3,), True)),
    ],
)
def test_the_majority_decides(replicas: list[Replica], opinion: tuple[tuple[int, ...], bool]) -> None:
    assert judge(replicas) == Opinion(*opinion)


@given(world=st.integers(3, 9), data=st.data())
def test_a_single_rank_that_differs_is_always_the_one(world: int, data: st.DataObject) -> None:
    hit = data.draw(st.integers(0, world - 1))
    assert judge(of(*[rank == hit for rank in range(world)])) == Opinion((hit,), True)


KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.complex128]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_any_flipped_bit_shows(kind: torch.dtype, data: st.DataObject) -> None:
    """In the bytes, and in the sum that is made where bytes are dear to move: by the power of two that the bit is."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tensor = (torch.randn(3, 4, generator=generator) * 50).to(kind)
    size = tensor.numel() * tensor.element_size()
    flipped = tensor.clone()
    bit = data.draw(st.integers(0, 8 * size - 1))
    flipped.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    for of_tensors in (digests, lambda tensors: integer_sums([t.reshape(-1) for t in tensors])):
        before, after = of_tensors([tensor, tensor]), of_tensors([tensor, flipped])
        assert before[0] == before[1] == after[0] != after[1]


def test_tensors_of_any_shape_have_a_digest() -> None:
    """Scalars, empty and transposed ones."""
    tensors = [torch.tensor(1.0), torch.empty(0), torch.arange(6.0).reshape(2, 3).T, torch.ones(2, requires_grad=True)]
    assert len(set(digests(tensors))) == len(set(integer_sums([t.reshape(-1) for t in tensors]))) == 4


def test_the_message_tells_who_and_since_when() -> None:
    sure = describe(Opinion((1,), True), ["a", "b", "c"], "head.weight", step=20, agreed=10)
    assert "after step 20 the parameters of rank 1 on b are not those of the other ranks" in sure
    assert "'head.weight'" in sure and "All were the same after step 10" in sure
    unsure = describe(Opinion((0, 1), False), ["a", "b"], "w", step=20, agreed=None)
    assert "rank 0 on a, rank 1 on b differ, and no majority tells who is wrong" in unsure and "began so" in unsure
