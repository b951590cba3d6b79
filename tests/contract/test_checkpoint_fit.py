"""Which checkpoint fits which model: wrappers, ties, names, order, groups, frozen parameters, allow-lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_runner import paths
from elastic_runner.checkpoint.names import unwrap
from elastic_runner.errors import Mismatch
from elastic_runner.train.state import TrainState
from tests.support.checkpointing import (
    CheckpointingPlace,
    FixedData,
    Keeper,
    assert_same,
    checkpointer,
    make_state,
    train,
)


@pytest.fixture
def place(tmp_path: Path) -> CheckpointingPlace:
    return CheckpointingPlace(str(tmp_path / "run"))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Inner(nn.Module):
    """A user's own submodules called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self._orig_mod = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


def network() -> nn.Module:
    return nn.Sequential(Inner(), nn.BatchNorm1d(3))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compile": compiled,
    "ddp(compile)": lambda model: DistributedDataParallel(compiled(model)),
    "compile(ddp)": lambda model: compiled(DistributedDataParallel(model)),
}


@pytest.mark.parametrize("first", WRAPPINGS)
def test_wrappers_leave_no_trace(first: str, place: CheckpointingPlace, format: str, process_group: None) -> None:
    """Case c36."""
    before = make_state(WRAPPINGS[first](network()))
    train(before, features=3)
    place.attempt = 1
    checkpointer(before, place, format).save()
    names = set(unwrap(before.model).state_dict())
    if format == "full":
        file = Path(place.run_url, paths.CHECKPOINTS, paths.data_directory(1, 1), "full.pt")
        assert set(torch.load(file, weights_only=True)["model"]) == names
    for second, wrap in WRAPPINGS.items():
        after = make_state(wrap(network()), seed=1)
        assert checkpointer(after, place, format).restore() == 1, second
        assert_same(unwrap(before.model).state_dict(), unwrap(after.model).state_dict(), second)
        assert_same(before.optimizer.state_dict(), after.optimizer.state_dict(), second)
        # and what has been restored is saved like any other
        train(after, features=3)
        again = CheckpointingPlace(f"{place.run_url}-{second}")
        checkpointer(after, again, format).save()
        plain = make_state(network(), seed=2)
        assert checkpointer(plain, again, format).restore() == 2
        assert_same(unwrap(after.model).state_dict(), plain.model.state_dict(), second)


