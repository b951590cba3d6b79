"""The manifest says what it is, notices any change of itself, and is ordered by what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from elastic_runner.checkpoint.manifest import Manifest, check_file, decode, encode, list_checkpoints
from elastic_runner.errors import Damaged
from elastic_runner.storage import LocalStorage, Written


def manifest(step: int = 1, attempt: int = 1) -> Manifest:
    files = (Written(path="data-000001/a", size=3, digest="d"), Written(path="data-000001/b", size=4, digest="e"))
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
            with pytest.raises(Damaged):
                decode(flipped, "m")
        with pytest.raises(Damaged, match="m is torn"):
            decode(data[:position], "m")


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
