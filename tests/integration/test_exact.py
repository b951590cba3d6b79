"""determinism = "elastic": one result at every world size and under every strategy, to the last bit."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import elastic_runner as er
from elastic_runner.checkpoint.tools.difference import compare
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.config import FsdpConfig, TrainingConfig
from elastic_runner.data.ledger import read_records
from elastic_runner.environment import read_environment
from elastic_runner.recipes import digits, gpt
from elastic_runner.storage import LocalStorage, open_storage
from elastic_runner.train.record import read_summary
from tests.support import job
from tests.support.exact_jobs import config, ledger, results
from tests.support.job import PHASES, Kill
from tests.support.ranks import RankFailed, run_ranks

slow = pytest.mark.slow


def one_result(tmp_path: Path, worlds: dict[int, tuple[str, ...]], **changes: Any) -> str:
    """The result that all these worlds and strategies have in common."""
    found = {}
    for world_size, strategies in worlds.items():
        jobs = [config(str(tmp_path / f"{world_size}-{s}"), strategy=s, **changes) for s in strategies]
        found.update({(world_size, s): r for s, r in zip(strategies, results(jobs, world_size), strict=True)})
    first = next(iter(found.values()))
    assert [where for where, result in found.items() if result != first] == []
    return first


FEW = {1: ("single", "ddp", "fsdp"), 2: ("ddp", "fsdp"), 3: ("ddp", "fsdp")}
ALL = {**FEW, 4: ("ddp", "fsdp")}


@pytest.mark.parametrize(
    ("shards", "worlds", "steps"),
    [
        pytest.param(8, FEW, 10, id="8"),
        pytest.param(8, ALL, 30, id="8, long", marks=slow),
        pytest.param(12, ALL, 30, id="12, long", marks=slow),
        pytest.param(5, {1: ("single",), 5: ("ddp", "fsdp")}, 10, id="as many ranks as shards", marks=slow),
    ],
)
def test_one_result_at_every_world_size(
    shards: int, worlds: dict[int, tuple[str, ...]], steps: int, tmp_path: Path
) -> None:
    """Dropout, BatchNorm, a tied pair, a frozen and an unused layer, clipping, AdamW; runs of unequal length."""
    one_result(tmp_path, worlds, shards=shards, steps=steps)


def test_without_it_the_world_size_shows(tmp_path: Path) -> None:
    """So that equality above means something. Without BatchNorm's part in it: the losses differ, too."""
    found = [
        results([config(str(tmp_path / str(world)), determinism="order", steps=10)], world)[0].split()
        for world in (1, 2)
    ]
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def bf16(settings: er.RunConfig) -> er.RunConfig:
    return replace(settings, training=replace(settings.training, precision="bf16"))


def recomputed(settings: er.RunConfig) -> er.RunConfig:
    return replace(settings, strategy=replace(settings.strategy, checkpoint_classes=("Block",)))


def small_units(settings: er.RunConfig) -> er.RunConfig:
    fsdp = FsdpConfig(wrap_classes=("Linear", "Block"), reshard_after_forward=False)
    return replace(settings, strategy=replace(settings.strategy, fsdp=fsdp))


CHANGES = {"bf16": bf16, "recomputed": recomputed, "small units": small_units}


@pytest.mark.parametrize("what", CHANGES)
def test_other_settings_keep_one_result(what: str, tmp_path: Path) -> None:
    jobs = {}
    for name, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        settings = config(str(tmp_path / name), strategy=name, shards=5, steps=4)
        jobs[name] = results([CHANGES[what](settings)], world_size)[0]
    assert len(set(jobs.values())) == 1, jobs


def difference(a: Path, b: Path) -> list[object]:
    """What differs in the newest checkpoints of two runs."""
    with opened(str(a), {}) as one, opened(str(b), {}) as other:
        found = compare(one.contents, other.contents)
        assert one.step == other.step and found.equal > 0
    return [*found.only_a, *found.only_b, *found.tensors, *found.plain]


