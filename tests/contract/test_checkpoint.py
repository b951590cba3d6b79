"""A restored run goes on as if it had never stopped: each format on each kind of storage."""

from __future__ import annotations

import collections
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic_runner import paths
from elastic_runner.errors import AccessDenied, Fenced, NoUsableCheckpoint, SaveFailed, StateError
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import (
    CheckpointingPlace,
    FixedData,
    Keeper,
    Net,
    assert_same,
    assert_same_training,
    checkpointer,
    make_state,
    storage_of,
    train,
)
from tests.support.s3 import S3


def save_and_restore(before: TrainState, after: TrainState, place: CheckpointingPlace, format: str) -> None:
    checkpointer(before, place, format).save()
    assert checkpointer(after, place, format).restore() == before.step


def warm_up(state: TrainState) -> TrainState:
    state.schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: min(1.0, step / 4) / (1 + step))
    return state


def test_a_restored_run_goes_on_to_the_same_bits(place: CheckpointingPlace, format: str) -> None:
    before, after = warm_up(make_state()), warm_up(make_state(seed=1))
    train(before, 3)
    before.scaler.update(finite=False)
    save_and_restore(before, after, place, format)
    assert_same_training(before, after)
    train(before, 3)
    train(after, 3)
    assert_same_training(before, after)
    assert after.model.head.weight is after.model.embed.weight
    assert place.told == [3]


def test_nothing_saved_is_a_fresh_start(place: CheckpointingPlace, format: str) -> None:
    state = make_state()
    assert checkpointer(state, place, format).restore() == 0
    assert state.step == 0
    assert storage_of(place).list("") == []


def test_user_state_with_nested_tensors(place: CheckpointingPlace, format: str) -> None:
    value = {
        "tensors": [torch.arange(5), {"deep": (torch.tensor(2.5, dtype=torch.float64), "text")}],
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        1: torch.tensor(3),
        "1": torch.tensor(4),
        "view": torch.arange(100)[10:13],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "empty": torch.empty(0, 3),
        "plain": [None, True, -(2**80), 1.5, float("inf"), 1 + 2j, "ü", b"\x00\xff", torch.bfloat16, torch.Size([2])],
        "counter": collections.Counter(a=3),
        "set": {1, 2},
    }
    before, after = make_state(mine=Keeper(value)), make_state(mine=Keeper())
    before.step = 1
    save_and_restore(before, after, place, format)
    assert_same(value, after.others()["mine"].value)  # type: ignore[attr-defined]


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"scores": [1.0, __import__("numpy").float64(2)]}, r"state\.mine\.value\.scores\.1 is a numpy\.float64"),
        ({"rng": __import__("numpy").zeros(2)}, r"state\.mine\.value\.rng is a numpy\.ndarray"),
        ({"object": Odd()}, r"state\.mine\.value\.object is a .*Odd"),
        ({"call": print}, r"state\.mine\.value\.call"),
        ({Odd(): 1}, r"state\.mine\.value has a key"),
        ({__import__("numpy").int64(3): 1}, r"state\.mine\.value has a key"),
        ({torch.tensor(1)}, r"state\.mine\.value is a builtins\.set"),
    ],
)
def test_what_is_not_data_is_refused_by_name(value: Any, named: str, local: CheckpointingPlace, format: str) -> None:
    """Case c42."""
    state = make_state(mine=Keeper(value))
    state.step = 1
    with pytest.raises(StateError, match=named):
        checkpointer(state, local, format).save()
    assert not any(name.startswith("manifest") for name in storage_of(local).list(paths.step_directory(1)))
    with pytest.raises(StateError, match=named):  # and before the first step, not at the first save
        checkpointer(state, local, format).restore()


