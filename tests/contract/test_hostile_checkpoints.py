"""Files that somebody else has written, with digests that fit: refused as damage or code, by every reader alike."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from elastic_runner import paths
from elastic_runner.checkpoint import layout
from elastic_runner.checkpoint.archive import load_plain
from elastic_runner.checkpoint.metadata import METADATA, parse_metadata
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.errors import Damaged, NotData, NoUsableCheckpoint
from elastic_runner.storage import Storage
from tests.support.checkpointing import CheckpointingPlace, checkpointer, make_state, storage_of, train
from tests.unit.test_torch_private import building

DIRECTORY = paths.data_directory(1, 1)


def put_signed(storage: Storage, name: str, data: bytes) -> None:
    """Replace a data file of step 1, and its digest in the manifest."""
    storage.put(f"{DIRECTORY}/{name}", data)
    path = paths.manifest(1, 1)
    body = json.loads(storage.read(path))
    del body["digest"]
    for file in body["files"]:
        if file["path"].endswith(f"/{name}"):
            file.update(size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    storage.put(path, json.dumps({**body, "digest": digest}).encode())


def assert_refused(place: CheckpointingPlace, reason: str, kind: type[Exception] = Damaged) -> None:
    """By a restore and by the tools."""
    with pytest.raises(kind, match=reason), opened(place.run_url, {}):
        pass
    with pytest.raises(NoUsableCheckpoint if kind is Damaged else kind, match=reason):
        checkpointer(make_state(nn.Linear(64, 64)), place).restore()


@pytest.fixture
def saved(local: CheckpointingPlace, format: str, monkeypatch: pytest.MonkeyPatch) -> CheckpointingPlace:
    """Step 1 of a model whose weight lies in 64 pieces."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 256)
    state = make_state(nn.Linear(64, 64))
    train(state, 1, features=64)
    checkpointer(state, local, format).save()
    return local


