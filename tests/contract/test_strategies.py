"""One contract for all strategies: what is learned does not depend on how a model is spread over ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import elastic_runner as er
from elastic_runner.checkpoint.capture import capture
from elastic_runner.config import DataConfig, DdpConfig, FsdpConfig, RunConfig, StrategyConfig, TrainingConfig
from elastic_runner.errors import ElasticRunnerError
from tests.support.ranks import run_ranks

SAMPLES = 24
FEATURES = 6

# Rounding differs by the order of additions only; a wrong weight of one shard would be off by parts of a hundred.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale


class Net(nn.Module):
    """Blocks, a head with one row (fewer than ranks), and a parameter of one number."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 1)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.shift


class FrozenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class BranchNet(Net):
    """Uses its second block in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.uses += 1
        h = self.blocks[0](x)
        if self.uses % 2:
            h = self.blocks[1](h)
        return self.head(h) + self.shift


class NeverNet(Net):
    """Never uses its second block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x)) + self.shift


class ReentrantNet(Net):
    """Recomputes by itself, in the way that DDP does not like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x + 0 * self.shift, use_reentrant=True)
        return self.head(self.blocks[1](x)) + self.shift


class BufferNet(Net):
    """Buffers of all kinds that models have: complex (rotary embeddings), bool (masks), int, empty, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotary", torch.polar(torch.ones(3), torch.rand(3)))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("turned", torch.rand(2, 3).t())
        self.kernel = nn.Parameter(torch.rand(2, 3, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.kernel.sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    strategy: StrategyConfig
    shards: int = 4
    model: Callable[[], nn.Module] = Net
    steps: int = 3
    ragged: bool = False
    clip: float | None = None
    precision: Any = "fp32"
    compiled: bool = False
    around: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    graded: int = 0
    error: str = ""


class Sequences(torch.utils.data.Dataset[Any]):
    """Samples with a number of valid tokens each, very uneven."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 5, FEATURES, generator=generator)
        self.y = torch.randn(SAMPLES, 5, 1, generator=generator)
        self.valid = torch.tensor([1 + (i * i) % 5 for i in range(SAMPLES)])

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index], self.valid[index]


def losses_of(model: nn.Module, batch: Any, *, ragged: bool) -> tuple[torch.Tensor, int | None]:
    """The mean loss over a batch, over samples or over valid tokens."""
    x, y, valid = batch
    errors = (model(x) - y).squeeze(-1) ** 2
    if not ragged:
        return errors.mean(), None
    mask = torch.arange(errors.shape[1]) < valid[:, None]
    return (errors * mask).sum() / mask.sum(), int(mask.sum())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def reference(case: Case) -> Outcome:
    """Plain torch on the whole global batch."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = case.model()
    optimizer = optimizer_of(model)
    data = Sequences()
    losses, norms = [], []
    for _ in range(case.steps):
        loss, _ = losses_of(model, (data.x, data.y, data.valid), ragged=case.ragged)
        loss.backward()
        limit = float("inf") if case.clip is None else case.clip
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(
        parameters={n: p.detach().numpy() for n, p in model.named_parameters()},
        losses=losses,
        norms=norms,
        names=sorted(model.state_dict()),
    )


def spread(case: Case, run_dir: str) -> RunConfig:
    return RunConfig(
        run_dir=run_dir,
        training=TrainingConfig(max_steps=case.steps, clip_norm=case.clip, precision=case.precision),
        data=DataConfig(global_batch=SAMPLES - SAMPLES % case.shards, shards=case.shards),
        strategy=case.strategy,
    )


def train(case: Case, config: RunConfig) -> Outcome:
    """One rank's view of a short training."""
    try:
        return _train(case, config)
    except ElasticRunnerError as error:
        return Outcome(error=f"{type(error).__name__}: {error}")


def _train(case: Case, config: RunConfig) -> Outcome:
    losses, norms, graded = [], [], 0
    with er.Worker(config) as worker:
        # Each rank's own values: prepare must make them rank 0's.
        torch.manual_seed(5 + worker.rank)
        model = worker.prepare(case.model())
        if case.compiled:
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        optimizer = optimizer_of(model)
        data = er.ElasticLoader(Sequences(), config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=data)
        for step in worker.steps(state):
            for batch in step.microbatches():
                called = getattr(model, "module", model) if case.around else model
                loss, tokens = losses_of(called, batch, ragged=case.ragged)
                step.backward(loss, tokens=tokens)
            graded = sum(p.grad is not None for p in model.parameters())
            result = step.optimize()
            losses.append(result.loss)
            norms.append(result.grad_norm)
        tensors = capture(state).tensors
        parameters = {n.removeprefix("model."): whole(t) for n, t in tensors.items() if n.startswith("model.")}
        return Outcome(parameters=parameters, losses=losses, norms=norms, names=sorted(parameters), graded=graded)


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()


def outcomes(case: Case, world_size: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="strategies-") as run_dir:
        return run_ranks(train, world_size, case, spread(case, run_dir))


def check_same(case: Case, world_size: int, **tolerance: float) -> Outcome:
    """All ranks agree to the bit, and with the reference to ``tolerance``."""
    expected, ranks = reference(case), outcomes(case, world_size)
    for got in ranks:
        assert got.error == ""
        assert got.losses == ranks[0].losses and got.norms == ranks[0].norms
        for name, value in got.parameters.items():
            np.testing.assert_array_equal(value, ranks[0].parameters[name], err_msg=name)
    first, limits = ranks[0], tolerance or TOLERANCE
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(first.parameters[name], value, err_msg=name, **limits)
    np.testing.assert_allclose(first.losses, expected.losses, **limits)
    np.testing.assert_allclose(first.norms, expected.norms, **limits)
    return first


def ddp(**options: Any) -> StrategyConfig:
    return StrategyConfig(name="ddp", ddp=DdpConfig(**options))


def fsdp(name: Any = "fsdp", **options: Any) -> StrategyConfig:
    return StrategyConfig(name=name, fsdp=FsdpConfig(**{"wrap_classes": ("Block",), **options}))


SPREADS = [
    pytest.param(StrategyConfig(name="single"), 1, id="single-1"),
    pytest.param(StrategyConfig(name="dp"), 1, id="dp-1"),
    pytest.param(ddp(), 1, id="ddp-1"),
    pytest.param(ddp(), 2, id="ddp-2"),
    pytest.param(fsdp(), 1, id="fsdp-1"),
    pytest.param(fsdp(), 2, id="fsdp-2"),
    pytest.param(fsdp("hsdp", shard_size=2), 2, id="hsdp-1x2"),
    pytest.param(fsdp("hsdp", shard_size=2), 4, id="hsdp-2x2"),
]


@pytest.mark.parametrize(("strategy", "world_size"), SPREADS)
def test_equals_one_process_with_the_whole_batch(strategy: StrategyConfig, world_size: int) -> None:
    """c55, c64: four shards, so that accumulation is at work below four ranks; ragged, clipped."""
    check_same(Case(strategy=strategy, ragged=True, clip=0.5), world_size)


@pytest.mark.parametrize("strategy", [ddp(), fsdp()], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(("shards", "world_size"), [(3, 2), (4, 3)])
def test_shards_need_not_divide_by_ranks(strategy: StrategyConfig, shards: int, world_size: int) -> None:
    """c56: ranks with different numbers of microbatches."""
    check_same(Case(strategy=strategy, shards=shards, ragged=True), world_size)


@pytest.mark.parametrize("strategy", [ddp(), fsdp()], ids=["ddp", "fsdp"])
def test_is_the_same_to_the_bit_when_run_again(strategy: StrategyConfig) -> None:
    case = Case(strategy=strategy)
    once, again = outcomes(case, 2)[0], outcomes(case, 2)[0]
    assert once.losses == again.losses and once.norms == again.norms
    for name, value in once.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[name], err_msg=name)


@pytest.mark.parametrize("strategy", [StrategyConfig(name="single"), ddp(), fsdp()], ids=["single", "ddp", "fsdp"])
def test_recomputing_activations_changes_neither_gradients_nor_names(strategy: StrategyConfig) -> None:
    recomputing = replace(strategy, checkpoint_classes=("Block",))
    world_size = 1 if strategy.name == "single" else 2
    case = Case(strategy=recomputing)
    assert check_same(case, world_size).names == reference(case).names


@pytest.mark.parametrize(
    "strategy", [StrategyConfig(name="single"), ddp(), fsdp(), fsdp("hsdp")], ids=["single", "ddp", "fsdp", "hsdp"]
)
def test_bf16_is_close(strategy: StrategyConfig) -> None:
    world_size = 1 if strategy.name == "single" else 2
    got = outcomes(Case(strategy=strategy, precision="bf16", steps=2), world_size)[0]
    expected = reference(Case(strategy=strategy, steps=2))
    np.testing.assert_allclose(got.losses, expected.losses, rtol=0.05)
    assert got.losses != expected.losses, "nothing was computed in bf16"
    assert {str(value.dtype) for value in got.parameters.values()} == {"float32"}


@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 1}, {"gradient_as_bucket_view": False}, {"broadcast_buffers": False}],
    ids=lambda options: next(iter(options)),
)
def test_ddp_options_keep_the_result(options: dict[str, Any]) -> None:
    check_same(Case(strategy=ddp(**options)), 2)


