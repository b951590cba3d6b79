"""Each piece of the state, dropped on purpose when an attempt resumes, is found and named by the replay check."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.errors import ReplayDiverged
from elastic_runner.train import loop as loop_module
from elastic_runner.train import step as step_module
from elastic_runner.worker import worker as worker_module
from tests.support import job
from tests.support.ranks import RankFailed, run_ranks

SAVED, DIED = 5, 9
Damage = Callable[[er.TrainState, dict[str, Any]], None]


class Died(Exception):
    """The fault."""


def config(
    run_dir: Path,
    *,
    strategy: str = "single",
    precision: Literal["fp32", "fp16"] = "fp32",
    replay: Literal["warn", "stop", "off"] = "warn",
    steps: int = 12,
    **changes: Any,
) -> er.RunConfig:
    base = job.config(str(run_dir), strategy=strategy, steps=steps, every=SAVED, **changes)
    return replace(
        base,
        training=replace(base.training, precision=precision, replay=replay),
        checkpoint=replace(base.checkpoint, mode="sync"),
    )


def train(settings: er.RunConfig, damage: Damage | None = None, *, dies_after: int = 0) -> None:
    """One attempt; ``damage`` is done to what was restored, and is given what there was before."""
    with er.Worker(settings) as worker:
        model = worker.prepare(job.Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        loader = er.ElasticLoader(job.dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader, schedule=schedule)
        parts = {"model": model, "optimizer": optimizer, **state.others()}
        fresh = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        state.scaler.scale = 1024.0  # not what a scaler begins with
        checkpointer = er.Checkpointer(settings.checkpoint, state, worker)
        if checkpointer.restore() and damage is not None:
            damage(state, fresh)
        for step in worker.steps(state):
            for x, y in step.microbatches():
                step.backward(F.mse_loss(model(x), y))
            step.optimize()
            checkpointer.maybe_save(step)
            if step.number == dies_after:
                raise Died


def resumed(settings: er.RunConfig, damage: Damage | None = None) -> None:
    """An attempt that dies, and the next one."""
    dies(settings)
    train(settings, damage)


def dies(settings: er.RunConfig, damage: Damage | None = None, *, after: int = DIED) -> None:
    with pytest.raises(Died):
        train(settings, damage, dies_after=after)


def told(settings: er.RunConfig) -> list[dict[str, Any]]:
    """What the ledger says of replays."""
    files = sorted(Path(settings.run_dir, paths.LEDGER).iterdir())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == "replay"]


def drop_schedule(state: er.TrainState, fresh: dict[str, Any]) -> None:
    assert state.schedule is not None
    state.schedule.load_state_dict(fresh["schedule"])


def drop_moments(state: er.TrainState, fresh: dict[str, Any]) -> None:
    for of_parameter in state.optimizer.state.values():
        of_parameter["exp_avg"].zero_()


def reseed(state: er.TrainState, fresh: dict[str, Any]) -> None:
    def seed(module: torch.nn.Module, inputs: Any) -> None:
        torch.manual_seed(1)

    state.model.register_forward_pre_hook(seed)


DROPPED: dict[str, tuple[Damage, int, str, str]] = {
    # The piece: how it is dropped, and where, in what and as what it must be found.
    "data position": (lambda state, fresh: state.data.load_state_dict(fresh["data"]), 6, "first", "data"),
    "random numbers of the step": (lambda state, fresh: None, 6, "rng", "random numbers"),
    "random numbers of the shards": (lambda state, fresh: None, 6, "rng", "random numbers"),
    "random numbers, by a model that seeds": (reseed, 6, "rng", "random numbers"),
    "schedule": (drop_schedule, 7, "lr", "schedule"),
    "scaler": (lambda state, fresh: state.scaler.load_state_dict(fresh["scaler"]), 6, "scale", "scaler"),
    "parameters": (lambda state, fresh: state.model.load_state_dict(fresh["model"]), 6, "loss", "parameters"),
    "optimizer moments": (drop_moments, 7, "loss", "optimizer"),
}


@pytest.mark.parametrize("piece", DROPPED)
def test_a_piece_that_was_not_restored_is_named(
    piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage, step, what, cause = DROPPED[piece]
    if piece == "scaler":
        monkeypatch.setattr(worker_module, "check_strategy", lambda *args, **options: None)  # fp16 on the CPU
    settings = config(tmp_path, precision="fp16" if piece == "scaler" else "fp32")
    dies(settings)
    if piece.startswith("random numbers of"):
        module = loop_module if piece.endswith("of the step") else step_module
        monkeypatch.setattr(module, "seed_all", lambda *key: None)
    train(settings, damage)
    [event] = told(settings)
    found = event["divergence"]
    assert (found["step"], found["what"], found["cause"]) == (step, what, cause)
    assert found["old"] != found["new"] and (event["equal"], event["agreed"]) == (step - SAVED - 1, step - 1)
    [line] = [r.getMessage() for r in caplog.records if "replay check" in r.getMessage()]
    assert f"step {step} was done again and its {what} is {found['new']}" in line


@pytest.mark.parametrize("determinism", ["order", "elastic"])
def test_an_undamaged_attempt_does_the_same_again(
    determinism: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path, determinism=determinism)
    with caplog.at_level("INFO", "elastic_runner"):
        resumed(settings)
    [event] = told(settings)
    assert event["equal"] == DIED - SAVED and "divergence" not in event
    assert "4 steps were done again and came to the same as before" in caplog.text


@pytest.mark.parametrize("changes", [{"replay": "off"}, {"determinism": "off"}], ids=["no check", "no order"])
def test_nothing_is_compared_where_nothing_can_be_or_shall_be(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = config(tmp_path, **changes)
    resumed(settings, drop_moments)
    assert told(settings) == []


@pytest.mark.parametrize("steps", [12, 7], ids=["next step", "last step"])
def test_it_can_stop_the_run_until_that_is_mended(steps: int, tmp_path: Path) -> None:
    dies(config(tmp_path))
    settings = config(tmp_path, replay="stop", steps=steps)
    for _ in range(2):  # the last step was saved before that was known: it is not gone on from
        with pytest.raises(ReplayDiverged, match="step 7 was done again and its loss"):
            train(settings, drop_moments)
    train(settings)
    assert [event["equal"] for event in told(settings)] == [1, 1, 4 if steps == 12 else 2]


def test_it_stops_every_rank(tmp_path: Path) -> None:
    """Only rank 0 has the ledger."""
    settings = config(tmp_path, strategy="ddp", replay="stop")
    for damage, error in ((None, "Died"), (drop_moments, "ReplayDiverged: step 7")):
        with pytest.raises(RankFailed) as failed:
            run_ranks(train_on_ranks, 2, settings, damage)
        assert all(error in text for text in failed.value.errors.values()), failed.value


def train_on_ranks(settings: er.RunConfig, damage: Damage | None) -> None:
    train(settings, damage, dies_after=0 if damage else DIED)


def test_steps_after_a_divergence_are_no_measure_for_the_next_attempt(tmp_path: Path) -> None:
    """It went another way from step 7 on, and died in step 8: what the first attempt did of 9 is of no use."""
    settings = config(tmp_path)
    dies(settings)
    dies(settings, drop_moments, after=8)
    train(settings, drop_moments)
    assert [event["equal"] for event in told(settings)] == [1, 3]
    assert "divergence" not in told(settings)[1]
