"""Reading the pickle of DCP's ``.metadata`` without letting it touch anything.

An allow-list of classes is not enough: a pickle can set attributes of the very classes that it may name. So every name
gives a stand-in that keeps what it is given, and the real objects are made here from those, each field checked.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from elastic_runner.errors import NotData

_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DCP = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_FIELDS = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
ALLOWED = {
    *(_DCP + name for name in (*_FIELDS, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    _INFO,
    "torch.serialization._get_layout",
    # Where stock DCP wrote it; the second is its name in Python 3.13.
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    # By which Python 3.11.0 to 3.11.3 (Debian 12) wrote the member of an enumeration, here a memory format.
    "builtins.getattr",
    "torch.Size",
    *_DTYPES,
}
"""Names that the metadata of stock DCP ask for."""


class StandIn:
    """What a pickle says of an object: how it is made, and its state."""

    origin = ""
    """The name that the pickle asked for."""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> StandIn:
        """Keep what it is made from."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    # Also what keeps a pickle from setting attributes of the class: called without an instance, it raises.
    def __setstate__(self, state: Any) -> None:
        self.state = state


_STAND_INS = {name: type(name.rpartition(".")[2], (StandIn,), {"origin": name}) for name in ALLOWED}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # a type of C, which has no attributes to set
        if (found := _STAND_INS.get(f"{module}.{name}")) is not None:
            return found
        raise NotData(f"it asks for {module}.{name}, which is not part of checkpoint metadata; it was not loaded")


def unpickled(data: bytes) -> Metadata:
    """The metadata, without what only DCP's own planner wants. Raises NotData; for what is not right, anything."""
    fields = _state(_Unpickler(io.BytesIO(data)).load(), _DCP + "Metadata")
    entries, stored = fields["state_dict_metadata"], fields["storage_data"]
    if type(entries) is not dict or type(stored) is not dict:
        raise ValueError("it is not a table of what is stored")
    return Metadata(
        state_dict_metadata={_text(key): _entry(value) for key, value in entries.items()},
        storage_data={_index(key): _info(value) for key, value in stored.items()},
    )


def _state(value: Any, origin: str) -> dict[str, Any]:
    if not isinstance(value, StandIn) or value.origin != origin or type(value.state) is not dict:
        raise ValueError(f"there is a {_kind(value)} in place of a {origin.rpartition('.')[2]}")
    return value.state


def _kind(value: Any) -> str:
    return value.origin if isinstance(value, StandIn) else type(value).__name__


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, StandIn) and value.origin == _DCP + "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _state(value, _DCP + "TensorStorageMetadata")
    chunks = [_state(chunk, _DCP + "ChunkStorageMetadata") for chunk in _list(fields["chunks"])]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(fields["properties"])),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(c["offsets"]), sizes=_size(c["sizes"])) for c in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, _DCP + "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _info(value: Any) -> _StorageInfo:
    fields = _state(value, _INFO)
    name = _text(fields["relative_path"])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file beside it")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name} was written through an extension of DCP that is not known here")
    return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, StandIn) or value.origin != _DCP + "TensorProperties" or type(value.state) is not tuple:
        raise ValueError(f"there is a {_kind(value)} in place of a tensor's properties")
    named = value.state[0]
    if not isinstance(named, type) or not issubclass(named, StandIn):
        raise ValueError(f"there is a {_kind(named)} in place of a tensor's type")
    return _DTYPES[named.origin]


def _size(value: Any) -> torch.Size:
    if not isinstance(value, StandIn) or value.origin != "torch.Size":
        raise ValueError(f"there is a {_kind(value)} in place of a size")
    (numbers,) = value.args
    return torch.Size([_count(number) for number in _list(numbers)])


def _list(value: Any) -> list[Any]:
    if type(value) not in (list, tuple):
        raise ValueError(f"there is a {_kind(value)} in place of a list")
    return list(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"there is a {_kind(value)} in place of a name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"there is {value!r:.50} in place of a number")
    return value