class LowPrecision(torch.optim.Optimizer):
    """fp32 moments, and a bf16 step counter, for bf16 parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.tensor(10001, dtype=torch.int64))
                state.setdefault("low", torch.tensor(1.0, dtype=torch.bfloat16))
                state.setdefault("moment", torch.zeros(p.shape, dtype=torch.float32))
                state.setdefault("history", [torch.zeros(3, dtype=torch.float64)])
                state.setdefault("name", "plain")
                state["step"] += 1
                state["moment"] += p.grad.float() * 1.0001
                state["history"] = [*state["history"], torch.full((3,), 1 / 3, dtype=torch.float64)]
                p.sub_(state["moment"].to(p.dtype), alpha=group["lr"])


def test_every_dtype_comes_back_as_it_was(place: CheckpointingPlace, format: str) -> None:
    """Case c40."""

    def make(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to(torch.bfloat16)
        return TrainState(model=model, optimizer=LowPrecision(model.parameters()), data=FixedData())  # type: ignore[arg-type]

    before, after = make(0), make(1)
    before.model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    before.optimizer.step()
    before.step = 1
    save_and_restore(before, after, place, format)
    assert_same_training(before, after)
    assert after.optimizer.state[after.model.weight]["step"].item() == 10002  # type: ignore[index]


def test_optimizers_with_nested_state_and_tensor_settings(local: CheckpointingPlace, format: str) -> None:
    def make(seed: int, build: Any) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return TrainState(model=model, optimizer=build(model.parameters()), data=FixedData())  # type: ignore[arg-type]

    for build in (
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adafactor(p),
    ):
        before, after = make(0, build), make(1, build)

        def closure(state: TrainState = before) -> torch.Tensor:
            state.optimizer.zero_grad()
            loss = state.model(torch.ones(4, 3)).square().sum()
            loss.backward()
            return loss

        before.optimizer.step(closure)
        before.step = local.attempt = local.attempt + 1
        save_and_restore(before, after, local, format)
        assert_same_training(before, after)


@pytest.mark.parametrize("order", ["first", "after state", "after checkpointer", "after wrong steps"])
def test_the_schedule_goes_on_whatever_was_built_first(order: str, local: CheckpointingPlace, format: str) -> None:
    """Case c44."""
    before = warm_up(make_state())
    train(before, 3)
    checkpointer(before, local, format).save()
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5)
    data: Any = FixedData()
    if order == "first":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4) / (1 + step))
        after = TrainState(model=model, optimizer=optimizer, data=data, schedule=schedule)
        saver = checkpointer(after, local, format)
    elif order == "after state":
        after = warm_up(TrainState(model=model, optimizer=optimizer, data=data))
        saver = checkpointer(after, local, format)
    else:
        after = TrainState(model=model, optimizer=optimizer, data=data)
        saver = checkpointer(after, local, format)
        warm_up(after)
    if order == "after wrong steps":
        train(after, 2)
    saver.restore()
    rates: list[list[float]] = [[], []]
    for _ in range(4):
        for state, seen in zip((before, after), rates, strict=True):
            train(state)
            seen.append(state.optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert_same_training(before, after)


def test_a_step_is_saved_once(local: CheckpointingPlace) -> None:
    state = make_state()
    train(state)
    saver = checkpointer(state, local)
    saver.save()
    saver.save()
    assert local.told == [1]


def test_a_fenced_attempt_cannot_commit(local: CheckpointingPlace, format: str) -> None:
    state = make_state()
    train(state)
    local.fenced = True
    with pytest.raises(Fenced, match="attempt 2"):
        checkpointer(state, local, format).save()
    assert local.told == []
    assert checkpointer(state, CheckpointingPlace(local.run_url, attempt=2), format).restore() == 0


class FailingStorage:
    """A storage whose writer breaks after ``good`` bytes."""

    def __init__(self, inner: Any, good: int) -> None:
        self._inner = inner
        self._good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def writer(self, path: str) -> Any:
        from contextlib import contextmanager

        from elastic_runner.errors import StorageError

        @contextmanager
        def broken() -> Any:
            with self._inner.writer(path) as stream:
                write = stream.write

                def count(data: Any) -> int:
                    if stream.tell() + len(memoryview(data).cast("B")) > self._good:
                        raise StorageError("the network is gone")
                    return int(write(data))

                stream.write = count
                yield stream

        return broken()


@pytest.mark.parametrize("good", [0, 100, 3000])
def test_a_failed_save_says_so_and_the_previous_one_restores(good: int, place: CheckpointingPlace, format: str) -> None:
    """Case c34."""
    state = make_state()
    train(state)
    saver = checkpointer(state, place, format)
    saver.save()
    kept = make_state(seed=1)
    checkpointer(kept, place, format).restore()
    train(state)
    healthy = saver._storage
    saver._storage = FailingStorage(healthy, good)  # type: ignore[assignment]
    with pytest.raises(SaveFailed, match=r"step 2 was not saved: .*the network is gone"):
        saver.save()
    after = make_state(seed=2)
    assert checkpointer(after, place, format).restore() == 1
    assert_same_training(kept, after)
    # The same process may try again, and what was left behind is no part of the new one.
    saver._storage = healthy
    saver.save()
    assert checkpointer(after, place, format).restore() == 2
    assert_same_training(state, after)


def test_a_run_killed_in_its_first_save_starts_fresh(place: CheckpointingPlace, format: str) -> None:
    """Case c28."""
    state = make_state()
    train(state)
    saver = checkpointer(state, place, format)
    saver._storage = FailingStorage(saver._storage, 3000)  # type: ignore[assignment]
    with pytest.raises(SaveFailed):
        saver.save()
    storage_of(place).put(paths.data_directory(1, 1) + "/__7_0.distcp", b"half of a file")
    place.attempt = 2
    after = make_state()
    again = checkpointer(after, place, format)
    assert again.restore() == 0
    train(after)
    again.save()
    assert checkpointer(make_state(seed=3), place, format).restore() == 1


def test_sharded_data_are_readable_by_dcp_alone(local: CheckpointingPlace) -> None:
    state = make_state(ema=Keeper(torch.arange(3.0)))
    train(state, 2)
    checkpointer(state, local).save()
    directory = Path(local.run_url, paths.CHECKPOINTS, paths.data_directory(2, 1))
    wanted: dict[str, Any] = {
        **{f"model.{n}": torch.zeros_like(t) for n, t in state.model.state_dict().items() if n != "head.weight"},
        "optimizer.state.hidden.weight.exp_avg": torch.zeros(4, 4),
        "state.ema.value": torch.zeros(3),
        "optimizer.param_groups": None,
    }
    dcp.load(wanted, checkpoint_id=directory, no_dist=True)
    for name, value in state.model.state_dict().items():
        if name != "head.weight":
            assert torch.equal(wanted[f"model.{name}"], value), name
    moment = state.optimizer.state[state.model.hidden.weight]["exp_avg"]  # type: ignore[union-attr]
    assert torch.equal(wanted["optimizer.state.hidden.weight.exp_avg"], moment)
    assert torch.equal(wanted["state.ema.value"], torch.arange(3.0))
    assert wanted["optimizer.param_groups"][0]["lr"] == 0.01


def test_a_full_file_is_readable_by_torch_alone(local: CheckpointingPlace) -> None:
    state = make_state()
    train(state, 2)
    checkpointer(state, local, "full").save()
    file = Path(local.run_url, paths.CHECKPOINTS, paths.data_directory(2, 1), "full.pt")
    model = Net()
    model.load_state_dict(torch.load(file, weights_only=True)["model"], strict=True)
    assert_same(state.model.state_dict(), model.state_dict())


class WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("extra", "fresh"),
    [
        (torch.arange(3), torch.zeros(0)),
        ({"scale": torch.arange(3), "name": "x"}, None),
        (7, 0),
    ],
)
def test_extra_state_of_a_module(extra: Any, fresh: Any, local: CheckpointingPlace, format: str) -> None:
    before, after = (make_state(nn.Sequential(WithExtraState(value))) for value in (extra, fresh))
    train(before, features=2)
    save_and_restore(before, after, local, format)
    assert_same(after.model[0].extra, extra)  # type: ignore[index]
    if format == "full":
        file = Path(local.run_url, paths.CHECKPOINTS, paths.data_directory(1, 1), "full.pt")
        plain = nn.Sequential(WithExtraState(None))
        plain.load_state_dict(torch.load(file, weights_only=True)["model"], strict=True)
        assert_same(plain[0].extra, extra)


def test_only_the_newest_are_kept(place: CheckpointingPlace, format: str) -> None:
    state = make_state()
    saver = checkpointer(state, place, format, keep=2)
    storage = storage_of(place)
    storage.put("step-notes/mine", b"x")
    for _ in range(4):
        train(state)
        saver.save()
    assert storage.list("") == ["step-0000000003", "step-0000000004", "step-notes"]


def test_new_saves_do_not_give_way_to_damaged_later_ones(local: CheckpointingPlace) -> None:
    state = make_state()
    saver = checkpointer(state, local, keep=5)
    for _ in range(4):
        train(state)
        saver.save()
    storage = storage_of(local)
    for step in (2, 3, 4):
        storage.put(f"{paths.data_directory(step, 1)}/.metadata", b"damaged")
    local.attempt = 2
    again = make_state(seed=1)
    saver = checkpointer(again, local, keep=1)
    assert saver.restore() == 1
    train(again)
    saver.save()
    assert checkpointer(make_state(seed=2), local).restore() == 2


def test_no_usable_one_is_never_a_fresh_start(local: CheckpointingPlace, format: str) -> None:
    """Case c28."""
    state = make_state()
    for _ in range(2):
        train(state)
        checkpointer(state, local, format).save()
    storage = storage_of(local)
    for step in (1, 2):
        directory = paths.data_directory(step, 1)
        storage.delete(f"{directory}/{storage.list(directory)[0]}")
    with pytest.raises(NoUsableCheckpoint, match=r"step 2: .*is missing.*step 1: .*is missing"):
        checkpointer(make_state(), local, format).restore()


def test_a_place_that_takes_no_files_is_found_before_the_first_step(tmp_path: Path, format: str) -> None:
    """Case c31."""
    (tmp_path / "file").write_text("in the way")
    place = CheckpointingPlace(str(tmp_path / "file"))
    with pytest.raises(AccessDenied, match=r"file.*in its place"):
        checkpointer(make_state(), place, format).restore()
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.s3
def test_credentials_are_in_no_object_and_no_log(
    s3: S3,
    format: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = CheckpointingPlace(s3.url, s3.options)
    state = make_state()
    saver = checkpointer(state, place, format, keep=1)
    with caplog.at_level(logging.INFO, "elastic_runner"):
        for _ in range(2):
            train(state)
            saver.save()
        checkpointer(make_state(), place, format).restore()
    storage = storage_of(place)
    step = paths.step_directory(2)
    files = [f"{step}/{name}" for name in storage.list(step) if name.startswith("manifest")]
    files += [f"{step}/data-000001/{name}" for name in storage.list(f"{step}/data-000001")]
    assert len(files) > 1
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("elastic_runner"))
    assert "restored step 2" in ours
    for secret in (s3.options["key"], s3.options["secret"]):
        assert secret not in ours
        assert not any(secret.encode() in storage.read(file) for file in files)
