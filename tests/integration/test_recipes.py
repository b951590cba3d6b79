"""The recipes learn, under each strategy, and evaluate alike at every world size."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

import elastic_runner as er
from elastic_runner.config import StrategyConfig, TrainingConfig
from elastic_runner.recipes import digits, gpt
from elastic_runner.recipes.text import TextConfig, load_text
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.ranks import run_ranks


def run_recipe(name: str, settings: er.RunConfig) -> None:
    with patch.object(er, "load_config", lambda cls: settings):
        import_module(f"elastic_runner.recipes.{name}").main()


def small_gpt(run_dir: Path, steps: int, strategy: str) -> gpt.GptConfig:
    return gpt.GptConfig(
        run_dir=str(run_dir),
        training=TrainingConfig(max_steps=steps, clip_norm=1.0),
        strategy=replace(gpt.GptConfig().strategy, name=strategy),  # type: ignore[arg-type]
        model=gpt.ModelConfig(layers=2, heads=2, width=32, context=32),
        evaluation=gpt.EvaluationConfig(every=10, windows=20, sample_bytes=8),
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gpt_learns_and_writes_a_sample(strategy: str, tmp_path: Path) -> None:
    run_ranks(run_recipe, 2, "gpt", small_gpt(tmp_path, 30, strategy))
    summary = read_summary(LocalStorage(tmp_path))
    assert summary is not None and summary.status == "finished"
    assert summary.validation["bits_per_byte"] < 6.5  # 8 before
    assert len((tmp_path / "sample.txt").read_bytes()) >= 12


def test_digits_learn_and_buffers_are_kept(tmp_path: Path) -> None:
    settings = digits.DigitsConfig(run_dir=str(tmp_path), training=TrainingConfig(max_steps=60))
    run_ranks(run_recipe, 2, "digits", settings)
    summary = read_summary(LocalStorage(tmp_path))
    assert summary is not None and summary.validation["accuracy"] > 0.95
    # Another world continues from it and evaluates what it has restored to the same numbers.
    more = replace(settings, training=TrainingConfig(max_steps=61), strategy=StrategyConfig(name="fsdp"))
    run_ranks(run_recipe, 1, "digits", more)
    again = read_summary(LocalStorage(tmp_path))
    assert again is not None and again.validation["accuracy"] == pytest.approx(summary.validation["accuracy"], abs=0.02)


def test_text_is_split_by_file_and_covers_the_standard_library() -> None:
    train, validation = load_text(TextConfig(), context=128)
    assert (len(train) + len(validation)) * 128 > 10_000_000
    assert 0.01 < len(validation) / len(train) < 0.2


def test_text_of_any_tree_or_glob(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"file {number} " * 30)
    (tmp_path / "other.md").write_text("x" * 10_000)
    by_folder = load_text(TextConfig(url=str(tmp_path), pattern="*.txt", validation_percent=20), context=16)
    by_glob = load_text(TextConfig(url=f"file://{tmp_path}/*.txt", validation_percent=20), context=16)
    assert [len(part) for part in by_folder] == [len(part) for part in by_glob]
    with pytest.raises(er.ElasticRunnerError, match=r"text\.url"):
        load_text(TextConfig(url=str(tmp_path), pattern="*.none"), context=16)


def test_the_split_does_not_depend_on_where_the_tree_lies(tmp_path: Path) -> None:
    for place in ("here", "there/deeper"):
        for number in range(60):
            file = tmp_path / place / f"{number % 7}" / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"file {number} " * (20 + number))
    one, other = (
        load_text(TextConfig(url=str(tmp_path / place), pattern="*.txt", validation_percent=20), context=16)
        for place in ("here", "there/deeper")
    )
    assert [len(part) for part in one] == [len(part) for part in other]
    assert all((a[0] == b[0]).all() for a, b in zip(one[1], other[1], strict=True))
