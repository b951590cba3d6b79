"""Saves beside training: what a step sees of them, when they fail, when they take long, when the run ends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runner import paths
from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.checkpoint.marks import mark_suspect, trust
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import AccessDenied, LoopError, SaveFailed, StateError, StorageError, StorageFull
from elastic_runner.storage import LocalStorage
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import (
    CheckpointingPlace,
    FinishedStep,
    assert_same_training,
    checkpointer,
    make_state,
    storage_of,
    train,
)
from tests.support.gated import GatedStorage


class Run:
    """A state in training, saved to a gated storage."""

    def __init__(self, place: CheckpointingPlace, format: str = "sharded", **settings: Any) -> None:
        self.place = place
        self.state = make_state()
        self.storage = GatedStorage(storage_of(place))
        config = CheckpointConfig(format=format, **{"every": 1, **settings})  # type: ignore[arg-type]
        self.checkpointer = Checkpointer(config, self.state, place, storage=self.storage)  # type: ignore[arg-type]

    def step(self, **said: Any) -> bool:
        """One step and its ``maybe_save``."""
        train(self.state)
        said = {"save_ended": self.place.background.ended, **said}
        return self.checkpointer.maybe_save(FinishedStep(self.state.step, **said))

    def saved(self) -> list[int]:
        self.place.background.rest()  # until others are pruned
        return sorted(manifest.step for manifest in list_checkpoints(self.storage.inner).manifests)


def restored(place: CheckpointingPlace, **settings: Any) -> TrainState:
    state = make_state(seed=1)
    place.attempt += 1
    checkpointer(state, place, **settings).restore()
    return state


def test_a_step_does_not_wait_for_the_storage(local: CheckpointingPlace, format: str) -> None:
    run = Run(local, format, every=2)
    run.step()
    run.storage.gate.clear()
    assert run.step()  # step 2 is being saved, and nothing of it is there
    assert run.storage.reached.wait(60)
    kept = make_state()
    train(kept, 2)
    assert not run.step()  # training goes on, and changes the state that is being saved
    assert list_checkpoints(run.storage.inner).manifests == ()
    run.storage.gate.set()
    assert run.place.background.wait(60)
    assert run.saved() == [2]
    assert_same_training(kept, restored(local))


def test_nothing_older_goes_before_the_new_one_is_there(local: CheckpointingPlace) -> None:
    """Case c29."""
    run = Run(local, keep=1)
    run.step()
    run.checkpointer.save()
    run.storage.gate.clear()
    run.step()
    assert run.storage.reached.wait(60)
    assert [m.step for m in list_checkpoints(run.storage.inner).manifests] == [1] and local.told == [1]
    run.storage.gate.set()
    run.step(is_last=True)
    assert run.saved() == [3] and local.told == [1, 2, 3]


def test_a_failure_beside_training_is_reported_at_the_next_step(local: CheckpointingPlace, format: str) -> None:
    """Case c29."""
    run = Run(local, format)
    run.storage.failing = StorageError("the network is gone")
    assert run.step()
    assert run.place.background.wait(60)
    run.storage.failing = None
    assert run.step()
    assert local.not_told == [
        (1, "step 1 was not saved: the network is gone (failure 1 of 3 allowed in a row)"),
    ]
    run.checkpointer.save()
    assert run.saved() == [2] and local.told == [2]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_too_many_failures_in_a_row_end_the_run(mode: str, local: CheckpointingPlace) -> None:
    run = Run(local, mode=mode, failures_allowed=2)
    run.storage.failing = StorageError("the network is gone")
    for _ in range(2):
        run.step()
        run.place.background.wait(60)
    run.storage.failing = None
    for _ in range(2):
        run.step()  # a save that succeeds starts the count anew
    assert len(local.not_told) == 2
    run.storage.failing = StorageError("gone again")
    with pytest.raises(SaveFailed, match=r"3 saves in a row have failed.*failures_allowed = 2.*gone again"):
        for _ in range(4):
            run.step()
            run.place.background.wait(60)
    assert len(local.not_told) == 4


@pytest.mark.parametrize("error", [StorageFull("no space left"), AccessDenied("read-only")])
def test_what_ends_the_run_keeps_its_kind(error: StorageError, local: CheckpointingPlace) -> None:
    run = Run(local, failures_allowed=0)
    run.storage.failing = error
    run.step()
    with pytest.raises(type(error), match=f"1 saves in a row have failed.*{error}"):
        run.step()


@pytest.mark.parametrize("said", [{"is_last": True}, {"draining": True}])
def test_the_last_save_is_waited_for_and_its_failure_raised(said: dict[str, bool], local: CheckpointingPlace) -> None:
    run = Run(local, every=100)
    run.step()
    run.storage.failing = StorageError("the network is gone")
    with pytest.raises(SaveFailed, match="step 2 was not saved: the network is gone"):
        run.step(**said)
    run.storage.failing = None
    run.step(**said)
    assert run.saved() == [3] and not run.place.background.busy


def test_a_busy_storage_is_waited_for(local: CheckpointingPlace) -> None:
    run = Run(local, keep=10)
    for _ in range(4):
        run.step()
    run.checkpointer.save()
    assert run.saved() == [1, 2, 3, 4]


def test_a_busy_storage_can_be_skipped_and_that_is_counted(local: CheckpointingPlace) -> None:
    run = Run(local, when_busy="skip", keep=10)
    run.storage.gate.clear()
    assert run.step()
    assert not run.step()
    assert not run.step()
    assert [step for step, _ in local.not_told] == [2, 3]
    assert "the save of step 1 is still going on" in local.not_told[0][1]
    run.storage.gate.set()
    assert run.step(is_last=True)
    assert run.saved() == [1, 4]


def test_a_state_that_changes_its_shape_gets_new_buffers(local: CheckpointingPlace, format: str) -> None:
    """The first save comes before the optimizer has any state."""
    run = Run(local, format, keep=10)
    run.checkpointer.save()
    run.step()
    run.step(is_last=True)
    assert_same_training(run.state, restored(local))
    assert run.saved() == [0, 1, 2]


def test_a_copy_that_fails_fails_the_save(local: CheckpointingPlace, format: str) -> None:
    run = Run(local, format)
    run.step()
    run.checkpointer.save()
    train(run.state)

    def broken(captured: Any) -> None:
        raise RuntimeError("the device is gone")

    run.checkpointer._saver.copy = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run.checkpointer.save()
    assert run.place.background.wait(60)
    assert run.saved() == [1]


def test_a_state_that_is_not_finite_is_marked_and_never_comes_first(
    local: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c72: keep 2, NaN at 25, saves to 40."""
    run = Run(local, format, keep=2, every=5)
    for _ in range(20):
        run.step()
    run.checkpointer.save()
    healthy = make_state()
    train(healthy, 20)
    with torch.no_grad():
        run.state.model.hidden.weight[0, 0] = float("nan")  # type: ignore[index, union-attr]
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run.step()
        run.checkpointer.save()
    assert "step 25 holds NaN or infinity in model." in caplog.text
    assert {15, 20} <= set(run.saved())
    assert_same_training(healthy, restored(local))


