"""The worker in forked ranks: stopping, evaluating, slow saves, hangs, and being called as a library."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elastic_runner as er
from elastic_runner.config import CheckpointConfig, DataConfig, RunConfig, TimeoutConfig, TrainingConfig
from elastic_runner.errors import Interrupted, LoopError, StateError
from elastic_runner.storage import LocalStorage
from elastic_runner.train.record import read_summary
from tests.support.job import config, dataset
from tests.support.ranks import RankFailed, run_ranks


class Counting(nn.Module):
    """Its gradient is -1 everywhere, so with a learning rate of 1 every parameter equals the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -(self.a.sum() + self.b.sum()) + 0 * x.sum()


class Ones(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class Loop:
    """The usual script. ``during`` is called in each step, after its first backward."""

    def __init__(self, config: RunConfig, **parts: Any) -> None:
        self.config = config
        self.parts = parts
        self.restored = 0
        self.steps: list[int] = []

    def run(
        self,
        during: Callable[[er.Worker, int], None] = lambda worker, step: None,
        after: Callable[[er.Worker, int, nn.Module], None] = lambda worker, step, model: None,
    ) -> Loop:
        with er.Worker(self.config) as worker:
            model = worker.prepare(Counting())
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            data = er.ElasticLoader(Ones(), self.config.data, worker)
            state = er.TrainState(model=model, optimizer=optimizer, data=data, **self.parts)
            checkpointer = er.Checkpointer(self.config.checkpoint, state, worker)
            self.restored = checkpointer.restore()
            for parameter in model.parameters():
                assert (parameter == self.restored).all(), "a torn step was saved"
            for step in worker.steps(state):
                for batch in step.microbatches():
                    step.backward(model(batch))
                    during(worker, step.number)
                step.optimize()
                self.steps.append(step.number)
                after(worker, step.number, model)
                checkpointer.maybe_save(step)
        return self


def config_in(run_dir: Path | str, **training: Any) -> RunConfig:
    return RunConfig(
        run_dir=str(run_dir),
        training=TrainingConfig(**{"max_steps": 6, **training}),
        data=DataConfig(global_batch=8, shards=4),
        checkpoint=CheckpointConfig(every=1000, keep=1),
    )


def summary(run_dir: Path | str) -> dict[str, Any]:
    return json.loads(Path(run_dir, "summary.json").read_text())


def stopped_at_random_moments(run_dir: str, tries: int) -> None:
    draw = random.Random(0)
    for number in range(tries):
        config = config_in(f"{run_dir}/{number}", max_steps=100_000)
        delay = draw.uniform(0, 0.03)
        timer: list[threading.Timer] = []

        def arm(worker: er.Worker, step: int, delay: float = delay, timer: list[threading.Timer] = timer) -> None:
            if not timer and worker.rank == worker.world_size - 1:
                timer.append(threading.Timer(delay, signal.raise_signal, (signal.SIGTERM,)))
                timer[0].start()

        loop = Loop(config)
        with pytest.raises(Interrupted):
            loop.run(arm)
        assert summary(config.run_dir)["status"] == "interrupted"
        assert summary(config.run_dir)["step"] == loop.steps[-1]
        again = Loop(replace(config, training=TrainingConfig(max_steps=loop.steps[-1] + 2))).run()
        assert again.restored == loop.steps[-1]
        assert len(again.steps) == 2


@pytest.mark.parametrize(("world_size", "tries"), [(1, 8), (2, 6)])
def test_a_signal_at_any_moment_saves_one_whole_step(tmp_path: Path, world_size: int, tries: int) -> None:
    """c21, c18: with two ranks, only the last one is told."""
    run_ranks(stopped_at_random_moments, world_size, str(tmp_path), tries)


def stopped_once(run_dir: str) -> list[int]:
    def stop(worker: er.Worker, step: int) -> None:
        if step == 3 and worker.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    loop = Loop(config_in(run_dir))
    with pytest.raises(Interrupted, match="saved at step 3 of 6"):
        loop.run(stop)
    return loop.steps


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    """c18: the decision is made once, whoever is told."""
    assert run_ranks(stopped_once, 3, str(tmp_path)) == [[1, 2, 3]] * 3
    assert summary(tmp_path)["message"].startswith("asked to stop")


def enough_on_one_rank(run_dir: str) -> list[int]:
    def stop(worker: er.Worker, step: int) -> None:
        if step == 3 and worker.rank == 1:
            worker.stop("no better for 2 steps")

    return Loop(config_in(run_dir)).run(stop).steps


def test_early_stopping_on_one_rank_finishes_the_run_on_all(tmp_path: Path) -> None:
    """c18: decided once, shared at the end of the step, saved; no error, so nothing is started again for it."""
    assert run_ranks(enough_on_one_rank, 3, str(tmp_path)) == [[1, 2, 3]] * 3
    said = (summary(tmp_path)["status"], summary(tmp_path)["step"], summary(tmp_path)["message"])
    assert said == ("finished", 3, "no better for 2 steps; saved at step 3 of 6")


class Alarm:
    """A part of the state; the process is asked to stop when it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGTERM)


def stopped_while_loading(run_dir: str) -> tuple[int, list[int]]:
    Loop(config_in(run_dir, max_steps=2), alarm=Alarm()).run()
    loop = Loop(config_in(run_dir), alarm=Alarm())
    with pytest.raises(Interrupted, match="saved at step 2 of 6"):
        loop.run()
    return loop.restored, loop.steps


def test_a_signal_before_the_first_step_costs_no_step(tmp_path: Path) -> None:
    """c23: the first step may be minutes of compilation."""
    assert run_ranks(stopped_while_loading, 1, str(tmp_path)) == [(2, [])]
    assert summary(tmp_path)["status"] == "interrupted" and summary(tmp_path)["step"] == 2


def evaluated(run_dir: str) -> tuple[float, list[int], int]:
    told: list[float] = []

    def metric(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(0.2)
        if not told:
            told.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)
        return {"value": batch[:, 0]}

    loop = Loop(config_in(run_dir))
    with pytest.raises(Interrupted):
        loop.run(after=lambda worker, step, model: worker.evaluate(model, Ones(), metric, batch_size=1) and None)
    taken = time.monotonic() - told[0]
    return taken, loop.steps, Loop(config_in(run_dir)).run().restored


def test_a_signal_in_an_evaluation_is_served_at_once(tmp_path: Path) -> None:
    """c23: the evaluation would take 13 s."""
    [(taken, steps, restored)] = run_ranks(evaluated, 1, str(tmp_path))
    assert taken < 5
    assert steps[-1] == restored <= 2


def other_accumulation(run_dir: str) -> tuple[int, list[int]]:
    config = config_in(run_dir, max_steps=3)
    Loop(replace(config, data=DataConfig(global_batch=8, shards=8))).run()
    loop = Loop(replace(config_in(run_dir), data=DataConfig(global_batch=8, shards=2))).run()
    return loop.restored, loop.steps


def test_accumulation_may_change_between_starts(tmp_path: Path) -> None:
    """c57: positions are in samples, counters in optimizer steps."""
    assert run_ranks(other_accumulation, 2, str(tmp_path)) == [(3, [4, 5, 6])] * 2
    told = summary(tmp_path)
    assert (told["samples_seen"], told["samples_repeated"], told["samples_skipped"]) == (48, 0, 0)


class SlowPart:
    """Takes two seconds to be saved, on rank 0 alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 0:
            time.sleep(2)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def slow_save(run_dir: str) -> list[int]:
    config = replace(config_in(run_dir, max_steps=4), timeouts=TimeoutConfig(step=1, first_step=1))
    config = replace(config, checkpoint=CheckpointConfig(every=2))
    return Loop(config, slow=SlowPart(int(os.environ["RANK"]))).run().steps


def test_a_slow_save_does_not_count_as_a_hang(tmp_path: Path) -> None:
    """c17."""
    assert run_ranks(slow_save, 2, str(tmp_path)) == [[1, 2, 3, 4]] * 2
    assert summary(tmp_path)["status"] == "finished"


def hangs(run_dir: str) -> None:
    def hang(worker: er.Worker, step: int) -> None:
        if step == 2 and worker.rank == 1:
            threading.Event().wait()

    Loop(replace(config_in(run_dir), timeouts=TimeoutConfig(step=1, first_step=30))).run(hang)


def test_a_hang_becomes_an_exit(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(hangs, 2, str(tmp_path), timeout=60)
    # The one that hangs and the one that waits for it: whoever is later may see the other's end instead.
    assert "died with exit code 1" in caught.value.errors.values()


def save_on_main_only(run_dir: str) -> tuple[str, float]:
    begun: list[float] = []

    def save(worker: er.Worker, step: int, model: nn.Module) -> None:
        begun.append(time.monotonic())
        if worker.rank == 0:
            checkpointers[0].save()

    checkpointers: list[er.Checkpointer] = []
    config = config_in(run_dir)
    try:
        with er.Worker(config) as worker:
            model = worker.prepare(Counting())
            data = er.ElasticLoader(Ones(), config.data, worker)
            state = er.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1), data=data)
            checkpointers.append(er.Checkpointer(config.checkpoint, state, worker))
            for step in worker.steps(state):
                for batch in step.microbatches():
                    step.backward(model(batch))
                step.optimize()
                save(worker, step.number, model)
    except LoopError as error:
        return str(error), time.monotonic() - begun[0]
    return "", 0


