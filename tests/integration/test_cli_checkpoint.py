"""``checkpoint inspect|diff|export|import`` as a user calls them, on a run of two FSDP ranks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runner.cli.main import main
from elastic_runner.config import CheckpointConfig
from elastic_runner.errors import ExitCode
from tests.support.exporting import KINDS
from tests.support.job import Net, config, train
from tests.support.ranks import run_ranks
from tests.support.s3 import S3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks with steps 5 and 10."""
    path = tmp_path_factory.mktemp("run")
    run_ranks(train, 2, config(str(path), strategy="fsdp", steps=10))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``checkpoint`` with arguments; exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_inspect(run_dir: Path, call: Any) -> None:
    code, text, errors = call("inspect", run_dir)
    assert (code, errors) == (0, "")
    assert "step 10 · attempt 1 · sharded · written by 2 ranks" in text
    assert "tied.weight is mix.weight" in text and "exp_avg_sq: " in text
    assert "optimizer.state." not in text
    code, text, _ = call("inspect", f"{run_dir}@5", "--all")
    assert "step 5 · attempt 1" in text and "optimizer.state.embed.weight.exp_avg " in text
    code, text, errors = call("inspect", run_dir, "--step", 5, "--json")
    told = json.loads(text)
    assert (told["step"], told["world_size"], told["states"]["state.trainer"], errors) == (5, 2, {"step": 5}, "")
    weight = next(line for line in told["tensors"] if line["key"] == "model.embed.weight")
    assert (weight["shape"], weight["dtype"], weight["chunks"]) == ([16, 8], "float32", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_out_and_back_in(kind: str, run_dir: Path, tmp_path: Path, call: Any) -> None:
    code, text, errors = call("export", run_dir, tmp_path / "out", "--to", kind)
    assert (code, errors) == (0, "") and f"step 10 of {run_dir}/checkpoints -> {tmp_path}/out" in text
    code, text, _ = call("diff", run_dir, tmp_path / "out")
    assert (code, "no difference" in text) == (0, True)
    code, text, _ = call("import", tmp_path / "out", tmp_path / "other", "--format", "full")
    assert code == 0 and f"--checkpoint.url {tmp_path}/other" in text and "weights only" not in text
    code, text, _ = call("diff", f"{tmp_path}/other@10", run_dir, "--json")
    assert (code, json.loads(text)["same"]) == (0, True)
    assert call("inspect", tmp_path / "out")[0] == 0
    code, _, errors = call("export", run_dir, tmp_path / "out", "--to", kind)
    assert (code, "--force" in errors) == (ExitCode.USAGE, True)
    code, text, _ = call("export", run_dir, tmp_path / "out", "--to", kind, "--force", "--model-only", "--json")
    told = json.loads(text)
    assert (code, told["to"], told["step"], told["tensors"]) == (0, kind, 10, 14)
    code, text, _ = call("inspect", tmp_path / "out")
    assert "optimizer: none, weights only" in text


def test_diff(run_dir: Path, call: Any) -> None:
    code, text, errors = call("diff", f"{run_dir}@5", f"{run_dir}@10")
    assert (code, errors) == (ExitCode.FAILED, "")
    assert "state.trainer.step: 5 -> 10" in text and "model.embed.weight" in text
    code, text, _ = call("diff", f"{run_dir}@5", f"{run_dir}@10", "--json")
    told = json.loads(text)
    assert (code, told["same"], told["only_a"], told["only_b"]) == (1, False, [], [])
    assert any(each["key"] == "model.embed.weight" and each["elements"] == 128 for each in told["tensors"])


@pytest.mark.parametrize("other", ["none", "empty"])
def test_what_cannot_be_compared_is_not_called_different(other: str, run_dir: Path, tmp_path: Path, call: Any) -> None:
    (tmp_path / "empty").write_bytes(b"")
    code, text, errors = call("diff", run_dir, tmp_path / other)
    assert (code, text) == (ExitCode.USAGE, "") and "error" in errors


def test_a_run_starts_from_foreign_weights(run_dir: Path, tmp_path: Path, call: Any) -> None:
    torch.manual_seed(3)
    weights = Net().state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, tmp_path / "w.pt")
    (tmp_path / "new/checkpoints").mkdir(parents=True)
    code, _, errors = call("import", tmp_path / "w.pt", tmp_path / "new")
    assert (code, "--step 0" in errors) == (ExitCode.USAGE, True)
    code, text, _ = call("import", tmp_path / "w.pt", tmp_path / "new", "--step", 0)
    assert code == 0 and "--checkpoint.allow-missing 'optimizer.*' 'state.*'" in text and "--checkpoint.url" not in text
    settings = config(str(tmp_path / "new"), strategy="fsdp", steps=2)
    settings = replace(settings, checkpoint=CheckpointConfig(every=1, allow_missing=("optimizer.*", "state.*")))
    assert run_ranks(train, 2, settings)[0]["resumed"] == 0
    _, text, _ = call("diff", tmp_path / "w.pt", f"{tmp_path}/new@1", "--json")
    largest = {each["key"]: each["max_abs"] for each in json.loads(text)["tensors"]}
    assert 0 < largest["model.embed.weight"] < 0.02  # one step of 0.001 away


def test_hostile_files_are_refused(tmp_path: Path, call: Any) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    (tmp_path / "hostile").write_bytes(pickle.dumps({"w": Payload()}, protocol=2))
    torch.save({"model": {"w": torch.zeros(3)}, "extra": Payload()}, tmp_path / "hostile.pt")
    for name in ("hostile", "hostile.pt"):
        for arguments in (
            ("inspect", tmp_path / name),
            ("diff", tmp_path / name, tmp_path / name),
            ("export", tmp_path / name, tmp_path / "out", "--to", "torch"),
            ("import", tmp_path / name, tmp_path / "run", "--step", 1),
        ):
            code, _, errors = call(*arguments)
            assert code == ExitCode.DO_NOT_RETRY and "more than tensors and plain data" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile", "hostile.pt"]


@pytest.mark.s3
def test_through_an_object_store(s3: S3, run_dir: Path, tmp_path: Path, call: Any) -> None:
    options = [text for option in s3.options.items() for text in option]
    out, run = f"{s3.url}/out.safetensors", f"{s3.url}/new"
    assert call("export", run_dir, out, "--to", "safetensors", "--destination-options", *options)[0] == 0
    assert call("import", out, run, "--options", *options)[0] == 0
    assert call("export", run, f"{s3.url}/dcp", "--to", "dcp", "--options", *options)[0] == 0
    code, text, _ = call("diff", f"{s3.url}/dcp", run_dir, "--options", *options)
    assert (code, "no difference" in text) == (0, True)
    code, _, errors = call("export", run, out, "--to", "torch", "--options", *options)
    assert code == ExitCode.USAGE and "--force" in errors


def test_output_may_be_cut_off(run_dir: Path) -> None:
    command = f"{sys.executable} -m elastic_runner checkpoint inspect {run_dir} --all | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["inspect", "diff", "export", "import"])
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", verb, "--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
