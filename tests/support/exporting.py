"""States of every kind of tensor, and both ways through the files they are exported to."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_runner.checkpoint.tools.contents import Contents
from elastic_runner.checkpoint.tools.export import Exported, Target, export
from elastic_runner.checkpoint.tools.importing import Imported, import_state
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.checkpoint.tools.written import raw
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import FixedData, Keeper

KINDS: tuple[Target, ...] = ("safetensors", "torch", "dcp")
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHTS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
DTYPES = (*REALS, *EIGHTS, *INTEGERS, torch.complex64, torch.complex128)


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit random, so that NaNs with payloads are among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


class Everything(nn.Module):
    """Each dtype, empty, without dimensions, not contiguous, with views, with NaN, tied, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5, bias=False)
        self.b = nn.Linear(5, 5, bias=False)
        self.b.weight = self.a.weight
        self.low = nn.Parameter(torch.randn(3, 4).to(torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(3, 7).T)
        for dtype in DTYPES:
            self.register_buffer("of_" + str(dtype).removeprefix("torch."), noise(dtype, 3, 2))
        self.register_buffer("flags", torch.rand(9) > 0.5)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("nothing", torch.empty(2, 0, dtype=torch.complex64))
        self.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("one_eight", torch.tensor(1.5).to(torch.float8_e5m2))
        self.register_buffer("view", torch.arange(100)[10:17:2])
        self.note: Any = {"n": 1, "t": torch.randn(2)}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).sum() + self.low.float().sum() + self.transposed.sum()


def plain() -> dict[str, Any]:
    """Plain data of every type that a checkpoint holds."""
    return {
        "tuple": (1, (2.5, None), [True, "ü", "\ud800"]),
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "numbers": [float("inf"), float("-inf"), -0.0, 2**80, -(2**63), 1e-320, 1 + 2j, complex(-0.0, float("inf"))],
        "types": [torch.bfloat16, torch.Size([2, 0]), torch.device("cuda:1")],
        "counter": collections.Counter(a=3),
        "set": {1, "x", (2, None)},
        "$": "a key that the encoding uses",
        None: 1,
        2: {True: "t"},
        (1, "a"): [],
        "tensors": [noise(dtype, 2) for dtype in DTYPES],
    }


def make_everything(seed: int) -> TrainState:
    """A state of all that, trained for two steps; another seed, other values."""
    torch.manual_seed(seed)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    state = TrainState(model=model, optimizer=optimizer, data=FixedData(seed), mine=Keeper(plain()))  # type: ignore[arg-type]
    state.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(2):
        state.step += 1
        optimizer.zero_grad()
        model(torch.randn(4, 5)).backward()
        optimizer.step()
        state.schedule.step()
    return state


def bits(value: Any) -> Any:
    """A nested value in which two are equal when they are the same to the last bit and type."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().resolve_conj().contiguous()
        return "tensor", value.dtype, tuple(value.shape), bytes(raw(whole))
    if isinstance(value, dict):
        return type(value), {(type(key), key): bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    if isinstance(value, set):
        return type(value), sorted(repr(item) for item in value)
    return type(value), repr(value)


def bits_of_training(state: TrainState) -> Any:
    """All of a state, as ``bits``."""
    parts = {name: part.state_dict() for name, part in state.others().items()}
    return bits([state.model.state_dict(), state.optimizer.state_dict(), parts, state.step])


def bits_of_contents(contents: Contents) -> Any:
    """All of it, read."""
    tensors = {
        key: (entry.dtype, entry.shape, b"".join(bytes(raw(band)) for band in contents.bands(key)))
        for key, entry in contents.tensors.items()
    }
    return tensors, bits(contents.plain)


def exported(
    url: str, destination: str | Path, to: Target, options: dict[str, str] | None = None, **how: Any
) -> Exported:
    """Export the newest checkpoint, or that of URL@STEP."""
    with opened(url, options or {}) as source:
        return export(source, str(destination), options or {}, to=to, **how)


def imported(
    file: str | Path, url: str | Path, options: dict[str, str] | None = None, *, keep_names: bool = False, **how: Any
) -> Imported:
    """Import a file."""
    with opened(str(file), options or {}, keep_names=keep_names) as source:
        return import_state(source, str(url), options or {}, **how)


def contents_of(url: str | Path, options: dict[str, str] | None = None) -> Any:
    """``bits_of_contents`` of what is there."""
    with opened(str(url), options or {}) as source:
        return bits_of_contents(source.contents)