def interrupted(run_dir: Path, rng: random.Random) -> None:
    """Kills while the world and the strategy change: 24 steps in four attempts."""
    for number, strategy in enumerate(("ddp", "fsdp", "ddp", None)):
        world = rng.choice([1, 2, 3])
        if strategy is None:
            run_ranks(job.train, world, job.config(str(run_dir), determinism="elastic"))
            return
        phase = rng.choice([phase for phase in PHASES if phase not in ("write", "commit")])
        kill = Kill(rank=rng.randrange(world), step=rng.randrange(2 + 7 * number, 9 + 7 * number), phase=phase)
        print(f"world {world}, {strategy}, {kill}")
        with pytest.raises(RankFailed):
            run_ranks(job.train, world, job.config(str(run_dir), strategy=strategy, determinism="elastic"), kill)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slow) for seed in range(1, 4))])
def test_kills_and_resizes_leave_no_trace(seed: int, tmp_path: Path) -> None:
    run_ranks(job.train, 1, job.config(str(tmp_path / "alone"), strategy="single", determinism="elastic"))
    interrupted(tmp_path / "killed", random.Random(seed))
    assert difference(tmp_path / "alone", tmp_path / "killed") == []
    assert ledger(str(tmp_path / "alone")) == ledger(str(tmp_path / "killed"))
    replays = [r for r in read_records(LocalStorage(tmp_path / "killed")) if r["event"] == "replay"]
    assert replays and not any("divergence" in replay for replay in replays), replays


def run_recipe(name: str, settings: er.RunConfig, dies_after: int | None = None) -> None:
    """``dies_after``: the last rank is killed after that step, before it is saved."""
    save = er.Checkpointer.maybe_save

    def save_or_die(self: er.Checkpointer, step: Any, *rest: Any) -> bool:
        if step.number == dies_after and read_environment().rank == read_environment().world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, step, *rest)

    with (
        patch.object(er, "load_config", lambda cls: settings),
        patch.object(er.Checkpointer, "maybe_save", save_or_die),
    ):
        import_module(f"elastic_runner.recipes.{name}").main()


def recipe(name: str, run_dir: Path, strategy: str, shards: int) -> er.RunConfig:
    """30 steps of it."""
    base: er.RunConfig = digits.DigitsConfig(evaluate_every=15)
    if name == "gpt":
        model = gpt.ModelConfig(layers=2, heads=2, width=32, context=32)
        base = gpt.GptConfig(model=model, evaluation=gpt.EvaluationConfig(every=15, windows=20, sample_bytes=8))
    return replace(
        base,
        run_dir=str(run_dir),
        determinism="elastic",
        training=TrainingConfig(max_steps=30, clip_norm=1.0),
        data=replace(base.data, global_batch=4 * shards, shards=shards),
        strategy=replace(base.strategy, name=strategy),  # type: ignore[arg-type]
        checkpoint=replace(base.checkpoint, every=4),
    )


@slow
@pytest.mark.parametrize("shards", [8, 12])
@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_recipes_have_one_result(name: str, shards: int, tmp_path: Path) -> None:
    """Their evaluations as well; through kills, other worlds and other strategies, too."""
    places = [(1, "single"), (2, "ddp"), (3, "fsdp"), (4, "ddp")]
    directories = [tmp_path / f"{world}-{strategy}" for world, strategy in places]
    for directory, (world, strategy) in zip(directories, places, strict=True):
        run_ranks(run_recipe, world, name, recipe(name, directory, strategy, shards))
    directories.append(tmp_path / "killed")
    rng = random.Random(shards)
    for world, strategy, step in ((2, "ddp", rng.randrange(5, 10)), (3, "fsdp", rng.randrange(14, 29))):
        print(f"world {world}, {strategy}, killed after step {step}")
        with pytest.raises(RankFailed):
            run_ranks(run_recipe, world, name, recipe(name, directories[-1], strategy, shards), step)
    run_ranks(run_recipe, 2, name, recipe(name, directories[-1], "ddp", shards))
    first = directories[0]
    for other in directories[1:]:
        assert difference(first, other) == []
        assert ledger(str(first)) == ledger(str(other))
        mine, theirs = (read_summary(open_storage(str(directory))) for directory in (first, other))
        assert mine is not None and theirs is not None and mine.validation == theirs.validation
