"""The manifest says what it is, notices any change of itself, and is ordered by what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Manifest, Torn, check_file, decode, encode, list_checkpoints
from elastic_runner.checkpoint.pruning import plan_pruning
from elastic_runner.checkpoint.retention import retention_of
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import Damaged, StorageError
from elastic_runner.storage import LocalStorage, Written


def manifest(step: int = 1, attempt: int = 1) -> Manifest:
    files = tuple(
        Written(path=f"data-{attempt:06d}/{name}", size=size, digest="d") for name, size in (("a", 3), ("b", 4))
    )
    return Manifest(step=step, attempt=attempt, world_size=2, format="sharded", files=files, created=1e9)


def test_round_trip() -> None:
    one = manifest()
    assert decode(encode(one), "m") == one
    assert one.size == 7
    assert one.path == "step-0000000001/manifest-000001.json"
    assert set(json.loads(encode(one))) == {
        "version", "step", "attempt", "world_size", "format", "files", "versions", "created", "metrics", "non_finite",
        "digest",
    }  # fmt: skip


def test_metrics_and_what_is_not_finite_come_back() -> None:
    one = replace(manifest(), metrics={"loss": 0.5, "bad": math.nan, "worse": math.inf}, non_finite=("model.a",))
    assert one.metrics == {"loss": 0.5}
    assert decode(encode(one), "m") == one
    json.loads(encode(one), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_manifest_of_before_these_were_written_is_read() -> None:
    body = json.loads(encode(manifest()))
    old = {name: value for name, value in body.items() if name not in ("metrics", "non_finite", "digest")}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(old, sort_keys=True).encode())
    read = decode(json.dumps({**old, "digest": digest}).encode(), "m")
    assert read == manifest() and (read.metrics, read.non_finite) == ({}, ())


def test_any_flipped_bit_and_any_cut_is_noticed() -> None:
    data = encode(manifest())
    body = json.loads(data)
    for position in range(len(data)):
        flipped = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        try:
            same = json.loads(flipped) == body  # white space
        except ValueError:
            same = False
        if not same:
            with pytest.raises(Damaged) as caught:
                decode(flipped, "m")
            assert not isinstance(caught.value, Torn), "it was committed once"
        for cut in (data[:position], data[:position] + bytes(len(data) - position)):
            with pytest.raises(Torn, match="m is torn"):
                decode(cut, "m")


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "step as text": ({"step": "1"}, "step"),
    "step below 0": ({"step": -1}, "step"),
    "step as a truth": ({"step": True}, "step"),
    "no attempt": ({"attempt": None}, "attempt"),
    "unknown format": ({"format": "zip"}, "format"),
    "created as text": ({"created": "x"}, "created"),
    "created never": ({"created": math.nan}, "created"),
    "metric as a list": ({"metrics": {"loss": [1]}}, "metrics.loss"),
    "no ranks": ({"world_size": 0}, "world_size"),
    "files as a table": ({"files": {}}, "files"),
    "file without a digest": ({"files": [{"path": "data-000001/a", "size": 3}]}, "files.0.digest"),
    "size as text": ({"files": [{"path": "data-000001/a", "size": "3", "digest": "d"}]}, "files.0.size"),
    "size below 0": ({"files": [{"path": "data-000001/a", "size": -3, "digest": "d"}]}, "no file of its checkpoint"),
    "more": ({"surprise": 1}, "surprise"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_manifest_with_odd_content_is_damaged(kind: str) -> None:
    changes, said = ODD[kind]
    with pytest.raises(Damaged, match=said):
        decode(signed({**json.loads(encode(manifest())), **changes}), "m")


@pytest.mark.parametrize(
    "path",
    ["../../../etc/hostname", "data-000001/../x", "data-000001/a/b", "data-000001/", "data-000001/..", "data-000001",
     "data-000002/a", "/etc/hostname", "a", "", "data-1/a"],
)  # fmt: skip
def test_a_manifest_names_files_of_its_own_data_directory_only(path: str) -> None:
    files = [{"path": path, "size": 3, "digest": "d"}]
    with pytest.raises(Damaged, match="is no file of its checkpoint"):
        decode(signed({**json.loads(encode(manifest())), "files": files}), "m")


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":' * 100_000, b"[1, 2]", b"\xff\xfe\x00", b"{}", b"noise", b"{noise", b"9" * 5000]
)
def test_what_is_no_manifest_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data, "m")


def signed(body: dict[str, Any]) -> bytes:
    """With a digest that fits."""
    body = {name: value for name, value in body.items() if name != "digest"}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "digest": digest}).encode()


def test_a_manifest_that_cannot_be_read_is_rejected_with_its_reason(tmp_path: Path) -> None:
    class Failing(LocalStorage):
        def read(self, path: str) -> bytes:
            if path == manifest(5).path:
                raise StorageError(f"read {path}: [Errno 5] Input/output error")
            return super().read(path)

    storage = Failing(tmp_path)
    for step in (1, 5, 9):
        storage.put(manifest(step).path, encode(manifest(step)))
        storage.put(f"{paths.data_directory(step, 1)}/a", b"abc")
    listing = list_checkpoints(storage)
    assert [m.step for m in listing.manifests] == [9, 1]
    (rejected,) = listing.rejected
    assert rejected.path == manifest(5).path and "cannot be read" in rejected.reason and "Errno 5" in rejected.reason
    retention = retention_of(CheckpointConfig(keep=1))
    plan = plan_pruning(listing, retention, listing.manifests[0], 2)
    assert plan.sweep == () and paths.step_directory(5) not in plan.empty, "it is there, whatever it says"


def test_newest_first_by_step_then_attempt(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    wanted = [(2500, 1), (100, 3), (100, 2), (9, 7)]
    for step, attempt in sorted(wanted):
        storage.put(manifest(step, attempt).path, encode(manifest(step, attempt)))
    for name in ("step-0000000100/manifest-1.json", "step-0000000100/notes", "latest/manifest-000001.json", "file"):
        storage.put(name, b"foreign")
    listing = list_checkpoints(storage)
    assert [(m.step, m.attempt) for m in listing.manifests] == wanted
    assert listing.rejected == ()


def test_a_file_is_checked_by_size_and_by_digest(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with storage.writer("step-0000000001/data-000001/a") as stream:
        stream.write(b"abc")
    file = stream.written("data-000001/a")
    assert check_file(storage, manifest(), file, digests=True) is None
    storage.put("step-0000000001/data-000001/a", b"abd")
    assert check_file(storage, manifest(), file, digests=False) is None
    assert "has other bytes" in str(check_file(storage, manifest(), file, digests=True))
    storage.put("step-0000000001/data-000001/a", b"abcd")
    assert "has 4 bytes instead of 3" in str(check_file(storage, manifest(), file, digests=False))
    storage.delete("step-0000000001/data-000001/a")
    assert "is missing" in str(check_file(storage, manifest(), file, digests=False))
