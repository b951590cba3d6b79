"""The device of a local rank, on a machine with accelerators that has none: torch's meta device stands in for them."""

from __future__ import annotations

import pytest
import torch

from elastic_runner.device import choose_device, open_device
from elastic_runner.errors import ConfigError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What two accelerators are told."""
    calls: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(index))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: calls.append(device) or zeros(*size, device=device))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    return calls


def test_a_device_is_opened_that_the_worker_will_choose(told: list[object]) -> None:
    assert choose_device(1) == torch.device("meta", 1) and told == [1]
    told.clear()
    open_device(1)
    assert told == [1, torch.device("meta", 1), "synchronize meta:1"]
    with pytest.raises(ConfigError, match="local rank 2 has no meta device: this node has 2; start at most 2 workers"):
        open_device(2)


def test_without_accelerators_there_is_nothing_to_open(told: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    open_device(7)
    assert told == []
