"""Files of others become checkpoints: which part of them, under which names, and what is refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic_runner import paths
from elastic_runner.checkpoint.checkpointer import Checkpointer
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.errors import (
    ConfigError,
    Damaged,
    ElasticRunnerError,
    Mismatch,
    NotData,
    SaveFailed,
    StateError,
    StorageFull,
)
from elastic_runner.storage import LocalStorage
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import CheckpointingPlace, Net, checkpointer, make_state, train
from tests.support.exporting import KINDS, bits, contents_of, exported, imported

FRESH = ("optimizer.*", "state.*")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return Net().state_dict()


def started(url: str | Path, **settings: Any) -> tuple[TrainState, Checkpointer]:
    """A fresh state that has restored what is below ``url``."""
    state = make_state(seed=7)
    saver = checkpointer(state, CheckpointingPlace(str(url)), **settings)
    saver.restore()
    return state, saver


def test_weights_alone_must_be_asked_for(weights: dict[str, Any], tmp_path: Path, format: str) -> None:
    torch.save(weights, tmp_path / "w.pt")
    told = imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=0, format=format)
    assert (told.step, told.weights_only, told.format) == (0, True, format)
    with pytest.raises(Mismatch, match=r"no optimizer.*optimizer\.\* and state\.\* in checkpoint\.allow_missing"):
        started(tmp_path / "run")
    with pytest.raises(Mismatch, match="holds no state named"):
        started(tmp_path / "run", allow_missing=("optimizer.*",))
    state, saver = started(tmp_path / "run", allow_missing=FRESH)
    assert bits(state.model.state_dict()) == bits(weights)
    assert (state.step, state.data.position, dict(state.optimizer.state)) == (0, 0, {})  # type: ignore[attr-defined]
    train(state)
    saver.save()
    again, _ = started(tmp_path / "run")
    assert bits(again.model.state_dict()) == bits(state.model.state_dict())


def test_weights_may_be_put_at_any_step(weights: dict[str, Any], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "w.pt")
    imported(tmp_path / "w.pt", tmp_path / "run/checkpoints", step=40)
    state, _ = started(tmp_path / "run", allow_missing=FRESH)
    assert state.step == 40


def save_torch(weights: dict[str, Any], file: Path) -> None:
    torch.save(weights, file)


def save_old_torch(weights: dict[str, Any], file: Path) -> None:
    torch.save(weights, file, _use_new_zipfile_serialization=False)


def save_nested(weights: dict[str, Any], file: Path) -> None:
    torch.save({"state_dict": weights, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}, file)


def save_parameters(weights: dict[str, Any], file: Path) -> None:
    torch.save({k: nn.Parameter(v) if v.is_floating_point() else v for k, v in weights.items()}, file)


def save_safetensors(weights: dict[str, Any], file: Path) -> None:
    safetensors.torch.save_file({k: v for k, v in weights.items() if not k.endswith("head.weight")}, file)


def save_safetensors_model(weights: dict[str, Any], file: Path) -> None:
    model = Net()
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    safetensors.torch.save_model(model, str(file))


def save_dcp(weights: dict[str, Any], file: Path) -> None:
    state = {"model": {k: v for k, v in weights.items() if not k.endswith("head.weight")}, "epoch": 3}
    dcp.save({**state, "optim": {"m": torch.ones(3)}}, checkpoint_id=file)


WAYS = (
    save_torch, save_old_torch, save_nested, save_parameters, save_safetensors, save_safetensors_model, save_dcp,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("save", WAYS)
def test_foreign_files(save: Any, prefixed: bool, weights: dict[str, Any], tmp_path: Path) -> None:
    named = {f"module._orig_mod.{k}" if prefixed else k: v for k, v in weights.items()}
    if save is save_safetensors_model:
        named = weights
    save(named, tmp_path / "foreign")
    told = imported(tmp_path / "foreign", tmp_path / "run/checkpoints", step=1)
    if prefixed and save is not save_safetensors_model:
        assert any("prefixes were taken out" in note for note in told.notes)
    state, _ = started(tmp_path / "run", allow_missing=FRESH)
    assert bits(state.model.state_dict()) == bits(weights)


def test_a_model_that_calls_its_own_part_module(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    imported(tmp_path / "w.pt", tmp_path / "kept", step=1, keep_names=True)
    assert set(contents_of(tmp_path / "kept")[0]) == {"model.module.weight", "model.module.bias"}
    imported(tmp_path / "w.pt", tmp_path / "cleaned", step=1)
    assert set(contents_of(tmp_path / "cleaned")[0]) == {"model.weight", "model.bias"}


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "note": "text", "lr": 0.1}, tmp_path / "w.pt")
    notes = imported(tmp_path / "w.pt", tmp_path / "run", step=1).notes
    assert notes == ("note is a str, not a tensor, and is left out", "lr is a float, not a tensor, and is left out")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"epoch": 3, "loss": [1.0]}, "no state dict of a model: its entries are epoch, loss"),
        ([torch.ones(2)], "holds a list"),
        ({}, "its entries are none"),
    ],
)
def test_files_without_weights(value: Any, told: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=told):
        imported(tmp_path / "w.pt", tmp_path / "run", step=1)


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "w.pt")
    with pytest.raises((StateError, NotData), match="sparse"):
        imported(tmp_path / "w.pt", tmp_path / "run", step=1)


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    value = torch.randn(3, dtype=torch.complex64)
    imaginary = value.clone().conj().imag
    torch.save({"conj": value.conj(), "imag": imaginary, "all": value.clone().expand(2, 3)}, tmp_path / "w.pt")
    imported(tmp_path / "w.pt", tmp_path / "run", step=1)
    read, _ = contents_of(tmp_path / "run")
    assert read["model.conj"][2] == value.conj().resolve_conj().numpy().tobytes()
    assert read["model.imag"][2] == imaginary.resolve_neg().numpy().tobytes()
    assert read["model.all"][2] == value.numpy().tobytes() * 2


def test_older_torch_knows_offsets_under_fake_mode_only(
    run: str, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.11."""
    monkeypatch.setattr("elastic_runner.checkpoint.tools.stored._OFFSETS_ON_META", False)
    monkeypatch.setattr("elastic_runner.checkpoint.tools.stored.BLOCK", 16)
    exported(run, tmp_path / "out", "torch")
    imported(tmp_path / "out", tmp_path / "other", format=format)
    assert contents_of(tmp_path / "other") == contents_of(run)
    torch.save(Net().state_dict(), tmp_path / "w.pt")
    imported(tmp_path / "w.pt", tmp_path / "third", step=1)
    assert "head.weight" in str(contents_of(tmp_path / "third")[1])