def test_infinity_in_a_buffer_is_nobodys_trouble(local: CheckpointingPlace, format: str) -> None:
    """Masks are made of it."""
    run = Run(local, format)
    run.state.model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    run.step(is_last=True)
    (manifest,) = list_checkpoints(run.storage.inner).manifests
    assert manifest.non_finite == ()


def test_what_the_storage_does_not_take_is_spilled_and_uploaded_at_the_next_start(
    place: CheckpointingPlace, format: str, tmp_path: Path
) -> None:
    spilled = str(tmp_path / "spill")
    run = Run(place, format, spill=spilled)
    run.step()
    run.checkpointer.save()
    run.storage.failing = StorageError("the network is gone")
    with pytest.raises(SaveFailed):
        run.step(is_last=True)
    assert run.saved() == [1]
    state = restored(place, spill=spilled)
    assert_same_training(run.state, state)
    assert run.saved() == [1, 2]
    again = restored(place)
    assert_same_training(run.state, again)


def test_a_save_that_succeeds_makes_the_spilled_one_needless(local: CheckpointingPlace, tmp_path: Path) -> None:
    run = Run(local, spill=str(tmp_path / "spill"))
    assert run.checkpointer._spill is not None
    spill = run.checkpointer._spill.storage
    run.storage.failing = StorageError("the network is gone")
    run.step()
    assert run.place.background.wait(60)
    assert spill.list("") == [paths.step_directory(1)]
    run.step()
    assert run.place.background.wait(60)
    assert spill.list("") == [paths.step_directory(2)], "one is enough"
    run.storage.failing = None
    run.step(is_last=True)
    assert spill.list("") == []


