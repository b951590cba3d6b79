"""What goes wrong while a checkpoint is read: what is used was checked, and only damage is called damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_runner import paths
from elastic_runner.checkpoint import layout, source
from elastic_runner.checkpoint.archive import only_data
from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.tools.overview import look
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import (
    AccessDenied,
    CheckpointError,
    Damaged,
    NotFound,
    NoUsableCheckpoint,
    StorageError,
)
from elastic_runner.storage import LocalStorage, Written
from tests.support.checkpointing import (
    CheckpointingPlace,
    assert_same,
    assert_same_training,
    checkpointer,
    make_state,
    storage_of,
    train,
)


def storage_at(place: CheckpointingPlace, kind: type[LocalStorage]) -> Any:
    return kind(Path(place.run_url) / paths.CHECKPOINTS)


def restoring(state: Any, place: CheckpointingPlace, storage: Any, format: str = "sharded", **settings: Any) -> Any:
    place.attempt += 1
    return Checkpointer(CheckpointConfig(format=format, **settings), state, place, storage=storage)  # type: ignore[arg-type]


def save(place: CheckpointingPlace, steps: int, format: str = "sharded") -> list[Any]:
    """The states after each of the first steps, each saved."""
    state, states = make_state(), []
    saver = checkpointer(state, place, format)
    for step in range(1, steps + 1):
        train(state)
        saver.save()
        states.append(make_state())
        train(states[-1], step)
    return states


def suspects(place: CheckpointingPlace) -> dict[int | None, str]:
    return {row.step: row.suspect for row in look(place.run_url, {}, digests=False)}


class Counting(LocalStorage):
    """Counts what is read, and spoils some of it on the way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.spoil: dict[str, set[int]] = {}
        """By name of a file: which of its reads gives a wrong byte."""
        self.copies = root.parent / "copies"
        self.copies.mkdir(exist_ok=True)

    def _wrong(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        self.reads.append(name)
        return self.reads.count(name) in self.spoil.get(name, ())

    def read(self, path: str) -> bytes:
        data, wrong = bytearray(super().read(path)), self._wrong(path)
        if wrong:
            data[len(data) // 2] ^= 1
        return bytes(data)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        data, wrong = bytearray(super().read_range(path, offset, length)), self._wrong(path)
        if wrong:
            data[len(data) // 2] ^= 1
        return bytes(data)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        self._wrong(path)
        return super().read_into(path, buffer)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        wrong = self._wrong(path)
        with super().local_copy(path) as local:
            copy = self.copies / str(len(self.reads))
            shutil.copy(local, copy)
            if wrong:
                data = bytearray(copy.read_bytes())
                data[len(data) // 2] ^= 1
                copy.write_bytes(data)
            yield copy
            copy.unlink()


def test_what_is_used_is_what_was_checked(local: CheckpointingPlace, format: str) -> None:
    """Each file comes once; no second reading that nobody checks."""
    (state,) = save(local, 1, format)
    storage = storage_at(local, Counting)
    after = make_state(seed=1)
    assert restoring(after, local, storage, format).restore() == 1
    assert_same_training(state, after)
    files = ["full.pt"] if format == "full" else [".metadata", "__0_0.distcp", "__0_1.distcp"]
    assert sorted(name for name in storage.reads if name in files) == files


@pytest.mark.parametrize("times", [{1}, {1, 2}], ids=["once", "twice"])
def test_wrong_bytes_are_read_once_more(
    times: set[int], local: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    (state,) = save(local, 1, format)
    for name in ["full.pt"] if format == "full" else [".metadata", "__0_0.distcp"]:
        storage = storage_at(local, Counting)
        storage.spoil = {name: times}
        after = make_state(seed=1)
        caplog.clear()
        if times == {1}:
            assert restoring(after, local, storage, format).restore() == 1
            assert f"{name} came with wrong bytes at first" in caplog.text
            assert_same_training(state, after)
            assert suspects(local) == {1: ""}
        else:
            with pytest.raises(NoUsableCheckpoint, match=f"{name} has other bytes than were written"):
                restoring(after, local, storage, format).restore()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: uncorrectable ECC error")]
)
def test_an_error_of_the_device_is_no_damage(
    error: RuntimeError, local: CheckpointingPlace, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local, 2, format)

    def place(*_: Any) -> None:
        raise error

    monkeypatch.setattr(source, "place", place)
    with pytest.raises(type(error), match="CUDA"):
        checkpointer(make_state(), local, format).restore()
    assert suspects(local) == {2: "", 1: ""}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("unable to mmap 12 bytes from file <x>: Cannot allocate memory (12)"),
        MemoryError(),
    ],
)
def test_no_memory_is_no_damage(error: BaseException) -> None:
    with pytest.raises(type(error)), only_data("x"):
        raise error


def test_a_disk_error_is_no_damage() -> None:
    with pytest.raises(StorageError, match="Errno 5"), only_data("x"):
        raise OSError(5, "Input/output error")
    with pytest.raises(Damaged), only_data("x"):
        raise RuntimeError("PytorchStreamReader failed")


class Failing(LocalStorage):
    """Some files cannot be read."""

    bad: tuple[str, ...] = ()
    error: StorageError = StorageError("Errno 5")

    def _check(self, path: str) -> None:
        if any(part in path for part in self.bad):
            raise type(self.error)(f"read {path}: {self.error}")

    def read(self, path: str) -> bytes:
        self._check(path)
        return super().read(path)

    def read_into(self, path: str, buffer: memoryview) -> Written:
        self._check(path)
        return super().read_into(path, buffer)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        self._check(path)
        with super().local_copy(path) as local:
            yield local


def data_of(format: str) -> list[str]:
    return ["full.pt"] if format == "full" else [".metadata", "__0_0.distcp", "__0_1.distcp"]


@pytest.mark.parametrize("error", [StorageError("Errno 5"), NotFound("gone"), AccessDenied("not you")])
def test_what_cannot_be_read_is_passed_over_and_not_marked(
    error: StorageError, local: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = save(local, 2, format)[0]
    for name in data_of(format):
        storage = storage_at(local, Failing)
        storage.bad, storage.error = (f"{paths.data_directory(2, 1)}/{name}",), error
        after = make_state(seed=1)
        caplog.clear()
        assert restoring(after, local, storage, format).restore() == 1
        assert f"checkpoint not used: step 2: cannot be read: read {storage.bad[0]}" in caplog.text
        assert_same_training(kept, after)
        assert suspects(local) == {2: "", 1: ""}
    assert checkpointer(make_state(), local, format).restore() == 2, "nothing is on record against it"


def test_when_none_can_be_read_a_new_start_may_help(local: CheckpointingPlace, format: str) -> None:
    save(local, 2, format)
    storage = storage_at(local, Failing)
    storage.bad = tuple(f"/{name}" for name in data_of(format))
    with pytest.raises(StorageError, match=r"step 2: cannot be read.*step 1: cannot be read") as caught:
        restoring(make_state(), local, storage, format).restore()
    assert caught.value.restartable
    storage.bad = ("manifest-",)
    with pytest.raises(StorageError, match=r"step-0000000001.*cannot be read.*step-0000000002.*cannot be read"):
        restoring(make_state(), local, storage, format).restore()
    assert suspects(local) == {2: "", 1: ""}


@pytest.mark.parametrize(("bad", "found"), [(1, 2), (2, 1)])
def test_a_manifest_that_cannot_be_read_blocks_nothing(
    bad: int, found: int, local: CheckpointingPlace, caplog: pytest.LogCaptureFixture
) -> None:
    states = save(local, 2)
    storage = storage_at(local, Failing)
    storage.bad = (paths.manifest(bad, 1),)
    after = make_state(seed=1)
    saver = restoring(after, local, storage, keep=1)
    assert saver.restore() == found
    assert f"{paths.manifest(bad, 1)} cannot be read" in caplog.text
    assert_same_training(states[found - 1], after)
    train(after)
    saver.save()
    assert storage_of(local).size(paths.manifest(bad, 1)) > 0, "pruning leaves what it cannot judge"
    assert storage_of(local).list(paths.data_directory(bad, 1))


def test_the_others_are_listed_when_one_cannot_be_read(
    local: CheckpointingPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local, 2)
    size = LocalStorage.size

    def failing(self: LocalStorage, path: str) -> int:
        if path.startswith(paths.data_directory(2, 1)):
            raise StorageError(f"stat {path}: Errno 5")
        return size(self, path)

    monkeypatch.setattr(LocalStorage, "size", failing)
    assert [(row.step, row.unusable[:14]) for row in look(local.run_url, {}, digests=False)] == [
        (2, "cannot be read"),
        (1, ""),
    ]
    assert checkpointer(make_state(), local).restore() == 1


class Adapted(nn.Module):
    def __init__(self, *, adapter: bool) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.adapter = nn.Linear(64, 64) if adapter else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (0 if self.adapter is None else self.adapter(x))


def test_fresh_values_are_no_damaged_checkpoints_values(
    local: CheckpointingPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 lacks the adapter, step 2 has it and is damaged in the last file that is read."""
    monkeypatch.setattr(layout, "FILE_BYTES", (800, 800))
    allowed = ("*adapter*", "optimizer.*")
    old = make_state(Adapted(adapter=False), seed=3)
    train(old, 1, features=64)
    checkpointer(old, local).save()
    both = make_state(Adapted(adapter=True), seed=4)
    both.step = 1
    train(both, 1, features=64)
    local.attempt = 2
    checkpointer(both, local).save()
    last = max(Path(local.run_url, paths.CHECKPOINTS, paths.data_directory(2, 2)).glob("__0_*"))
    last.write_bytes(last.read_bytes()[:-5] + b"wrong")
    state = make_state(Adapted(adapter=True), seed=9)
    with pytest.raises(CheckpointError, match=r"adapter.weight, .* would keep fresh values.*started anew") as caught:
        checkpointer(state, local, allow_missing=allowed).restore()
    assert caught.value.restartable
    fresh, state = make_state(Adapted(adapter=True), seed=9), make_state(Adapted(adapter=True), seed=9)
    local.attempt = 3
    assert checkpointer(state, local, allow_missing=allowed).restore() == 1, "the mark leads straight to it"
    assert_same(fresh.model.adapter.state_dict(), state.model.adapter.state_dict())
    assert_same(old.model.base.state_dict(), state.model.base.state_dict())