def test_a_save_on_one_rank_only_is_noticed_at_once(tmp_path: Path) -> None:
    """c15: both places are named."""
    for message, seconds in run_ranks(save_on_main_only, 2, str(tmp_path), timeout=60):
        assert "rank 0: save of step 1" in message and "rank 1: step 2 begins" in message
        assert seconds < 5


def library_call(run_dir: str) -> Any:
    """A library call: the error comes out as it is, and the process is as it was before."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

    def fail(worker: er.Worker, step: int) -> None:
        raise ZeroDivisionError("in step 1")

    with pytest.raises(ZeroDivisionError, match="in step 1"):
        Loop(config_in(run_dir)).run(fail)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert not dist.is_initialized()
    failed = summary(run_dir)
    Loop(config_in(run_dir)).run()
    return failed, summary(run_dir)


def test_as_a_library_call_the_exception_propagates(tmp_path: Path) -> None:
    """c06."""
    [(failed, finished)] = run_ranks(library_call, 1, str(tmp_path))
    assert (failed["status"], failed["step"], failed["attempt"]) == ("failed", 0, 1)
    assert "ZeroDivisionError: in step 1" in failed["message"]
    assert (finished["status"], finished["step"], finished["attempt"]) == ("finished", 6, 2)


def loop_mistakes(run_dir: str) -> list[str]:
    def attempt(number: int, body: Callable[[Any, Any, Any], None]) -> str:
        config = config_in(f"{run_dir}/{number}")
        try:
            with er.Worker(config) as worker:
                model = worker.prepare(Counting())
                data = er.ElasticLoader(Ones(), config.data, worker)
                state = er.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1), data=data)
                for step in worker.steps(state):
                    body(step, model, state)
        except LoopError as error:
            return str(error)
        return ""

    def no_optimize(step: Any, model: Any, state: Any) -> None:
        for batch in step.microbatches():
            step.backward(model(batch))

    def no_backward(step: Any, model: Any, state: Any) -> None:
        for batch in step.microbatches():
            model(batch)

    def missing(step: Any, model: Any, state: Any) -> None:
        for batch in step.microbatches():
            step.backward(model(batch))
            break
        step.optimize()

    def outside(step: Any, model: Any, state: Any) -> None:
        step.backward(model(torch.ones(1)))

    def not_a_number(step: Any, model: Any, state: Any) -> None:
        for batch in step.microbatches():
            step.backward(model(batch).expand(2))

    return [attempt(i, body) for i, body in enumerate([no_optimize, no_backward, missing, outside, not_a_number])]


def test_loop_mistakes_are_told(tmp_path: Path) -> None:
    [messages] = run_ranks(loop_mistakes, 1, str(tmp_path))
    words = ["without step.optimize()", "step.backward once per", "1 of 4", "belongs inside", "must be one number"]
    for message, word in zip(messages, words, strict=True):
        assert word in message


def non_finite(run_dir: str, what: Any) -> Any:
    config = config_in(run_dir, max_steps=3, non_finite=what)
    updates = []
    with er.Worker(config) as worker:
        model = worker.prepare(Counting())
        data = er.ElasticLoader(Ones(), config.data, worker)
        state = er.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1), data=data)
        for step in worker.steps(state):
            for batch in step.microbatches():
                bad = step.number == 2 and worker.rank == 1
                step.backward(model(batch) * (float("nan") if bad else 1))
            updates.append(step.optimize().updated)
    return updates, [p.flatten()[0].item() for p in model.parameters()]


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    assert run_ranks(non_finite, 2, str(tmp_path), "skip") == [([True, False, True], [2.0, 2.0])] * 2


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(non_finite, 2, str(tmp_path), "stop")
    for text in caught.value.errors.values():
        assert "NonFiniteError: step 2" in text and "training.non_finite" in text


def on_main(run_dir: str) -> Any:
    with er.Worker(config_in(run_dir)) as worker:
        once = worker.on_main(lambda: worker.rank + 10)
        file = Path(run_dir, "download")
        first = worker.local_main_first(lambda: (file.exists(), file.touch())[0])
        return once, first


def test_once_per_job_and_first_on_a_node(tmp_path: Path) -> None:
    assert run_ranks(on_main, 2, str(tmp_path)) == [(10, False), (10, True)]


@pytest.mark.parametrize("name", ["trainer", "scaler"])
def test_a_part_cannot_take_the_place_of_ours(name: str) -> None:
    """A GradScaler given as scaler= would have replaced the loss scale in the checkpoint without a word."""
    model = Counting()
    optimizer: Any = torch.optim.SGD(model.parameters())
    with pytest.raises(StateError, match=name):
        er.TrainState(model=model, optimizer=optimizer, data=Ones(), **{name: optimizer})  # type: ignore[arg-type]


def test_a_part_without_a_state_is_refused() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(StateError, match="ema"):
        er.TrainState(model=model, optimizer=optimizer, data=Ones(), ema=object())  # type: ignore[arg-type]


def leave_early(run_dir: str, how: str) -> None:
    settings = config(run_dir, steps=6, every=100)
    with er.Worker(settings) as worker:
        model = worker.prepare(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = er.ElasticLoader(dataset(), settings.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader)
        er.Checkpointer(settings.checkpoint, state, worker).restore()
        for step in worker.steps(state):
            for x, y in step.microbatches():
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            step.optimize()
            if step.number == 3:
                if how == "break":
                    break
                raise SystemExit(0)


@pytest.mark.parametrize("how", ["break", "exit"])
def test_a_program_that_leaves_the_loop_is_not_finished(how: str, tmp_path: Path) -> None:
    if how == "break":
        run_ranks(leave_early, 2, str(tmp_path), how)
    else:
        with pytest.raises(RankFailed, match="SystemExit: 0"):  # run_ranks reports every exception
            run_ranks(leave_early, 2, str(tmp_path), how)
    told = read_summary(LocalStorage(tmp_path))
    assert told is not None and (told.status, told.step) == ("interrupted", 3)
    assert "left" in told.message