def weight(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def lacking(metadata: Metadata) -> None:
    weight(metadata).chunks.pop()


def twice(metadata: Metadata) -> None:
    chunks = weight(metadata).chunks
    chunks[5] = chunks[4]


def shifted(metadata: Metadata) -> None:
    chunks = weight(metadata).chunks
    chunks[5] = ChunkStorageMetadata(offsets=torch.Size([5, 1]), sizes=chunks[5].sizes)


def flat(metadata: Metadata) -> None:
    chunks = weight(metadata).chunks
    chunks[5] = ChunkStorageMetadata(offsets=torch.Size([5]), sizes=torch.Size([64]))


def across(metadata: Metadata) -> None:
    """The volume is right; one row is there twice, another not at all."""
    chunks = weight(metadata).chunks
    chunks[4] = ChunkStorageMetadata(offsets=torch.Size([4, 0]), sizes=torch.Size([2, 32]))
    chunks[5] = ChunkStorageMetadata(offsets=torch.Size([5, 0]), sizes=torch.Size([1, 64]))


def nowhere(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("model.weight", torch.Size([5, 0]))]


def elsewhere(path: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = MetadataIndex("model.weight", torch.Size([5, 0]))
        metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=path)

    return change


def field(where: str, **values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = MetadataIndex("model.weight", torch.Size([5, 0]))
        entry = weight(metadata)
        target = {
            "top": metadata, "entry": entry, "properties": entry.properties, "info": metadata.storage_data[index],
            "chunk": entry.chunks[5],
        }[where]  # fmt: skip
        for name, value in values.items():
            setattr(target, name, value)

    return change


WHOLE = "model.weight: its parts are not the whole of it"
METADATAS: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a chunk is missing": (lacking, WHOLE),
    "a chunk twice": (twice, WHOLE),
    "a chunk out of bounds": (shifted, WHOLE),
    "a chunk of other dimensions": (flat, WHOLE),
    "chunks overlap": (across, WHOLE),
    "a chunk lies nowhere": (nowhere, "model.weight: it is not said where"),
    "a file above": (elsewhere("../../../secret.pt"), "not the name of a file"),
    "a file of the root": (elsewhere("/etc/hostname"), "not the name of a file"),
    "no file name": (elsewhere(""), "not the name of a file"),
    "the directory": (elsewhere(".."), "not the name of a file"),
    "a file not of the checkpoint": (elsewhere("other.distcp"), r"other\.distcp is asked for by .* not named by"),
    "storage_data None": (field("top", storage_data=None), "not a table"),
    "state_dict_metadata a list": (field("top", state_dict_metadata=[1]), "not a table"),
    "size an int": (field("entry", size=64), "in place of a size"),
    "size of text": (field("entry", size=("a",)), "in place of a size"),
    "chunks None": (field("entry", chunks=None), "in place of a list"),
    "a chunk's size as text": (field("chunk", sizes="64"), "in place of a size"),
    "properties None": (field("entry", properties=None), "in place of a tensor's properties"),
    "dtype as text": (field("properties", dtype="float32"), "in place of a tensor's type"),
    "offset as text": (field("info", offset="0"), "in place of a number"),
    "offset below 0": (field("info", offset=-1), "in place of a number"),
    "length a float": (field("info", length=1.5), "in place of a number"),
    "path an int": (field("info", relative_path=7), "in place of a name"),
    "compressed": (field("info", transform_descriptors=["zstd"]), "extension of DCP"),
}


@pytest.mark.parametrize("format", ["sharded"])
@pytest.mark.parametrize("kind", METADATAS)
def test_metadata_that_are_not_right(kind: str, saved: CheckpointingPlace) -> None:
    change, reason = METADATAS[kind]
    storage = storage_of(saved)
    metadata = pickle.loads(storage.read(f"{DIRECTORY}/{METADATA}"))
    change(metadata)
    put_signed(storage, METADATA, pickle.dumps(metadata))
    assert_refused(saved, reason)


@pytest.mark.parametrize("format", ["sharded"])
def test_a_file_above_is_never_read(saved: CheckpointingPlace, tmp_path: Path) -> None:
    """Neither through .metadata nor through the manifest."""
    storage, path = storage_of(saved), paths.manifest(1, 1)
    body = json.loads(storage.read(path))
    del body["digest"]
    body["files"].append({"path": "../../secret.pt", "size": 1, "digest": "x"})
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    storage.put(path, json.dumps({**body, "digest": digest}).encode())
    with pytest.raises(NoUsableCheckpoint, match=r"'../../secret.pt' \(1 bytes\), which is no file of its checkpoint"):
        checkpointer(make_state(nn.Linear(64, 64)), saved).restore()


@pytest.mark.parametrize("name", [("pathlib", "PosixPath"), ("torch", "Size"), ("collections", "OrderedDict")])
def test_a_pickle_cannot_change_a_class(name: tuple[str, str]) -> None:
    before = Path.__truediv__, dict(vars(torch.Size))
    with pytest.raises(Damaged):
        parse_metadata(building(*name), METADATA)
    assert (Path.__truediv__, dict(vars(torch.Size))) == before
    assert Path("/run") / "x" == Path("/run/x")


def test_metadata_of_noise_are_damaged() -> None:
    good = pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}))
    assert parse_metadata(good, "x").storage_data == {}
    for data in (b"", b"noise", good[:-5], pickle.dumps({}), pickle.dumps(3), b"\x80\x04" + b"]" * 100 + b"."):
        with pytest.raises(Damaged, match="x cannot be read"):
            parse_metadata(data, "x")


