"""What is exported is the state to the last bit, in files that others read, and comes back as it was."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from elastic_runner import paths
from elastic_runner.checkpoint.tools.export import Target
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.errors import ConfigError, Damaged, NotFound, StorageFull
from elastic_runner.storage import LocalStorage
from tests.support.checkpointing import CheckpointingPlace, Net, checkpointer, make_state, train
from tests.support.exporting import (
    KINDS,
    Everything,
    bits,
    bits_of_training,
    contents_of,
    exported,
    imported,
    make_everything,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Target:
    return request.param  # type: ignore[no-any-return]


def test_every_tensor_comes_back_bit_by_bit(place: CheckpointingPlace, format: str, kind: Target) -> None:
    before, after = make_everything(0), make_everything(1)
    checkpointer(before, place, format).save()
    options = place.storage_options
    file, again, elsewhere = f"{place.run_url}/out", f"{place.run_url}/again", f"{place.run_url}-2"
    exported(place.run_url, file, kind, options)
    told = imported(file, f"{elsewhere}/checkpoints", options, format=format)
    assert (told.step, told.weights_only) == (2, False)
    exported(elsewhere, again, kind, options)
    first = contents_of(place.run_url, options)
    assert first == contents_of(file, options) == contents_of(elsewhere, options) == contents_of(again, options)

    there = CheckpointingPlace(elsewhere, options)
    assert checkpointer(after, there, format).restore() == 2
    assert bits_of_training(after) == bits_of_training(before)
    assert after.model.b.weight is after.model.a.weight


@pytest.fixture
def saved(local: CheckpointingPlace, format: str) -> str:
    """A checkpoint of Net after three steps."""
    state = make_state()
    train(state, 3)
    checkpointer(state, local, format).save()
    return local.run_url


def saved_model(url: str) -> dict[str, torch.Tensor]:
    state = make_state(seed=9)
    checkpointer(state, CheckpointingPlace(url)).restore()
    return state.model.state_dict()


def test_safetensors_are_read_by_their_own_package(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "out.safetensors"
    exported(saved, file, "safetensors", model_only=True)
    model = Net()
    assert safetensors.torch.load_model(model, str(file)) == (set(), [])
    assert bits(model.state_dict()) == bits(saved_model(saved))
    exported(saved, file, "safetensors", force=True)
    model = Net()
    missing, unexpected = model.load_state_dict(safetensors.torch.load_file(file), strict=False)
    assert missing == ["head.weight"]  # tied: once in the file
    assert all(name.startswith("optimizer.state.") for name in unexpected)


def test_every_dtype_is_read_by_the_safetensors_package(local: CheckpointingPlace, tmp_path: Path) -> None:
    state = make_everything(0)
    checkpointer(state, local).save()
    exported(local.run_url, tmp_path / "out.safetensors", "safetensors")
    read = safetensors.torch.load_file(tmp_path / "out.safetensors")
    for name, value in state.model.state_dict().items():
        if isinstance(value, torch.Tensor) and name != "b.weight":
            whole = torch.view_as_real(value) if value.is_complex() else value
            same = read[name] if read[name].dtype == whole.dtype else read[name].view(whole.dtype).reshape(whole.shape)
            assert bits(same) == bits(whole), name


def test_a_torch_file_is_stock(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "out.pt"
    exported(saved, file, "torch")
    for mapped in (False, True):
        read = torch.load(file, weights_only=True, mmap=mapped)
        model = Net()
        model.load_state_dict(read["model"])
        assert bits(model.state_dict()) == bits(saved_model(saved))
        assert read["model"]["head.weight"] is read["model"]["embed.weight"]
    assert zipfile.ZipFile(file).testzip() is None


def test_a_dcp_directory_is_stock(saved: str, tmp_path: Path) -> None:
    exported(saved, tmp_path / "out", "dcp")
    wanted = saved_model(saved)
    names = [name for name in wanted if name != "head.weight"]
    read = {f"model.{name}": torch.zeros_like(wanted[name]) for name in names}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, checkpoint_id=str(tmp_path / "out"))
    assert bits({name: read[f"model.{name}"] for name in names}) == bits({name: wanted[name] for name in names})
    dcp_to_torch_save(tmp_path / "out", tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    assert bits(converted["model.embed.weight"]) == bits(wanted["embed.weight"])
    assert converted["state.trainer"] == {"step": 3}


def test_the_model_alone(saved: str, tmp_path: Path, kind: Target) -> None:
    exported(saved, tmp_path / "out", kind, model_only=True)
    tensors, plain = contents_of(tmp_path / "out")
    assert tensors and all(key.startswith("model.") for key in tensors)
    assert set(plain[1]) == {(str, "model.aliases"), (str, "model.plain")}


def test_nothing_is_replaced_unless_asked(saved: str, tmp_path: Path, kind: Target) -> None:
    exported(saved, tmp_path / "out", kind)
    before = contents_of(tmp_path / "out")
    with pytest.raises(ConfigError, match="--force replaces it"):
        exported(saved, tmp_path / "out", kind, model_only=True)
    assert contents_of(tmp_path / "out") == before
    exported(saved, tmp_path / "out", kind, model_only=True, force=True)
    assert len(contents_of(tmp_path / "out")[0]) < len(before[0])


def test_a_directory_in_the_way_is_left_alone(saved: str, tmp_path: Path, kind: Target) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="name a"):
        exported(saved, tmp_path / "out", kind, force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("model_only", [False, True])
def test_an_export_that_fails_leaves_nothing(
    saved: str, tmp_path: Path, kind: Target, model_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was there before stays, where it is one file."""
    target = tmp_path / "new"
    (tmp_path / "old").write_bytes(b"old")
    writes: list[int] = []
    create = LocalStorage.writer

    def failing(self: LocalStorage, path: str) -> Any:
        writes.append(1)
        if len(writes) > (kind == "dcp"):  # its second file
            raise StorageFull("no space left")
        return create(self, path)

    monkeypatch.setattr(LocalStorage, "writer", failing)
    with pytest.raises(StorageFull):
        exported(saved, target, kind, model_only=model_only)
    assert not target.exists() or list(target.iterdir()) == []
    if kind != "dcp":
        with pytest.raises(StorageFull):
            exported(saved, tmp_path / "old", kind, force=True)
        assert (tmp_path / "old").read_bytes() == b"old"
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("model_only", [False, True])
def test_damage_is_noticed_first(saved: str, tmp_path: Path, kind: Target, model_only: bool) -> None:
    file = max((Path(saved) / "checkpoints").glob("step-*/data-*/*"), key=lambda path: path.stat().st_size)
    whole = bytearray(file.read_bytes())
    place = whole.find(b"\x00" * 40, len(whole) // 3) + 20  # padding between tensors
    whole[place] ^= 1
    file.write_bytes(whole)
    with pytest.raises(Damaged, match="other bytes than were written"):
        exported(saved, tmp_path / "out", kind, model_only=model_only)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    exported(saved, tmp_path / "out", kind, model_only=model_only, verify=False)
    assert contents_of(tmp_path / "out")[0]


def test_a_changed_metadata_file_is_not_even_unpickled(local: CheckpointingPlace) -> None:
    state = make_state()
    state.step = 1
    checkpointer(state, local).save()
    file = next(Path(local.run_url).glob("checkpoints/step-*/data-*/.metadata"))
    file.write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(Damaged, match=r"\.metadata has other bytes"), opened(local.run_url, {}):
        pass


def test_steps_are_found_by_name(local: CheckpointingPlace) -> None:
    state = make_state()
    for _ in range(2):
        train(state)
        checkpointer(state, local).save()
    url = f"{local.run_url}/checkpoints"
    for given in (f"{local.run_url}@1", f"{url}@1", f"{url}/{paths.step_directory(1)}"):
        with opened(given, {}) as source:
            assert source.step == 1
    with opened(url, {}) as source:
        assert source.step == 2
    with pytest.raises(NotFound, match=r"no checkpoint of step 7 below .*there are steps 2"), opened(url, {}, step=7):
        pass
    with pytest.raises(NotFound, match="there is no such file, nor a checkpoint"), opened(f"{url}/none", {}):
        pass


def test_the_checkpoint_is_leased_meanwhile(local: CheckpointingPlace) -> None:
    state = make_state()
    state.step = 1
    checkpointer(state, local).save()
    step = Path(local.run_url) / "checkpoints" / paths.step_directory(1)
    with opened(local.run_url, {}):
        assert list(step.glob("reading-*"))
    assert not list(step.glob("reading-*"))
    with opened(local.run_url, {}, lease=False):
        assert not list(step.glob("reading-*"))


MEASURE = """
import resource, sys
from elastic_runner.checkpoint.tools.difference import compare
from elastic_runner.checkpoint.tools.export import export
from elastic_runner.checkpoint.tools.importing import import_state
from elastic_runner.checkpoint.tools.opening import opened
from torch._subclasses.fake_tensor import FakeTensorMode
url, file, to, elsewhere = sys.argv[1:]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with FakeTensorMode():  # imports sympy and more
    import torch; torch.empty(2) + 1
before = peak()
with opened(url, {}) as source:
    export(source, file, {}, to=to)
with opened(file, {}) as source:
    import_state(source, elsewhere, {})
with opened(url, {}) as a, opened(elsewhere, {}) as b:
    assert compare(a.contents, b.contents).same
print(peak() - before)
"""


@pytest.mark.parametrize(("format", "kind"), [("sharded", "safetensors"), ("sharded", "torch"), ("full", "dcp")])
def test_memory_stays_far_below_the_state(local: CheckpointingPlace, format: str, kind: Target, tmp_path: Path) -> None:
    """400 MB of state; export, import and comparison together."""
    model = nn.Sequential(*(nn.Linear(2500, 10_000, bias=False) for _ in range(4)))
    state = make_state(model)
    state.step = 1
    checkpointer(state, local, format).save()
    del model, state
    arguments = [local.run_url, str(tmp_path / "out"), kind, str(tmp_path / "again")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 130, f"{done.stdout} MiB"


def test_everything_covers_what_it_says() -> None:
    state = Everything().state_dict()
    assert not state["transposed"].is_contiguous() and not state["view"].is_contiguous()
