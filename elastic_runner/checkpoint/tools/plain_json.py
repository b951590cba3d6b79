"""Plain data as JSON and back, to the last bit and type: tuples, bytes, NaN, keys that are no strings, small tensors.

What JSON has itself stays as it is, so that people can read it; all else is ``{"$": kind, "v": value}``.
"""

from __future__ import annotations

import base64
import collections
import struct
from typing import Any

import torch

from elastic_runner.errors import Damaged, StateError

_KIND, _VALUE = "$", "v"
_SAFE_INTEGER = 2**53  # above it, JSON readers in other languages round


def to_json(value: Any) -> Any:
    """``value`` as what ``json.dumps`` takes. Raises StateError for what is not plain data."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < _SAFE_INTEGER else _tagged("int", hex(value))
    if type(value) is float:
        is_number = value - value == 0
        return value if is_number else _tagged("float", struct.pack(">d", value).hex())
    if type(value) is list:
        return [to_json(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value) and _KIND not in value:
        return {key: to_json(item) for key, item in value.items()}
    return _tagged(*_encode(value))


def _encode(value: Any) -> tuple[str, Any]:
    kind = type(value)
    if kind in (dict, collections.Counter, collections.OrderedDict):
        return kind.__name__, [[to_json(key), to_json(item)] for key, item in value.items()]
    if kind is tuple:
        return "tuple", [to_json(item) for item in value]
    if kind is set:
        return "set", [to_json(item) for item in value]
    if kind is complex:
        return "complex", struct.pack(">dd", value.real, value.imag).hex()
    if kind is bytes:
        return "bytes", base64.b64encode(value).decode()
    if kind is torch.Size:
        return "size", list(value)
    if kind in (torch.dtype, torch.device):
        return kind.__name__, str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        dtype = str(whole.dtype).removeprefix("torch.")
        return "tensor", [dtype, list(whole.shape), base64.b64encode(data).decode()]
    raise StateError(f"a {kind.__module__}.{kind.__qualname__} is not plain data and cannot be written as JSON")


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, _VALUE: value}


def from_json(value: Any) -> Any:
    """The inverse of ``to_json``. Raises Damaged for what it cannot have written."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: from_json(item) for key, item in value.items()}
    try:
        return _decode(value[_KIND], value[_VALUE])
    except (KeyError, ValueError, TypeError, RuntimeError, struct.error) as error:
        raise Damaged(f"plain data of kind {value[_KIND]!r} cannot be read: {error}") from None


def _decode(kind: str, value: Any) -> Any:
    simple = {
        "int": lambda: int(value, 16),
        "float": lambda: struct.unpack(">d", bytes.fromhex(value))[0],
        "complex": lambda: complex(*struct.unpack(">dd", bytes.fromhex(value))),
        "bytes": lambda: base64.b64decode(value, validate=True),
        "size": lambda: torch.Size(value),
        "device": lambda: torch.device(value),
        "dtype": lambda: dtype_named(value),
        "tuple": lambda: tuple(from_json(item) for item in value),
        "set": lambda: {from_json(item) for item in value},
        "dict": lambda: {from_json(key): from_json(item) for key, item in value},
        "Counter": lambda: collections.Counter({from_json(key): from_json(item) for key, item in value}),
        "OrderedDict": lambda: collections.OrderedDict((from_json(key), from_json(item)) for key, item in value),
        "tensor": lambda: _tensor(*value),
    }
    if kind not in simple:
        raise Damaged(f"plain data of unknown kind {kind!r}")
    return simple[kind]()


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(data, validate=True))
    if not raw:
        return torch.empty(shape, dtype=dtype_named(dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype_named(dtype)).reshape(shape)


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of this name. Raises Damaged."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise Damaged(f"{name!r} is not a type that this torch has")
    return found
