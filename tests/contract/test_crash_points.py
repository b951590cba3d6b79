"""Promise 2: a save that fails at any storage operation leaves the old checkpoint or the new one, never a mixture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from elastic_runner import paths
from elastic_runner.chaos.crash_points import CrashPointsFound, check_crash_points
from elastic_runner.checkpoint.capture import capture
from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import StorageError
from elastic_runner.storage import LocalStorage, Storage, open_storage
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import CheckpointingPlace, FinishedStep, make_state, train
from tests.support.s3 import S3

Prepare = Callable[[str], Storage]


def fingerprint(state: TrainState) -> tuple[int, str]:
    """Step and every byte of every tensor."""
    tensors = sorted(capture(state).tensors.items())
    return state.step, str(
        hash(tuple((k, t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for k, t in tensors))
    )


def state_after(steps: int) -> TrainState:
    state = make_state(seed=1)
    train(state, steps)
    return state


def save(
    state: TrainState, storage: Storage, format: str, *, attempt: int = 1, keep: int = 1, mode: str = "sync"
) -> None:
    state = copy.deepcopy(state)
    settings = CheckpointConfig(format=format, keep=keep, every=state.step, failures_allowed=0)  # type: ignore[arg-type]
    place = CheckpointingPlace(storage.url, attempt=attempt)
    checkpointer = Checkpointer(settings, state, place, storage=storage)
    try:
        if mode == "sync":
            checkpointer.save()
            return
        assert checkpointer.maybe_save(FinishedStep(state.step))
        with torch.no_grad():  # training goes on, and is not to be seen in what is saved
            for tensor in capture(state).tensors.values():
                tensor.zero_()
        assert not checkpointer.maybe_save(FinishedStep(state.step + 1, save_ended=True))
    finally:
        place.background.rest()  # until others are pruned


class Process:
    """One that saves ``state`` with the fence on the same storage, and may try again."""

    def __init__(self, state: TrainState, format: str) -> None:
        self._state, self._format = state, format
        self._attempts = count(2)
        self._place: CheckpointingPlace | None = None

    def save(self, storage: Storage) -> None:
        """As a new process."""
        settings = CheckpointConfig(format=self._format, keep=1, failures_allowed=0)  # type: ignore[arg-type]
        self._place = Fenced(storage, next(self._attempts))
        self._checkpointer = Checkpointer(settings, copy.deepcopy(self._state), self._place, storage=storage)
        self.retry(storage)

    def retry(self, storage: Storage) -> None:
        """As the same one."""
        assert self._place is not None
        try:
            self._checkpointer.save()
        finally:
            self._place.background.rest()


class Fenced(CheckpointingPlace):
    """Asks the storage whether a newer attempt has begun, as a worker does."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        super().__init__(storage.url, attempt=attempt)
        self._storage = storage

    def check_fence(self) -> None:
        self._storage.list("attempts")


def committed_data(storage: Storage) -> set[str]:
    """The files that manifests name."""
    return {
        f"{paths.step_directory(manifest.step)}/{file.path}"
        for manifest in list_checkpoints(storage).manifests
        for file in manifest.files
    }


def restore(storage: Storage) -> tuple[int, str]:
    state = make_state(seed=2)
    Checkpointer(CheckpointConfig(), state, CheckpointingPlace(storage.url, attempt=9), storage=storage).restore()
    return fingerprint(state)