def test_static_graph_without_accumulation() -> None:
    check_same(Case(strategy=ddp(static_graph=True), shards=2, steps=4), 2)


def test_static_graph_refuses_accumulation() -> None:
    for outcome in outcomes(Case(strategy=ddp(static_graph=True), shards=4), 2):
        assert outcome.error.startswith("ConfigError") and "static_graph" in outcome.error
        assert "data.shards" in outcome.error


@pytest.mark.parametrize("strategy", [ddp(), fsdp()], ids=["ddp", "fsdp"])
def test_compiled_model_accumulates(strategy: StrategyConfig) -> None:
    """The wrapper is inside another one; without no_sync the sum of two microbatches would count twice."""
    check_same(Case(strategy=strategy, compiled=True, shards=3), 2)


class TestUnusedBranch:
    """c59: a part of the model that not every step uses."""

    def test_find_unused_parameters(self) -> None:
        case = Case(strategy=ddp(find_unused_parameters=True), model=BranchNet, shards=2, steps=4)
        check_same(case, 2)

    def test_find_unused_parameters_when_ranks_differ(self) -> None:
        """Two microbatches on one rank and one on the other: the branch's gradient comes from one rank alone."""
        case = Case(strategy=ddp(find_unused_parameters=True), model=BranchNet, shards=3, steps=3)
        first, second = outcomes(case, 2)
        assert first.error == second.error == ""
        assert first.norms == second.norms
        for name, value in first.parameters.items():
            np.testing.assert_array_equal(value, second.parameters[name], err_msg=name)

    def test_fsdp(self) -> None:
        check_same(Case(strategy=fsdp(forward_prefetch=2), model=BranchNet, shards=2, steps=4), 2)

    def test_without_the_option_nothing_is_learned_before_the_error(self) -> None:
        for outcome in outcomes(Case(strategy=ddp(), model=NeverNet, shards=2), 2):
            assert outcome.error.startswith("ModelError")
            assert "strategy.ddp.find_unused_parameters" in outcome.error
            assert "blocks.1.inner.weight" in outcome.error and "blocks.0" not in outcome.error

    def test_static_graph_names_what_changed(self) -> None:
        for outcome in outcomes(Case(strategy=ddp(static_graph=True), model=BranchNet, shards=2), 2):
            assert outcome.error.startswith("ModelError")
            assert "static_graph" in outcome.error and "blocks.1" in outcome.error


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("how", ["ours", "reentrant", "none"])
def test_recomputing_under_ddp_works_or_says_what_to_change(how: str, unused: bool) -> None:
    """c59: the combinations of recomputation and find_unused_parameters."""
    strategy = replace(ddp(find_unused_parameters=unused), checkpoint_classes=("Block",) if how == "ours" else ())
    case = Case(strategy=strategy, model=ReentrantNet if how == "reentrant" else Net, shards=2)
    if how == "reentrant" and unused:
        for outcome in outcomes(case, 2):
            assert outcome.error.startswith("ModelError")
            assert "strategy.checkpoint_classes" in outcome.error and "blocks.0" in outcome.error
    else:
        check_same(case, 2)


