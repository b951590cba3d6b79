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
    if mode == "sync":
        checkpointer.save()
        return
    assert checkpointer.maybe_save(FinishedStep(state.step))
    with torch.no_grad():  # training goes on, and is not to be seen in what is saved
        for tensor in capture(state).tensors.values():
            tensor.zero_()
    assert not checkpointer.maybe_save(FinishedStep(state.step + 1, save_ended=True))


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
