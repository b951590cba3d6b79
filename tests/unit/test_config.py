"""RunConfig from a file and flags."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic.dataclasses import dataclass

from elastic_runner.config import (
    STRICT,
    CheckpointConfig,
    RunConfig,
    TrainingConfig,
    load_config,
    nested_options,
    read_config,
)
from elastic_runner.errors import ConfigError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_RUNNER_CONFIG", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        'seed = 7\n[training]\nmax_steps = 50\nclip_norm = 1\n[strategy]\nname = "fsdp"\n'
        '[strategy.fsdp]\nwrap_classes = ["Block"]\n[checkpoint.options]\n"client_kwargs.endpoint_url" = "http://h"\n'
    )
    return path


def test_defaults_are_valid() -> None:
    assert load_config(args=[]) == RunConfig()


def test_file_then_flags(file: Path) -> None:
    config = load_config(args=["--config", str(file), "--training.max-steps", "60", "--strategy.fsdp.shard-size", "2"])
    assert config.seed == 7, "from the file"
    assert config.training.clip_norm == 1.0, "from the file, beside a flag of the same section"
    assert config.training.max_steps == 60, "a flag beats the file"
    assert config.strategy.fsdp.wrap_classes == ("Block",) and config.strategy.fsdp.shard_size == 2
    assert config.checkpoint.options == {"client_kwargs.endpoint_url": "http://h"}
    assert config.data == RunConfig().data, "defaults"


def test_config_flag_beats_the_launchers_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "launcher.toml"
    other.write_text("seed = 1\n")
    monkeypatch.setenv("ELASTIC_RUNNER_CONFIG", str(other))
    assert load_config(args=[]).seed == 1
    assert load_config(args=[f"--config={file}"]).seed == 7


def test_a_recipe_keeps_defaults_of_its_own_beside_the_file(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Recipe(RunConfig):
        training: TrainingConfig = dataclasses.field(default_factory=lambda: TrainingConfig(max_steps=9, clip_norm=2))

    path = tmp_path / "recipe.toml"
    path.write_text("[training]\nmax_steps = 10\n")
    assert read_config(Recipe, path).training == TrainingConfig(max_steps=10, clip_norm=2)


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ("sede = 1", "sede"),
        ("[training]\nmax_step = 1", "training.max_step"),
        ("[training]\nmax_steps = 0", "training.max_steps"),
        ('[training]\nmax_steps = "many"', "training.max_steps"),
        ("[training]\nmax_steps = 1.5", "training.max_steps"),
        ("[training]\nclip_norm = nan", "training.clip_norm"),
        ("[timeouts]\nstep = inf", "timeouts.step"),
        ("[timeouts]\nstep = -1", "timeouts.step"),
        ('[strategy]\nname = "zero"', "strategy.name"),
        ("[strategy.ddp]\nbucket_cap_mb = 0", "strategy.ddp.bucket_cap_mb"),
        ("[strategy.fsdp]\nwrap_classes = 3", "strategy.fsdp.wrap_classes"),
        ("[data]\nglobal_batch = 10\nshards = 4", "data.shards"),
        ("training = 3", "training"),
    ],
)
def test_wrong_files_name_file_and_field(tmp_path: Path, toml: str, field: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        read_config(RunConfig, path)
    assert str(path) in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe"])
def test_what_is_not_toml_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        read_config(RunConfig, path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_config(RunConfig, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        read_config(RunConfig, tmp_path)
    with pytest.raises(ConfigError, match="--config"):
        load_config(args=["--config"])


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--training.max-step", "3"], "max-step"),
        (["--training.max-steps", "many"], "max-steps"),
        (["--training.max-steps", "0"], "max_steps"),
        (["--training.clip-norm", "nan"], "clip_norm"),
        (["--strategy.name", "zero"], "strategy.name"),
        (["--data.shards", "5"], "data.shards"),
    ],
)
def test_bad_flags_exit_with_2_and_name_the_flag(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(args=flags)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_nested_options() -> None:
    assert nested_options({"key": "k", "client_kwargs.endpoint_url": "u"}) == {
        "key": "k",
        "client_kwargs": {"endpoint_url": "u"},
    }
    with pytest.raises(ConfigError, match=r"a\.b"):
        nested_options({"a": "1", "a.b": "2"})


def test_configurations_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        CheckpointConfig(every=0)


def fields(cls: Any, prefix: str = "") -> list[str]:
    found = []
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else None
        name = prefix + field.name.replace("_", "-")
        found += fields(type(default), f"{name}.") if dataclasses.is_dataclass(default) else [name]
    return found


HELP = "import elastic_runner as er; er.load_config()"


def test_help_prints_every_field_with_its_docstring() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    words = re.sub(r"[│╭╮╰╯─\s]+", " ", done.stdout)
    for name in fields(RunConfig):
        assert f"--{name} " in words or f"--{name}, " in words, name
    # One line each of a section, of a section in a section, and the last words of one that goes over two lines.
    for text in (
        "Target number of optimizer steps. Raising it continues a finished run.",
        "Size of a gradient bucket in MiB.",
        "the largest divisor of both is used.",
    ):
        assert text in words


def test_every_field_has_a_docstring() -> None:
    source = Path(sys.modules["elastic_runner.config"].__file__ or "").read_text()
    for name in fields(RunConfig):
        leaf = name.rpartition(".")[2].replace("-", "_")
        assert re.search(rf'\n    {leaf}: .*\n    """', source), name


def test_an_uncaught_config_error_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[training]\nmax_steps = 0\n")
    done = subprocess.run(
        [sys.executable, "-c", HELP, "--config", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "training.max_steps" in done.stderr and "Traceback" not in done.stderr


def test_options_of_filesystems_nest_and_know_true_and_false() -> None:
    options = {"anon": "false", "client_kwargs.endpoint_url": "http://host", "client_kwargs.verify": "True"}
    assert nested_options(options) == {"anon": False, "client_kwargs": {"endpoint_url": "http://host", "verify": True}}