def test_the_step_must_be_known(weights: dict[str, Any], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="does not say of which step it is"):
        imported(tmp_path / "w.pt", tmp_path / "run")


@pytest.fixture
def run(local: CheckpointingPlace) -> str:
    """A run with a checkpoint of step 2."""
    state = make_state()
    train(state, 2)
    checkpointer(state, local).save()
    return local.run_url


def test_a_state_keeps_its_step(run: str, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", "safetensors")
    with pytest.raises(ConfigError, match="is the state of step 2: leave --step out"):
        imported(tmp_path / "out", tmp_path / "other", step=7)
    imported(tmp_path / "out", tmp_path / "other", step=7, model_only=True)
    imported(tmp_path / "out", tmp_path / "other", step=2)


def test_a_step_that_is_there_stays(run: str, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", "torch")
    before = contents_of(run)
    with pytest.raises(ConfigError, match="has a checkpoint of step 2 already, written by attempt 1"):
        imported(tmp_path / "out", run)
    imported(tmp_path / "out", tmp_path / "other")
    with pytest.raises(ConfigError, match="already, written by an earlier import"):
        imported(tmp_path / "out", tmp_path / "other")
    assert contents_of(run) == before == contents_of(tmp_path / "other")


def test_any_attempt_comes_before_an_import(run: str, tmp_path: Path) -> None:
    exported(run, tmp_path / "out", "torch")
    imported(tmp_path / "out", tmp_path / "other/checkpoints")
    state, _ = started(tmp_path / "other")
    with torch.no_grad():
        state.model.untouched.add_(1)
    checkpointer(state, CheckpointingPlace(str(tmp_path / "other"))).save()
    again, _ = started(tmp_path / "other")
    assert bits(again.model.state_dict()) == bits(state.model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_an_import_that_fails_leaves_no_checkpoint(
    run: str, tmp_path: Path, kind: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(run, tmp_path / "out", kind)

    create = LocalStorage.create

    def full(self: LocalStorage, path: str, data: bytes) -> None:
        if "manifest" in path:
            raise StorageFull("no space left")
        create(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", full)
        with pytest.raises(StorageFull):
            imported(tmp_path / "out", tmp_path / "other", format=format)
    assert not list((tmp_path / "other" / paths.step_directory(2)).iterdir())
    imported(tmp_path / "out", tmp_path / "other", format=format)
    assert contents_of(tmp_path / "other") == contents_of(run)


def test_what_is_not_finite_is_marked_as_a_save_does(local: CheckpointingPlace, tmp_path: Path) -> None:
    state = make_state()
    train(state)
    with torch.no_grad():
        state.model.two_rows.bias[1] = torch.nan
        state.model.norm.running_var[0] = torch.inf  # a buffer
    checkpointer(state, local).save()
    exported(local.run_url, tmp_path / "out", "safetensors")
    imported(tmp_path / "out", tmp_path / "other")
    marks = []
    for url in (local.run_url, str(tmp_path / "other")):
        with opened(url, {}) as source:
            assert source.manifest is not None
            marks.append(source.manifest.non_finite)
    assert marks[0] == marks[1] == ("model.two_rows.bias",)


def test_an_import_that_a_run_sweeps_is_not_committed(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(run, tmp_path / "out", "torch")
    create = LocalStorage.create

    def sweeping(self: LocalStorage, path: str, data: bytes) -> None:
        self.delete(paths.data_directory(2, 0))
        create(self, path, data)

    monkeypatch.setattr(LocalStorage, "create", sweeping)
    with pytest.raises(SaveFailed, match="a run that saves there has removed it"):
        imported(tmp_path / "out", tmp_path / "other")
    assert not list((tmp_path / "other").glob("*/manifest*"))


class Payload:
    """What case c43 hides in a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def hostile(how: str, directory: Path) -> Path:
    """A file that would create ``owned`` when unpickled."""
    payload = Payload(directory / "owned")
    file = directory / "hostile"
    if how == "torch":
        torch.save({"model": {"w": torch.zeros(3)}, "step": 50, "extra": payload}, file)
    elif how == "old torch":
        torch.save({"w": torch.zeros(3), "extra": payload}, file, _use_new_zipfile_serialization=False)
    elif how == "pickle":
        file.write_bytes(pickle.dumps({"w": payload}, protocol=2))
    elif how == "new pickle":
        file.write_bytes(pickle.dumps({"w": payload}))
    elif how == "dcp metadata":
        file.mkdir()
        (file / ".metadata").write_bytes(pickle.dumps(payload))
    else:
        dcp.save({"model": {"w": torch.zeros(3)}, "extra": payload}, checkpoint_id=file)
    return file


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["torch", "old torch", "pickle", "new pickle", "dcp metadata", "dcp item"])
def test_code_in_a_file_is_refused_as_such(how: str, tmp_path: Path) -> None:
    """Case c43."""
    file = hostile(how, tmp_path)
    with pytest.raises(NotData):
        imported(file, tmp_path / "run", step=1)
    with pytest.raises(NotData), opened(str(file), {}):
        pass
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "run").exists()


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        header(b"not json"),
        header(b"[1]"),
        struct.pack("<Q", 2**40) + b"{}",
        header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"),
        header(b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', b"12345678"),
        header(b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}'),
        header(b'{"w":{"dtype":"F99","shape":[],"data_offsets":[0,0]}}'),
        header(b'{"w":{"shape":[],"data_offsets":[0,0]}}'),
        header(b'{"w":7}'),
        header(b'{"__metadata__":{"a":1}}'),
        header(b'{"__metadata__":{"elastic_runner":"{}"}}'),
        header(b'{"__metadata__":{"elastic_runner":"no"}}'),
        header(b'{"__metadata__":{"elastic_runner":"{\\"version\\":2}"}}'),
    ],
)
def test_damaged_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(Damaged):
        imported(tmp_path / "w.safetensors", tmp_path / "run", step=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_never_imported(run: str, tmp_path: Path, kind: Any) -> None:
    exported(run, tmp_path / "out", kind)
    file = tmp_path / "out"
    if kind == "dcp":
        file = next(file for file in file.glob("*.distcp") if file.stat().st_size > 10_000)
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ElasticRunnerError):
            imported(tmp_path / "out", tmp_path / "other", step=2)
    assert not list((tmp_path / "other").glob("*/manifest*"))