def test_a_spilled_checkpoint_that_lacks_a_file_is_left(local: CheckpointingPlace, tmp_path: Path) -> None:
    run = Run(local, spill=str(tmp_path / "spill"))
    assert run.checkpointer._spill is not None
    spill = run.checkpointer._spill.storage
    run.step()
    run.checkpointer.save()
    run.storage.failing = StorageError("the network is gone")
    with pytest.raises(SaveFailed):
        run.step(is_last=True)
    spill.delete(f"{paths.data_directory(2, 1)}/__0_1.distcp")
    assert restored(local, spill=spill.url).step == 1


def test_a_fence_that_cannot_be_looked_at_leaves_no_manifest(local: CheckpointingPlace, format: str) -> None:
    """What is reported as failed is not there, and the same step can be saved again."""
    run = Run(local, format)
    looks: list[str] = ["", "the network is gone"]

    def look() -> None:
        if looks and (trouble := looks.pop(0)):
            raise StorageError(trouble)

    local.check_fence = look  # type: ignore[method-assign]
    with pytest.raises(SaveFailed, match="the network is gone"):
        run.step(is_last=True)
    assert run.saved() == []
    run.checkpointer.save()
    assert run.saved() == [1] and local.told == [1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "quantized"])
def test_tensors_that_are_not_dense_are_refused_by_name(local: CheckpointingPlace, format: str, kind: str) -> None:
    run = Run(local, format)
    dense = torch.eye(3)
    made = {
        "sparse_coo": dense.to_sparse,
        "sparse_csr": dense.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }[kind]()
    run.state.model.register_buffer("graph", made)
    with pytest.raises(StateError, match=f"model.graph is a {kind} tensor"):
        run.step(is_last=True)
    assert run.saved() == []


def test_a_run_that_goes_back_saves_a_step_again(local: CheckpointingPlace, format: str) -> None:
    run = Run(local, format)
    run.step()
    run.step()
    run.checkpointer.save()
    (newest,) = (m for m in list_checkpoints(run.storage.inner).manifests if m.step == 2)
    mark_suspect(run.storage.inner, newest, "the loss went up", attempt=1)
    assert run.checkpointer.restore() == 1
    with torch.no_grad():
        run.state.model.two_rows.weight.zero_()  # type: ignore[union-attr, operator]
    run.step(is_last=True)
    (again,) = (m for m in list_checkpoints(run.storage.inner).manifests if m.step == 2)
    assert again.files != newest.files
    trust(run.storage.inner, again)
    assert_same_training(run.state, restored(local))


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([0.5]), "0.5"])
def test_metrics_are_numbers_of_any_kind(value: Any, local: CheckpointingPlace) -> None:
    run = Run(local)
    train(run.state)
    run.checkpointer.save({"loss": value})
    (manifest,) = list_checkpoints(run.storage.inner).manifests
    assert manifest.metrics == {"loss": 0.5}


def test_a_metric_that_is_no_number_is_named_at_once(local: CheckpointingPlace) -> None:
    run = Run(local)
    train(run.state)
    with pytest.raises(LoopError, match="'confusion' given to a save is not a number"):
        run.checkpointer.save({"confusion": torch.zeros(2, 2)})  # type: ignore[dict-item]
    run.checkpointer.save()


def test_two_checkpointers_that_save_at_once_are_refused(local: CheckpointingPlace) -> None:
    run = Run(local)
    run.storage.gate.clear()
    run.step()
    other = Checkpointer(CheckpointConfig(), run.state, local)
    with pytest.raises(LoopError, match="another Checkpointer of this worker is saving"):
        other.save()
    run.storage.gate.set()
    run.checkpointer.save()
    assert run.saved() == [1]


def test_a_spill_directory_is_no_way_from_one_run_to_another(tmp_path: Path) -> None:
    spilled = str(tmp_path / "spill")
    run = Run(CheckpointingPlace(str(tmp_path / "a")), spill=spilled)
    run.storage.failing = StorageError("the network is gone")
    with pytest.raises(SaveFailed):
        run.step(is_last=True)
    other = CheckpointingPlace(str(tmp_path / "b"))
    assert restored(other, spill=spilled).step == 0
    assert restored(run.place, spill=spilled).step == 1


def test_what_was_spilled_does_not_stand_in_the_way_of_what_is_committed(
    local: CheckpointingPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(local, spill=str(tmp_path / "spill"))
    run.step()
    run.checkpointer.save()
    run.storage.failing = StorageError("the network is gone")
    with pytest.raises(SaveFailed):
        run.step(is_last=True)

    def full(self: LocalStorage, path: str, file: Path) -> None:
        raise StorageFull("no space left")

    monkeypatch.setattr(LocalStorage, "put_file", full)
    assert restored(local, spill=str(tmp_path / "spill")).step == 1