@pytest.fixture(params=["local", "s3"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Makes an empty storage at each call."""
    numbers = count()
    if request.param == "local":
        return lambda: LocalStorage(tmp_path / str(next(numbers)))
    s3: S3 = request.getfixturevalue("s3")
    return lambda: open_storage(f"{s3.url}/{next(numbers)}", s3.options)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("format", ["sharded", "full"])
def test_every_crash_point_leaves_old_or_new(format: str, mode: str, empty: Callable[[], Storage]) -> None:
    old, new = state_after(2), state_after(3)
    attempts = count(2)

    def prepare() -> Storage:
        storage = empty()
        save(old, storage, format)
        return storage

    changes = check_crash_points(
        prepare,
        # keep=1, so that deleting the old checkpoint is among the operations.
        lambda storage: save(new, storage, format, attempt=next(attempts), mode=mode),
        restore,
        old=fingerprint(old),
        new=fingerprint(new),
    )
    kinds = [change.split()[0] for change in changes]
    # The manifest comes after every byte of data, and nothing is deleted before it.
    assert kinds.index("create") > max(i for i, kind in enumerate(kinds) if kind in ("open", "write", "close"))
    assert kinds.index("delete") > kinds.index("create")


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_what_cannot_be_looked_at_leaves_old_or_new_and_is_not_written_over(format: str, tmp_path: Path) -> None:
    """Listings, the fence, what makes amends: a storage that is away for one operation or from there on."""
    old, new = state_after(2), state_after(3)
    numbers, process = count(), Process(new, format)

    def prepare() -> Storage:
        storage = LocalStorage(tmp_path / str(next(numbers)))
        save(old, storage, format)
        return storage

    operations = check_crash_points(
        prepare,
        process.save,
        restore,
        old=fingerprint(old),
        new=fingerprint(new),
        retry=process.retry,
        committed=committed_data,
        reads=True,
    )
    commit = next(i for i, operation in enumerate(operations) if operation.startswith("create"))
    assert [i for i, operation in enumerate(operations) if operation == "list attempts"] == [commit - 1, commit + 1]
    assert any(operation.startswith("size of") for operation in operations[:commit])


class TwoFiles:
    """A state in ``data``, committed by ``done``, whose fence is looked at after the commit."""

    def __init__(self, *, careful: bool) -> None:
        self._careful = careful

    def save(self, storage: Storage) -> None:
        if self._careful:
            storage.delete("done")
        storage.put("data", b"new")
        storage.put("done", b"new")
        try:
            storage.list("fence")
        except StorageError:
            storage.delete("done")
            raise

    def restore(self, storage: Storage) -> bytes:
        return storage.read("data") if "done" in storage.list("") else b"old"

    def committed(self, storage: Storage) -> list[str]:
        return ["data"] if "done" in storage.list("") else []


def test_the_checker_catches_what_writes_over_a_failed_save_that_is_whole(tmp_path: Path) -> None:
    """The fence cannot be looked at, and then the commit cannot be withdrawn: it is whole, and must stay so."""
    numbers = count()

    def check(saver: TwoFiles) -> list[str]:
        return check_crash_points(
            lambda: LocalStorage(tmp_path / str(next(numbers))),
            saver.save,
            saver.restore,
            old=b"old",
            new=b"new",
            retry=saver.save,
            committed=saver.committed,
            reads=True,
        )

    assert "list fence" in check(TwoFiles(careful=True))
    with pytest.raises(CrashPointsFound, match="outage at list fence: put data touches what is committed"):
        check(TwoFiles(careful=False))


@pytest.mark.parametrize("first", ["manifest", "delete"])
def test_the_checker_catches_a_wrong_order(first: str, tmp_path: Path) -> None:
    old, new = state_after(2), state_after(3)
    finished = LocalStorage(tmp_path / "finished")
    save(new, finished, "full", attempt=2)
    (manifest,) = list_checkpoints(finished).manifests
    numbers = count()

    def prepare() -> Storage:
        storage = LocalStorage(tmp_path / str(next(numbers)))
        save(old, storage, "full")
        return storage

    def wrong(storage: Storage) -> None:
        if first == "delete":
            storage.delete(paths.step_directory(2))
        if first == "manifest":
            storage.create(manifest.path, finished.read(manifest.path))
            storage.delete(paths.step_directory(2))  # since the new one is believed to be there
        for file in manifest.files:
            path = f"{paths.step_directory(3)}/{file.path}"
            with storage.writer(path) as stream:
                stream.write(finished.read(path))
        if first == "delete":
            storage.create(manifest.path, finished.read(manifest.path))

    with pytest.raises(CrashPointsFound, match="failures lose state"):
        check_crash_points(prepare, wrong, restore, old=fingerprint(old), new=fingerprint(new))
