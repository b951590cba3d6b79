"""The safetensors format, written and read by rows: a length, a JSON header, then bytes.

Model tensors go by their names in the model's state dict, all else by its key. What the format has no place for is
in its metadata: plain data as JSON, tied names (``alias -> name``, as ``safetensors.torch.load_model`` wants them),
and types that not every reader has, whose tensors are stored as reals (complex) or bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_runner.checkpoint.tools.contents import ALIASES, EXTRA_STATE, MODEL, Box, Contents, Entry
from elastic_runner.checkpoint.tools.plain_json import dtype_named, from_json, to_json
from elastic_runner.checkpoint.tools.stored import RangeFile, StoredTensor
from elastic_runner.checkpoint.tools.written import Sink, Tick, write_tensor
from elastic_runner.errors import Damaged

SUFFIX = ".safetensors"
OURS = "elastic_runner"
"""The metadata entry that makes a file one of ours."""
VERSION = 1
_LARGEST_HEADER = 100_000_000  # the reference implementation's

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Later versions of the format have these; they are read, and written as something older.
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_REALS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def write_safetensors(sink: Sink, contents: Contents, step: int | None, tick: Tick) -> None:
    """One file with everything in ``contents``."""
    names = _names(contents)
    # Widest types first, as the reference implementation does, so that every tensor is aligned.
    order = sorted(contents.tensors, key=lambda key: -_stored_as(contents.tensors[key])[0].itemsize)
    header: dict[str, Any] = {"__metadata__": _metadata(contents, names, step)}
    end = 0
    for key in order:
        entry = contents.tensors[key]
        dtype, shape = _stored_as(entry)
        header[names[key]] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [end, end + entry.nbytes]}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink.write(struct.pack("<Q", len(text)) + text)
    for key in order:
        write_tensor(contents, key, sink, tick)


def _stored_as(entry: Entry) -> tuple[torch.dtype, list[int]]:
    if entry.dtype in _NAMES:
        return entry.dtype, list(entry.shape)
    if entry.dtype in _REALS:
        return _REALS[entry.dtype], [*entry.shape, 2]
    return torch.uint8, [*entry.shape, entry.dtype.itemsize]


def _names(contents: Contents) -> dict[str, str]:
    """Name in the file by key: the model's own for its tensors, whatever else is called the same stands back."""
    inside = contents.inside
    names = {k: k.removeprefix(MODEL) for k in contents.tensors if k.startswith(MODEL) and k not in inside}
    taken = {*names.values(), "__metadata__", *contents.plain.get(ALIASES, {})}
    for key in contents.tensors:
        if key not in names:
            name = key
            while name in taken:
                name += "'"
            names[key] = name
            taken.add(name)
    return names


def _metadata(contents: Contents, names: Mapping[str, str], step: int | None) -> dict[str, str]:
    about = {
        "version": VERSION,
        "step": step,
        "keys": {name: key for key, name in names.items() if key != MODEL + name},
        "views": {
            names[key]: str(entry.dtype).removeprefix("torch.")
            for key, entry in contents.tensors.items()
            if entry.dtype not in _NAMES
        },
        "order": list(contents.tensors),
        "plain": to_json(contents.plain),
    }
    return {**contents.plain.get(ALIASES, {}), "format": "pt", OURS: json.dumps(about)}


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """What a safetensors file holds."""

    contents: Contents
    """Tensors and plain data; the tensors of a foreign file are the model's."""
    ours: bool
    """Whether ``write_safetensors`` wrote it."""
    step: int | None = None
    """The step that it says it is of."""


def read_safetensors(file: RangeFile) -> SafetensorsFile:
    """A safetensors file, only its header read. Raises Damaged."""
    header, start = _header(file)
    metadata = header.pop("__metadata__", {})
    entries = {name: _entry(file, name, about, start) for name, about in header.items()}
    if OURS not in metadata:
        known = {alias: name for alias, name in metadata.items() if name in entries and alias not in entries}
        plain = {ALIASES: known, EXTRA_STATE: {}}
        tensors = {MODEL + name: entry for name, entry in entries.items()}
        return SafetensorsFile(contents=Contents(tensors=tensors, plain=plain), ours=False)
    try:
        about = json.loads(metadata[OURS])
        if about["version"] != VERSION:
            raise Damaged(f"{file.path} has format version {about['version']}, this package reads {VERSION}")
        for name, dtype in about["views"].items():
            entries[name] = _viewed(file, entries[name], dtype_named(dtype), name)
        tensors = {about["keys"].get(name, MODEL + name): entry for name, entry in entries.items()}
        ordered = {key: tensors[key] for key in about["order"]}
        plain = from_json(about["plain"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{file.path}: its metadata cannot be read: {type(error).__name__}: {error}") from None
    return SafetensorsFile(contents=Contents(tensors=ordered, plain=plain), ours=True, step=about["step"])


def _header(file: RangeFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        raise Damaged(f"{file.path} is too short for a safetensors file")
    (length,) = struct.unpack("<Q", file.read_at(0, 8))
    if length > min(_LARGEST_HEADER, file.size - 8):
        raise Damaged(f"{file.path} is cut short, or no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(bytes(file.read_at(8, length)))
    except ValueError as error:
        raise Damaged(f"{file.path} is no safetensors file: its header is not JSON: {error}") from None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged(f"{file.path} is no safetensors file: its header is not a table of tensors")
    return header, 8 + length


def _entry(file: RangeFile, name: str, about: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = _DTYPES[about["dtype"]], tuple(about["shape"]), about["data_offsets"]
        fits = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and start + end <= file.size
        if not fits or end - begin != math.prod(shape) * dtype.itemsize:
            raise Damaged(f"{file.path}: {name} does not lie within the file, which is cut short or damaged")
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{file.path}: {name} has a header that cannot be read: {error}") from None
    return _made(file, dtype, shape, start + begin)


def _made(file: RangeFile, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Entry:
    strides = torch.empty(shape, device="meta").stride()
    source = StoredTensor(file=file, offset=offset, dtype=dtype, shape=shape, strides=strides)
    box = Box(offsets=(0,) * len(shape), sizes=shape, file=file.path, source=source)
    return Entry(shape=shape, dtype=dtype, boxes=(box,))


def _viewed(file: RangeFile, entry: Entry, dtype: torch.dtype, name: str) -> Entry:
    """The same bytes as the type they were before they were written as something older."""
    source = entry.boxes[0].source
    width = entry.shape[-1] * entry.dtype.itemsize if entry.shape else 0
    if not isinstance(source, StoredTensor) or width != dtype.itemsize:
        raise Damaged(f"{file.path}: {name} is not stored as a {dtype}")
    return _made(file, dtype, entry.shape[:-1], source.offset)