class LanguageModel(nn.Module):
    def __init__(self, *, tied: bool, head_first: bool = False) -> None:
        super().__init__()
        parts = {"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
        for name in sorted(parts, reverse=head_first):
            self.add_module(name, parts[name])
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def restored(before: TrainState, after: TrainState, place: CheckpointingPlace, format: str, **settings: Any) -> None:
    checkpointer(before, place, format).save()
    assert checkpointer(after, place, format, **settings).restore() == before.step


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_stays_one(head_first: bool, place: CheckpointingPlace, format: str) -> None:
    """Case c41."""
    before = make_state(LanguageModel(tied=True))
    train(before)
    after = make_state(LanguageModel(tied=True, head_first=head_first), seed=1)
    restored(before, after, place, format)
    assert after.model.head.weight is after.model.embed.weight
    train(before)
    train(after)
    assert_same(before.model.state_dict(), after.model.state_dict())


def test_untied_stays_two(place: CheckpointingPlace, format: str) -> None:
    """Case c41."""
    before, after = make_state(LanguageModel(tied=False)), make_state(LanguageModel(tied=False), seed=1)
    with torch.no_grad():  # equal values make no tie
        before.model.head.weight.copy_(before.model.embed.weight)  # type: ignore[union-attr,operator]
    before.step = 1
    restored(before, after, place, format)
    assert_same(before.model.state_dict(), after.model.state_dict())
    train(before)
    train(after)
    assert not torch.equal(after.model.head.weight, after.model.embed.weight)  # type: ignore[arg-type]
    assert_same(before.model.state_dict(), after.model.state_dict())


def test_tied_into_untied_gives_each_its_own(place: CheckpointingPlace, format: str) -> None:
    """Case c41."""
    before, after = make_state(LanguageModel(tied=True)), make_state(LanguageModel(tied=False), seed=1)
    train(before)
    restored(before, after, place, format)
    embed, head = after.model.embed.weight, after.model.head.weight  # type: ignore[union-attr]
    assert torch.equal(embed, before.model.embed.weight)  # type: ignore[arg-type,union-attr]
    assert torch.equal(head, embed)  # type: ignore[arg-type]
    assert embed.data_ptr() != head.data_ptr()  # type: ignore[operator,union-attr]
    one, other = after.optimizer.state[embed], after.optimizer.state[head]  # type: ignore[index]
    assert_same(one, other)
    assert one["exp_avg"].any()
    for field in one:
        assert one[field].data_ptr() != other[field].data_ptr(), field


def test_untied_into_tied_is_refused_unless_allowed(place: CheckpointingPlace, format: str) -> None:
    before = make_state(LanguageModel(tied=False))
    train(before)
    with pytest.raises(Mismatch, match=r"head\.weight") as caught:
        restored(before, make_state(LanguageModel(tied=True)), place, format)
    assert caught.value.extra == ("head.weight",)
    after = make_state(LanguageModel(tied=True), seed=1)
    assert checkpointer(after, place, format, allow_extra=("head.weight",)).restore() == 1
    assert torch.equal(after.model.head.weight, before.model.embed.weight)  # type: ignore[arg-type,union-attr]


class Layers(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(getattr(self, name)(x) * (ord(name) - 95) for name in sorted(self._modules))


def test_optimizer_state_goes_by_name(place: CheckpointingPlace, format: str) -> None:
    """Case c38."""
    before, after = make_state(Layers("ab")), make_state(Layers("ba"), seed=1)
    train(before, features=3)
    restored(before, after, place, format)
    for name, parameter in before.model.named_parameters():
        assert_same(before.optimizer.state[parameter], after.optimizer.state[after.model.get_parameter(name)], name)
    train(before, features=3)
    train(after, features=3)
    for name, parameter in before.model.named_parameters():
        assert torch.equal(parameter, after.model.get_parameter(name)), name


def grouped(*groups: tuple[str, float], seed: int = 0) -> TrainState:
    """A group per pair: parameter names by their ends, and learning rate."""
    torch.manual_seed(seed)
    model = Layers("ab")
    optimizer = torch.optim.AdamW(
        [{"params": [p for n, p in model.named_parameters() if n.endswith(end)], "lr": lr} for end, lr in groups]
    )
    return TrainState(model=model, optimizer=optimizer, data=FixedData())  # type: ignore[arg-type]


def test_equal_settings_can_be_regrouped(place: CheckpointingPlace, format: str) -> None:
    before = grouped(("weight", 0.1), ("bias", 0.1))
    train(before, features=3)
    after = grouped(("", 0.7), seed=1)
    restored(before, after, place, format)
    assert [group["lr"] for group in after.optimizer.param_groups] == [0.1]
    train(before, features=3)
    train(after, features=3)
    assert_same(before.model.state_dict(), after.model.state_dict())


def test_reordered_groups_keep_their_settings(place: CheckpointingPlace, format: str) -> None:
    before = grouped(("weight", 0.1), ("bias", 0.3))
    train(before, features=3)
    after = grouped(("bias", 0.7), ("weight", 0.7), seed=1)
    restored(before, after, place, format)
    assert [group["lr"] for group in after.optimizer.param_groups] == [0.3, 0.1]


def test_groups_with_different_settings_cannot_be_merged(place: CheckpointingPlace, format: str) -> None:
    before = grouped(("weight", 0.1), ("bias", 0.3))
    train(before, features=3)
    with pytest.raises(Mismatch, match=r"group 0 mixes.*a\.weight.*a\.bias"):
        restored(before, grouped(("", 0.1)), place, format)


def test_every_missing_and_extra_name_is_told(place: CheckpointingPlace, format: str) -> None:
    """Case c37."""
    before = make_state(Layers("ab"))
    train(before, features=3)
    fresh = make_state(Layers("acd"), seed=1)
    values = {name: value.clone() for name, value in fresh.model.state_dict().items()}
    with pytest.raises(
        Mismatch, match=r"not in the checkpoint: c\.weight, c\.bias, d\.weight, d\.bias; .*b\.bias"
    ) as caught:
        restored(before, fresh, place, format)
    assert caught.value.missing == ("c.weight", "c.bias", "d.weight", "d.bias")
    assert caught.value.extra == ("b.bias", "b.weight")
    assert_same(values, dict(fresh.model.state_dict()))  # refused before anything changed


def test_shapes_and_types_are_told(place: CheckpointingPlace, format: str) -> None:
    before = make_state(nn.Linear(3, 2))
    train(before, features=3)
    with pytest.raises(Mismatch, match=r"weight is \[5, 3\] float32 in the model, \[2, 3\] float32") as caught:
        restored(before, make_state(nn.Linear(3, 5)), place, format)
    assert len(caught.value.misshapen) == 2
    with pytest.raises(Mismatch, match=r"bfloat16 in the model, \[2, 3\] float32 in the checkpoint"):
        checkpointer(make_state(nn.Linear(3, 2).to(torch.bfloat16)), place, format).restore()


def test_allow_lists_say_what_they_did(
    place: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c37."""
    before = make_state(Layers("ab"))
    train(before, features=3)
    after = make_state(Layers("ac"), seed=1)
    fresh = after.model.c.weight.clone()  # type: ignore[union-attr,operator]
    with caplog.at_level(logging.WARNING):
        restored(before, after, place, format, allow_missing=("c.*",), allow_extra=("b.*",))
    assert "2 tensors loaded, 2 keep fresh values (c.weight, c.bias), 2 left unread (b.bias, b.weight)" in caplog.text
    assert torch.equal(after.model.a.weight, before.model.a.weight)  # type: ignore[arg-type,union-attr]
    assert torch.equal(after.model.c.weight, fresh)  # type: ignore[arg-type,union-attr]
    assert after.optimizer.state[after.model.a.weight]["exp_avg"].any()  # type: ignore[index,union-attr]


def test_allowing_everything_still_needs_one_match(place: CheckpointingPlace, format: str) -> None:
    before = make_state(Layers("ab"))
    train(before, features=3)
    with pytest.raises(Mismatch, match="no tensor of the checkpoint fits"):
        restored(before, make_state(Layers("cd")), place, format, allow_missing=("*",), allow_extra=("*",))


def test_states_must_match_too_unless_allowed(place: CheckpointingPlace, format: str) -> None:
    before = make_state(Layers("a"), ema=Keeper(torch.ones(2)))
    before.step = 1
    with pytest.raises(Mismatch, match=r"state\.ema"):
        restored(before, make_state(Layers("a")), place, format)
    with pytest.raises(Mismatch, match="no state named 'metric'"):
        checkpointer(make_state(Layers("a"), metric=Keeper(), ema=Keeper()), place, format).restore()
    after = make_state(Layers("a"), metric=Keeper("fresh"))
    lenient = {"allow_missing": ("state.metric",), "allow_extra": ("state.ema",)}
    assert checkpointer(after, place, format, **lenient).restore() == 1
    assert after.others()["metric"].value == "fresh"  # type: ignore[attr-defined]


def freezable(frozen: bool, seed: int = 0) -> TrainState:
    model = Layers("ab")
    model.b.requires_grad_(not frozen)  # type: ignore[union-attr,operator]
    return make_state(model, seed=seed)


def test_an_unfrozen_layer_starts_with_fresh_moments_and_is_named(
    place: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c63."""
    before, after = freezable(True), freezable(False, seed=1)
    train(before, features=3)
    with caplog.at_level(logging.WARNING):
        restored(before, after, place, format)
    assert "starts fresh for parameters not trained before: b.bias, b.weight" in caplog.text
    assert_same(before.model.state_dict(), after.model.state_dict())
    assert after.model.b.weight not in after.optimizer.state  # type: ignore[union-attr]
    train(after, features=3)
    assert after.optimizer.state[after.model.b.weight]["step"] == 1  # type: ignore[index,union-attr]
    assert after.optimizer.state[after.model.a.weight]["step"] == 2  # type: ignore[index,union-attr]


def test_a_frozen_layer_drops_its_moments_and_is_named(
    place: CheckpointingPlace, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case c63."""
    before, after = freezable(False), freezable(True, seed=1)
    train(before, features=3)
    with caplog.at_level(logging.WARNING):
        restored(before, after, place, format)
    assert "dropped for parameters not trained any more: b.bias, b.weight" in caplog.text
    assert_same(before.model.state_dict(), after.model.state_dict())
    train(after, features=3)


def test_settings_of_the_optimizer_that_a_checkpoint_overrides_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, state = CheckpointingPlace(str(tmp_path)), make_state()
    train(state)
    checkpointer(state, place).save()
    for lr, said in ((0.01, 0), (0.5, 1)):
        caplog.clear()
        again = make_state()
        again.optimizer.param_groups[0]["lr"] = lr
        checkpointer(again, place).restore()
        assert again.optimizer.param_groups[0]["lr"] == 0.01
        assert caplog.text.count("lr 0.01, not 0.5") == said