def test_forward_around_ddp_is_noticed() -> None:
    """c61: replicas would drift apart without a word."""
    for outcome in outcomes(Case(strategy=ddp(), around=True, shards=2), 2):
        assert outcome.error.startswith("ModelError") and "worker.prepare" in outcome.error


@pytest.mark.parametrize(
    "options",
    [
        {"wrap_classes": (), "wrap_min_params": 40},
        {"wrap_classes": ("Net", "Block", "Linear")},
        {"reshard_after_forward": False},
        {"forward_prefetch": 0, "backward_prefetch": 0},
        {"forward_prefetch": 2, "backward_prefetch": 2},
    ],
    ids=["by-size", "nested-and-root", "zero-2", "prefetch-0", "prefetch-2"],
)
def test_fsdp_options_keep_the_result(options: dict[str, Any]) -> None:
    check_same(Case(strategy=fsdp(**options)), 2)


@pytest.mark.parametrize("strategy", [ddp(), fsdp()], ids=["ddp", "fsdp"])
def test_frozen_parameters_cost_no_gradient(strategy: StrategyConfig) -> None:
    """c63."""
    got = check_same(Case(strategy=strategy, model=FrozenNet), 2)
    assert got.graded == sum(p.requires_grad for p in FrozenNet().parameters())


def test_hsdp_takes_the_largest_group_that_divides_the_world() -> None:
    check_same(Case(strategy=fsdp("hsdp", shard_size=2), shards=3), 3)


@pytest.mark.parametrize("strategy", [ddp(), fsdp()], ids=["ddp", "fsdp"])
def test_every_kind_of_buffer_is_made_equal(strategy: StrategyConfig) -> None:
    check_same(Case(strategy=strategy, model=BufferNet), 2)


@pytest.mark.parametrize(
    ("strategy", "word"),
    [
        (fsdp(wrap_classes=("Blok",)), "strategy.fsdp.wrap_classes"),
        (fsdp(wrap_classes=("ModuleList",)), "strategy.fsdp.wrap_classes"),
        (replace(ddp(), checkpoint_classes=("Blok",)), "strategy.checkpoint_classes"),
        (fsdp(cpu_offload=True), "strategy.fsdp.cpu_offload"),
    ],
)
def test_what_cannot_work_names_its_field(strategy: StrategyConfig, word: str, tmp_path: Path) -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([Block(2)])

    config = spread(Case(strategy=strategy), str(tmp_path))
    with pytest.raises(ElasticRunnerError, match=word) as caught, er.Worker(config) as worker:
        worker.prepare(Listed())
    assert not caught.value.restartable


@pytest.mark.parametrize("name", ["single", "dp"])
def test_one_process_strategies_refuse_ranks(name: Any) -> None:
    for outcome in outcomes(Case(strategy=StrategyConfig(name=name)), 2):
        assert outcome.error.startswith("ConfigError") and "strategy.name" in outcome.error
