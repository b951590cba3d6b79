"""A byte-level GPT on any text tree; by default on the Python standard library's own sources.

Start it by ``elastic-runner launch``, ``torchrun`` or plain ``python``: ``-m elastic_runner.recipes.gpt``.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt, MinLen
from pydantic.dataclasses import dataclass
from torch import nn

import elastic_runner as er
from elastic_runner import paths
from elastic_runner.config import STRICT, CheckpointConfig, FsdpConfig, Positive, StrategyConfig, TrainingConfig
from elastic_runner.data.random import seed_all
from elastic_runner.recipes.text import TextConfig, load_text

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The network. The default has 0.8 million parameters and learns visibly in two minutes on two CPU cores."""

    layers: Positive = 4
    """Blocks."""
    heads: Positive = 4
    """Attention heads; must divide width."""
    width: Positive = 128
    """Size of the residual stream."""
    context: Positive = 128
    """Bytes in a window."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Probability of dropping, after embedding, attention and MLP."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.width={self.width}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW under a cosine schedule with warm-up."""

    lr: Annotated[float, Ge(0)] = 3e-3
    """Peak learning rate."""
    warmup_steps: Positive = 20
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of matrices."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """Bits per byte on validation files."""

    every: Positive = 100
    """Optimizer steps between evaluations."""
    windows: Positive = 128
    """Windows to evaluate, spread evenly over the validation text."""
    batch_size: Positive = 16
    """Windows per forward."""
    sample_bytes: Positive = 240
    """Bytes of text to generate at the end."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GptConfig(er.RunConfig):
    """Train a byte-level GPT."""

    run_dir: Annotated[str, MinLen(1)] = "runs/gpt"
    """Directory or fsspec URL of the run, shared by all nodes: summary, ledger, attempts, checkpoints."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(max_steps=300, clip_norm=1.0))
    """The optimisation loop."""
    strategy: StrategyConfig = field(default_factory=lambda: StrategyConfig(fsdp=FsdpConfig(wrap_classes=("Block",))))
    """How the model is spread over ranks."""
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=25))
    """Saving and restoring."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""
    text: TextConfig = field(default_factory=TextConfig)
    """Which text."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""


class Block(nn.Module):
    """A pre-norm transformer block (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        batch, time, width = x.shape
        packed = self.query_key_value(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width)), dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_mlp(x)), dropout, self.training)


class Gpt(nn.Module):
    """Bytes to logits of the next byte; the embedding and the head are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Int64 [batch, time] to float [batch, time, 256]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.head(self.norm(x)))


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean negative log-likelihood per byte, in nats, of each window: shape [batch]."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none").mean(dim=1)


def bits_per_byte(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The validation metric."""
    return {"bits_per_byte": losses(model, batch) / math.log(2)}


def make_optimizer(model: nn.Module, config: GptConfig) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with decay on matrices only, and a cosine schedule down to a tenth, in optimizer steps."""
    settings, total = config.optimizer, config.training.max_steps
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        done = min(1.0, step / total)
        return min((step + 1) / settings.warmup_steps, 0.55 + 0.45 * math.cos(math.pi * done))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, *, context: int, device: torch.device, seed: int) -> str:
    """Sample ``length`` bytes after ``prompt``. Every rank draws the same, since a sharded forward is collective."""
    model.eval()
    seed_all(seed, "generate")
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float()
        following = torch.multinomial(torch.softmax(logits / 0.8, dim=-1).cpu(), 1).to(device)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def main() -> None:
    """Train, evaluate, and write a sample of generated text."""
    config = er.load_config(GptConfig)
    with er.Worker(config) as worker:
        train, held_out = load_text(config.text, config.model.context)
        spread = range(0, len(held_out), max(1, len(held_out) // config.evaluation.windows))
        validation = torch.utils.data.Subset(held_out, spread[: config.evaluation.windows])

        model = worker.prepare(Gpt(config.model))
        optimizer, schedule = make_optimizer(model, config)
        loader = er.ElasticLoader(train, config.data, worker)
        state = er.TrainState(model=model, optimizer=optimizer, data=loader, schedule=schedule)
        checkpointer = er.Checkpointer(config.checkpoint, state, worker)

        def evaluate() -> None:
            worker.evaluate(model, validation, bits_per_byte, batch_size=config.evaluation.batch_size)

        if checkpointer.restore() == 0:
            evaluate()
        for step in worker.steps(state):
            for batch in step.microbatches():
                step.backward(losses(model, batch).mean())
            step.optimize()
            checkpointer.maybe_save(step)
            if step.number % config.evaluation.every == 0 and not step.is_last:
                evaluate()
        if worker.draining:
            return
        evaluate()
        text = generate(
            model, b"def ", config.evaluation.sample_bytes,
            context=config.model.context, device=worker.device, seed=config.seed,
        )  # fmt: skip
        worker.on_main(lambda: worker.storage.put(paths.SAMPLE, text.encode()))


if __name__ == "__main__":
    main()
