"""What else decides the bits of a result must be the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from elastic_runner.errors import ConfigError
from elastic_runner.train.kernels import pin_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leaves the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_peer(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """A world of two; the peer's processor is ``kind``, or the same."""

    def gather(kinds: list[str | None], mine: str) -> None:
        kinds[:] = [mine, kind or mine]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)


def test_ranks_that_are_alike_compute_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with_peer(monkeypatch, None)
    torch.set_num_threads(2)
    pin_kernels(CPU)
    assert torch.get_num_threads() == 1


def test_another_processor_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_peer(monkeypatch, "AVX, torch 1.0")
    with pytest.raises(ConfigError, match=r"rank 1: AVX, torch 1\.0"):
        pin_kernels(CPU)