def test_stock_checkpoints_are_opened(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(6.0).view(2, 3), "deep": [{"bias": torch.ones(2)}]}, "extra": {"a": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    with opened(str(tmp_path / "stock"), {}) as source:
        assert torch.equal(source.contents.rows("model.weight", 0, 2), state["model"]["weight"])  # type: ignore[index]
        assert "model.deep.0.bias" in source.contents.tensors


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: {name: value for name, value in tree.items() if name not in names}


def in_plain(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    keys = {key.replace("_", ".", 1): value for key, value in changes.items()}
    return lambda tree: {**tree, "plain": {**tree["plain"], **keys}}


TREES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no plain": (without("plain"), "has no tables"),
    "no model": (without("model"), "has no tables"),
    "no tensors": (without("tensors"), "has no table 'tensors'"),
    "a list": (lambda tree: [tree], "has no tables"),
    "model a list": (lambda tree: {**tree, "model": [1]}, "has no tables"),
    "a weight is text": (lambda tree: {**tree, "model": {**tree["model"], "weight": "x"}}, "weight is a str"),
    "a tensor is text": (lambda tree: {**tree, "tensors": {**tree["tensors"], "x": "y"}}, "has no table 'tensors'"),
    "keys are numbers": (lambda tree: {**tree, "plain": {**tree["plain"], 1: 2}}, "has no tables"),
    "no aliases": (lambda tree: {**tree, "plain": without("model.aliases")(tree["plain"])}, "not those of a training"),
    "aliases a list": (in_plain(model_aliases=["x"]), "not those of a training"),
    "groups a table": (in_plain(optimizer_param_groups={}), "not those of a training"),
    "groups without names": (in_plain(optimizer_param_groups=[{"lr": 1}]), "not those of a training"),
    "a reference to nothing": (in_plain(state_data="elastic_runner.tensor:nowhere"), "ask for nowhere"),
}


OF_BOTH = [kind for kind in TREES if "aliases" in kind or "groups" in kind or "reference" in kind]


@pytest.mark.parametrize(
    ("kind", "format"), [(kind, "full") for kind in TREES] + [(kind, "sharded") for kind in OF_BOTH]
)
def test_plain_data_that_are_not_right(kind: str, saved: CheckpointingPlace, format: str) -> None:
    change, reason = TREES[kind]
    storage = storage_of(saved)
    if format == "full":
        tree = change(torch.load(io.BytesIO(storage.read(f"{DIRECTORY}/full.pt")), weights_only=True))
        put_signed(storage, "full.pt", archive(tree))
    else:
        change_plain(storage, lambda plain: change({"plain": plain})["plain"])
    assert_refused(saved, reason)


def change_plain(storage: Storage, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    metadata = parse_metadata(storage.read(f"{DIRECTORY}/{METADATA}"), METADATA)
    held = storage.read(f"{DIRECTORY}/__0_0.distcp")
    found = {index: info for index, info in metadata.storage_data.items() if info.relative_path == "__0_0.distcp"}
    archives = {index.fqn: io.BytesIO(held[info.offset : info.offset + info.length]) for index, info in found.items()}
    changed = change({key: load_plain(data, key) for key, data in archives.items()})
    data = b""
    for index, info in found.items():
        if index.fqn in changed:
            piece = archive(changed[index.fqn])
            metadata.storage_data[index] = replace(info, offset=len(data), length=len(piece))
            data += piece
        else:
            del metadata.storage_data[index]
    put_signed(storage, "__0_0.distcp", data)
    put_signed(storage, METADATA, pickle.dumps(metadata))


def archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Payload:
    def __reduce__(self) -> Any:
        return print, ("never",)


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"noise" * 20, Damaged, "x cannot be read: it is no torch.save archive"),
        (bytes(100), Damaged, "x cannot be read: it is no torch.save archive"),
        (b"PK\x03\x04" + bytes(100), Damaged, "failed finding central directory"),
        (archive(Payload()), NotData, "was not loaded: Unsupported global: GLOBAL print$"),
        (pickle.dumps(Payload(), 5), NotData, "holds more than tensors and plain data"),
    ],
)
def test_no_message_says_how_to_run_it_all_the_same(data: bytes, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        load_plain(io.BytesIO(data), "x")
    for advice in ("weights_only", "Re-running", "safe_globals", "internal"):
        assert advice not in str(caught.value)
    if said != "failed finding central directory":
        assert caught.value.__suppress_context__, "nor does a traceback"
