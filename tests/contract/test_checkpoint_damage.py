"""Damage is noticed, said in words, and the checkpoint before is used; code in a file is refused and never run."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Manifest, encode, list_checkpoints
from elastic_runner.checkpoint.marks import trust
from elastic_runner.checkpoint.tools.overview import look
from elastic_runner.errors import NotData, NoUsableCheckpoint
from elastic_runner.storage import Storage, Written
from tests.support.checkpointing import (
    CheckpointingPlace,
    assert_same_training,
    checkpointer,
    make_state,
    storage_of,
    train,
)


def two_checkpoints(place: CheckpointingPlace, format: str) -> Any:
    """Steps 1 and 2; returns the state after step 1."""
    state, kept = make_state(), make_state()
    saver = checkpointer(state, place, format)
    for target, steps in ((state, 1), (kept, 1)):
        train(target, steps)
    saver.save()
    train(state)
    saver.save()
    return kept


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "flipped bit": (flip, "has other bytes than were written"),
    "cut short": (lambda data: data[: len(data) // 2], "bytes instead of"),
    "longer": (lambda data: data + b"x", "bytes instead of"),
    "empty": (lambda data: b"", "has 0 bytes instead of"),
    "zero-filled": (lambda data: bytes(len(data)), "has other bytes than were written"),
    "missing": (lambda data: None, "is missing"),
}


def damage(storage: Storage, path: str, change: Callable[[bytes], bytes | None]) -> None:
    changed = change(storage.read(path))
    if changed is None:
        storage.delete(path)
    else:
        storage.put(path, changed)


def data_files(format: str) -> list[str]:
    return ["full.pt"] if format == "full" else ["__0_0.distcp", "__0_1.distcp", ".metadata"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_data_file_is_named_and_the_one_before_is_used(
    kind: str, place: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c28."""
    kept = two_checkpoints(place, format)
    storage = storage_of(place)
    change, reason = DAMAGES[kind]
    for file in data_files(format):
        path = f"{paths.data_directory(2, 1)}/{file}"
        good = storage.read(path)
        damage(storage, path, change)
        after = make_state(seed=1)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert checkpointer(after, place, format).restore() == 1
        assert f"checkpoint not used: step 2: {path}" in caplog.text
        assert reason in caplog.text
        assert_same_training(kept, after)
        storage.put(path, good)
        assert checkpointer(make_state(), place, format).restore() == 1, "it was marked, and nobody took that back"
        (manifest,) = (m for m in list_checkpoints(storage).manifests if m.step == 2)
        assert [reason in said for said in trust(storage, manifest)] == [True]
    assert checkpointer(make_state(), place, format).restore() == 2


def with_step(data: bytes, step: int) -> bytes:
    return data.replace(b'"step": 2', f'"step": {step}'.encode())


def resigned(data: bytes, **changes: Any) -> bytes:
    """A manifest with changed content and a digest that fits."""
    body = json.loads(data)
    body.pop("digest")
    for name, value in changes.items():
        body[name] = value
        if value is None:
            del body[name]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "digest": digest}).encode()


MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "torn": (lambda data: data[:100], "is torn"),
    "empty": (lambda data: b"", "is torn"),
    "zero-filled": (lambda data: bytes(len(data)), "is torn"),
    "not an object": (lambda data: b"[1, 2]", "is not a manifest"),
    "not text": (lambda data: b"\xff\xfe\x00", "is not a manifest"),
    "changed": (lambda data: with_step(data, 9), "was changed after it was written"),
    "of another step": (lambda data: resigned(data, step=1), r"is the manifest of another checkpoint (step 1)"),
    "of another attempt": (lambda data: resigned(data, attempt=4), "is no file of its checkpoint"),
    "of another version": (lambda data: resigned(data, version=99), "has format version 99, this package reads 1"),
    "without a version": (lambda data: resigned(data, version=None), "has format version None"),
    "without files": (lambda data: resigned(data, files=None), "is not as a manifest is: files: Field required"),
    "with more": (lambda data: resigned(data, surprise=1), "is not as a manifest is: surprise"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_not_right_is_named_and_the_one_before_is_used(
    kind: str, local: CheckpointingPlace, format: str
) -> None:
    kept = two_checkpoints(local, format)
    storage = storage_of(local)
    change, reason = MANIFESTS[kind]
    damage(storage, paths.manifest(2, 1), change)
    listing = list_checkpoints(storage)
    assert [m.step for m in listing.manifests] == [1]
    assert len(listing.rejected) == 1
    assert listing.rejected[0].path == paths.manifest(2, 1)
    assert paths.manifest(2, 1) in listing.rejected[0].reason
    assert reason in listing.rejected[0].reason
    after = make_state(seed=1)
    assert checkpointer(after, local, format).restore() == 1
    assert_same_training(kept, after)


def test_shards_of_two_steps_that_were_swapped_are_named(
    place: CheckpointingPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """They have the same size and are each a whole archive: only the digest tells."""
    two_checkpoints(place, "sharded")
    storage = storage_of(place)
    paths_of = [f"{paths.data_directory(step, 1)}/__0_1.distcp" for step in (1, 2)]
    one, two = (storage.read(path) for path in paths_of)
    assert len(one) == len(two) and one != two
    storage.put(paths_of[0], two)
    storage.put(paths_of[1], one)
    with caplog.at_level(logging.WARNING), pytest.raises(NoUsableCheckpoint):
        checkpointer(make_state(), place).restore()
    for path in paths_of:
        assert f"{path} has other bytes than were written" in caplog.text


def test_only_bad_manifests_are_no_fresh_start(local: CheckpointingPlace) -> None:
    two_checkpoints(local, "full")
    storage = storage_of(local)
    damage(storage, paths.manifest(1, 1), lambda data: b"{")
    damage(storage, paths.manifest(2, 1), lambda data: data.replace(b"full", b"FULL"))
    with pytest.raises(NoUsableCheckpoint, match=r"step-0000000002/manifest-000001.json was changed.*Repair one"):
        checkpointer(make_state(), local).restore()


def test_only_torn_manifests_are_a_fresh_start(local: CheckpointingPlace, caplog: pytest.LogCaptureFixture) -> None:
    """A kill in the middle of the commit, where a file cannot be made whole at once: nothing was committed."""
    two_checkpoints(local, "full")
    for step, cut in ((1, 0), (2, 100)):
        damage(storage_of(local), paths.manifest(step, 1), lambda data, cut=cut: data[:cut])  # type: ignore[misc]
    state, before = make_state(), make_state()
    assert checkpointer(state, local).restore() == 0
    assert caplog.text.count("is torn") == 2
    assert_same_training(before, state)


@pytest.mark.parametrize("change", [lambda data: bytes(len(data)), lambda data: b"\x00\x01garbage" + data[9:]])
def test_noise_that_only_loading_can_notice_is_damage_not_code(
    change: Callable[[bytes], bytes], local: CheckpointingPlace, format: str
) -> None:
    kept = two_checkpoints(local, format)
    for file in data_files(format):
        path = f"{paths.data_directory(2, 1)}/{file}"
        good = storage_of(local).read(path)
        damage(storage_of(local), path, change)
        after = make_state(seed=1)
        assert checkpointer(after, local, format, verify="sizes").restore() == 1, file
        assert_same_training(kept, after)
        storage_of(local).put(path, good)


def test_the_other_attempt_at_the_same_step_is_used(local: CheckpointingPlace, format: str) -> None:
    kept = make_state()
    train(kept)
    checkpointer(kept, local, format).save()
    local.attempt = 2
    checkpointer(kept, local, format).save()
    for file in data_files(format):
        storage_of(local).delete(f"{paths.data_directory(1, 2)}/{file}")
    after = make_state(seed=1)
    assert checkpointer(after, local, format).restore() == 1
    assert_same_training(kept, after)


def test_look_names_what_is_wrong(local: CheckpointingPlace, format: str) -> None:
    two_checkpoints(local, format)
    damage(storage_of(local), f"{paths.data_directory(2, 1)}/{data_files(format)[0]}", flip)
    damage(storage_of(local), paths.manifest(1, 1), lambda data: data[:50])
    rows = look(local.run_url, {}, digests=True)
    assert [(row.step, bool(row.unusable)) for row in rows] == [(2, True), (None, True)]
    assert "has other bytes" in rows[0].unusable
    assert "is torn" in rows[1].unusable
    assert [row.unusable for row in look(local.run_url, {}, digests=False) if row.step == 2] == [""]


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def replace_and_sign(storage: Storage, step: int, file: str, data: bytes) -> None:
    """What an attacker with write access does: the digest fits."""
    manifest = next(m for m in list_checkpoints(storage).manifests if m.step == step)
    storage.put(f"{paths.data_directory(step, 1)}/{file}", data)
    mine = Written(path=f"data-000001/{file}", size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
    files = tuple(mine if f.path == mine.path else f for f in manifest.files)
    storage.put(manifest.path, encode(replace(manifest, files=files)))


def hostile_metadata(storage: Storage, owned: Path) -> bytes:
    return pickle.dumps({"state_dict_metadata": Payload(owned)})


def hostile_field(storage: Storage, owned: Path) -> bytes:
    metadata = pickle.loads(storage.read(f"{paths.data_directory(2, 1)}/.metadata"))
    metadata.planner_data = Payload(owned)
    return pickle.dumps(metadata)


def torch_saved(payload: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(payload, stream)
    return stream.getvalue()


@pytest.mark.parametrize("make", [hostile_metadata, hostile_field])
def test_hostile_metadata_is_refused(
    make: Callable[[Storage, Path], bytes], local: CheckpointingPlace, tmp_path: Path
) -> None:
    """Case c43."""
    two_checkpoints(local, "sharded")
    storage, owned = storage_of(local), tmp_path / "owned"
    replace_and_sign(storage, 2, ".metadata", make(storage, owned))
    with pytest.raises(NotData, match=r"asks for posix\.mkdir.*was not loaded"):
        checkpointer(make_state(), local).restore()
    look(local.run_url, {}, digests=True)
    assert not owned.exists()


def hostile_items(storage: Storage, wanted: str, evil: bytes) -> tuple[str, bytes, bytes]:
    """A data file's name, its bytes, and the metadata of step 2 with one item replaced."""
    directory = paths.data_directory(2, 1)
    metadata = pickle.loads(storage.read(f"{directory}/.metadata"))
    (index,) = (index for index in metadata.storage_data if index.fqn == wanted)
    info = metadata.storage_data[index]
    data = storage.read(f"{directory}/{info.relative_path}")
    metadata.storage_data[index] = replace(info, offset=len(data), length=len(evil))
    return info.relative_path, data + evil, pickle.dumps(metadata)


@pytest.mark.parametrize("item", ["model.hidden.weight", "optimizer.param_groups", "state.data"])
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_hostile_item_is_refused(item: str, kind: str, local: CheckpointingPlace, tmp_path: Path) -> None:
    """Case c43."""
    two_checkpoints(local, "sharded")
    storage, owned = storage_of(local), tmp_path / "owned"
    evil = torch_saved(Payload(owned)) if kind == "torch" else pickle.dumps(Payload(owned))
    name, data, metadata = hostile_items(storage, item, evil)
    replace_and_sign(storage, 2, name, data)
    replace_and_sign(storage, 2, ".metadata", metadata)
    with pytest.raises(NotData, match=f"{item}.*more than tensors and plain data and was not loaded") as caught:
        checkpointer(make_state(), local).restore()
    if kind == "torch":
        assert "posix.mkdir" in str(caught.value)
    assert not owned.exists()


@pytest.mark.parametrize("inside", ["model", "tensors", "plain", "everything"])
def test_a_hostile_full_file_is_refused(inside: str, local: CheckpointingPlace, tmp_path: Path) -> None:
    """Case c43."""
    two_checkpoints(local, "full")
    storage, owned = storage_of(local), tmp_path / "owned"
    path = Path(local.run_url, paths.CHECKPOINTS, paths.data_directory(2, 1), "full.pt")
    content: Any = torch.load(path, weights_only=True)
    if inside == "everything":
        content = Payload(owned)
    else:
        content[inside]["evil"] = Payload(owned)
    replace_and_sign(storage, 2, "full.pt", torch_saved(content))
    with pytest.raises(NotData, match=r"full\.pt holds more than tensors.*posix\.mkdir"):
        checkpointer(make_state(), local, "full").restore()
    assert not owned.exists()


def test_no_file_of_ours_needs_more_than_a_weights_only_load(local: CheckpointingPlace, format: str) -> None:
    two_checkpoints(local, format)
    for file in Path(local.run_url).rglob("*.pt"):
        assert zipfile.is_zipfile(file)
        torch.load(file, weights_only=True)


def test_names_and_times_do_not_decide(local: CheckpointingPlace) -> None:
    """Case c45."""
    state = make_state()
    saver = checkpointer(state, local, keep=20)
    root = Path(local.run_url, paths.CHECKPOINTS)
    for step in (9, 10, 100, 2500):
        state.step = step
        saver.save()
    for age, step in enumerate((2500, 100, 10, 9)):  # the newest looks the oldest
        os.utime(root / paths.step_directory(step), (1e9 + 1000 * age, 1e9 + 1000 * age))
    foreign = ["latest", "step-9999999999.bak", "step-", "step-9x", "handpicked", "iter-99999", "step-99999"]
    for name in foreign:
        (root / name).mkdir()
    (root / "latest-file").write_text("step-0000000009")
    (root / "step-88888").write_text("a file, not a directory")
    # a checkpoint copied by hand to a name of another step is not that step
    shutil.copytree(root / paths.step_directory(9), root / paths.step_directory(7777))
    assert [m.step for m in list_checkpoints(storage_of(local)).manifests] == [2500, 100, 10, 9]
    after = make_state(seed=1)
    assert checkpointer(after, local).restore() == 2500
    train(after)
    checkpointer(after, local, keep=1).save()
    left = {path.name for path in root.iterdir()}
    assert left >= {*foreign, "latest-file", "step-88888", paths.step_directory(2501), paths.step_directory(7777)}
    assert paths.step_directory(100) not in left


def test_files_of_a_larger_world_are_no_part_of_a_checkpoint(local: CheckpointingPlace) -> None:
    """Case c33."""
    state = make_state()
    train(state)
    storage = storage_of(local)
    for rank in range(4):  # an interrupted save of the same step, by four ranks and an earlier attempt
        storage.put(f"{paths.data_directory(1, 1)}/__{rank}_0.distcp", b"stale")
    local.attempt = 2
    checkpointer(state, local).save()
    manifest: Manifest = list_checkpoints(storage).manifests[0]
    names = ["__0_0.distcp", ".metadata", "__0_1.distcp"]
    assert [file.path for file in manifest.files] == [f"data-000002/{name}" for name in names]
    after = make_state(seed=1)
    assert checkpointer(after, local).restore() == 1
    assert_same_training(state, after)


def test_what_uncommitted_saves_left_is_swept_below_the_oldest_checkpoint(tmp_path: Path) -> None:
    """Case c33."""
    place, state = CheckpointingPlace(str(tmp_path)), make_state()
    storage = storage_of(place)
    storage.put(f"{paths.data_directory(1, 1)}/__0_0.distcp", b"left by a kill")
    storage.put(f"{paths.data_directory(9, 1)}/__0_0.distcp", b"may still be written")
    storage.put("notes/mine.txt", b"foreign")
    for _ in range(3):
        train(state)
        checkpointer(state, place, keep=2).save()
    assert storage.list("") == ["notes", *(paths.step_directory(step) for step in (2, 3, 9))]
