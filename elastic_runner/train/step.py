"""One optimizer step over one global batch, on this rank's logical shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_

from elastic_runner.config import RunConfig
from elastic_runner.coordination import Place
from elastic_runner.data.digest import batch_digest
from elastic_runner.data.random import seed_all
from elastic_runner.data.source import Microbatch, Span
from elastic_runner.errors import LoopError, NonFiniteError
from elastic_runner.train.generators import host_generators, model_generators
from elastic_runner.train.record import RunRecord
from elastic_runner.train.state import TrainState
from elastic_runner.train.synchronize import Gradients, exchanging


class StepPlace(Place, Protocol):
    """What a step needs of its worker."""

    config: RunConfig
    """The run."""
    record: RunRecord
    """Where committed steps are recorded."""

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop."""
        ...

    @property
    def save_ended(self) -> bool:
        """Whether a save beside training has ended in this process."""
        ...

    def progress(self) -> None:
        """Say that this rank has come on within its phase."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step came to; equal on every rank."""

    loss: float
    """Mean loss over the global batch, weighted like the gradient."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    lr: float
    """Learning rate of the first parameter group during the step."""
    scale: float
    """Loss scale; 1 unless fp16."""
    updated: bool
    """False when a gradient was not finite and the update was skipped."""
    metrics: dict[str, float]
    """Means over the global batch of what was given to ``Step.log``, weighted like the loss."""


class _Totals(NamedTuple):
    loss: float
    units: float
    metrics: dict[str, float]
    samples: str | None
    """Digest of the global batch's sample ids; None where they have none."""
    rng: str
    """Digest of the random generators as each logical shard found them."""


class Step:
    """Handed out by ``worker.steps``: loop over ``microbatches``, ``backward`` each loss, then ``optimize`` once."""

    def __init__(self, number: int, span: Span, state: TrainState, place: StepPlace, gradients: Gradients) -> None:
        self.number = number
        """From 1."""
        self.epoch = span.epoch
        """0-based."""
        self.is_last = number >= place.config.training.max_steps
        """Whether the run ends after this step."""
        self.draining = False
        """After ``optimize``: whether all ranks have agreed to stop after this step."""
        self.save_ended = False
        """After ``optimize``: whether, as all ranks know, the save beside training has ended on some rank."""
        self.result: StepResult | None = None
        """After ``optimize``."""
        self.span = span
        self._state = state
        self._place = place
        self._gradients = gradients
        self._config = place.config
        self._shards = place.config.data.shards
        # Per logical shard: loss, its units (samples or tokens), digests of samples and generators; then what all
        # ranks must hear of.
        self._totals = torch.zeros(4 * self._shards + 2, dtype=torch.float64)
        self._of_shards = self._totals[:-2].view(4, self._shards)
        self._logged: dict[int, dict[str, float]] = {}
        self._host_rng = host_generators()
        self._numbered = True
        self._current: Microbatch | None = None
        self._extra = False
        self._done = 0
        self._turns = state.data.count() + self._lacking()

    def microbatches(self) -> Iterator[Any]:
        """This rank's batches. While one is out, autocast and gradient synchronisation are set up for it.

        Where data.shards does not divide by the ranks of a sharded model, those with fewer shards get their last
        batch once more: each forward gathers parameters from all ranks. Its loss and its statistics count for nothing.
        """
        for index, microbatch in enumerate(self._rounds()):
            if index != self._done:
                raise LoopError(
                    f"step {self.number}: call step.backward once per microbatch, before taking the next one"
                )
            self._current = microbatch
            if self._config.determinism != "off":
                seed_all(self._place.seed, "compute", self.number, microbatch.shard)
            last = index == self._turns - 1
            around = self._gradients.microbatch(last=last, extra=self._extra)
            with around, autocast(self._config, self._place.device):
                yield microbatch.batch
        self._current = None

    def _rounds(self) -> Iterator[Microbatch]:
        for microbatch in self._state.data.microbatches():
            yield microbatch
        for _ in range(self._lacking()):
            self._extra = True
            yield microbatch

    def _lacking(self) -> int:
        if not isinstance(exchanging(self._state.model), FSDPModule):
            return 0
        return -(-self._shards // self._place.coordinator.world_size) - self._state.data.count()

    def backward(self, loss: torch.Tensor, *, tokens: int | None = None) -> None:
        """Backward of this microbatch's share of the global loss.

        ``loss`` is the mean over the microbatch's samples, or over its ``tokens`` where that is given: the gradient is
        then the mean over all samples, or all tokens, of the global batch, however unevenly they are spread. A
        microbatch without a token still needs its backward: divide by ``max(tokens, 1)``, not by 0.
        Raises LoopError outside of ``microbatches``.
        """
        if self._current is None or self._done >= self._turns:
            raise LoopError(f"step {self.number}: step.backward belongs inside 'for batch in step.microbatches()'")
        if loss.numel() != 1:
            raise LoopError(f"step {self.number}: the loss must be one number, its shape is {list(loss.shape)}")
        self._place.progress()  # before it waits for peers: whoever has not come so far is behind
        rng = model_generators(self._place.device)  # as the forward left them: what it drew, and from which seed
        units = 0 if self._extra else self._current.samples if tokens is None else tokens
        scale, last = self._scale(), self._done == self._turns - 1
        around = self._gradients.backward(shard=None if self._extra else self._current.shard, last=last)
        with torch.autocast(self._place.device.type, enabled=False), around:
            (loss * (scale * units / self._config.data.global_batch)).backward()
        if not self._extra:
            digest = self._current.digest
            self._numbered &= digest is not None
            found = (loss.detach().double().item(), units, digest or 0, rng)
            self._of_shards[:, self._current.shard] = torch.tensor(found, dtype=torch.float64)
        self._done += 1

    def log(self, **values: float | torch.Tensor) -> None:
        """Put more on record of this microbatch than its loss, such as an accuracy: means over its samples or tokens.

        The step's line in the ledger, ``result`` and trackers get the means over the global batch, which are the same
        at every world size. Raises LoopError outside of ``microbatches``, or for what is not a number.
        """
        if self._current is None:
            raise LoopError(f"step {self.number}: step.log belongs inside 'for batch in step.microbatches()'")
        try:
            numbers = {n: float(v.detach() if isinstance(v, torch.Tensor) else v) for n, v in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise LoopError(f"step {self.number}: step.log takes numbers: {error}") from None
        if not self._extra:
            self._logged.setdefault(self._current.shard, {}).update(numbers)

    def optimize(self) -> StepResult:
        """Clip, step optimizer and schedule, clear gradients, commit the data. Collective.

        Raises NonFiniteError (by ``training.non_finite``), LoopError when a microbatch is missing.
        """
        if self._done != self._turns:
            raise LoopError(
                f"step {self.number}: {self._done} of {self._turns} microbatches had their backward before optimize"
            )
        self._place.progress()
        loss, units, metrics, samples, rng = self._reduce_totals()
        parameters = [p for g in self._state.optimizer.param_groups for p in g["params"] if p.grad is not None]
        # Losses were weighted against global_batch units; tokens and the loss scale are put right here.
        factor = self._config.data.global_batch / units / self._scale()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        norm_tensor = self._gradients.norm(gradients)
        norm = float(norm_tensor)
        finite = math.isfinite(norm) and math.isfinite(loss)
        self._handle_non_finite(finite, loss, norm)
        lr = float(self._state.optimizer.param_groups[0]["lr"])
        scale = self._scale()
        if finite:
            if self._config.training.clip_norm is not None:
                clip_grads_with_norm_(parameters, self._config.training.clip_norm, norm_tensor)
            self._state.optimizer.step()
            if self._state.schedule is not None:
                self._state.schedule.step()
        if self._config.training.precision == "fp16":
            self._state.scaler.update(finite)
        self._state.optimizer.zero_grad(set_to_none=True)
        self._state.step = self.number
        self._state.data.commit()
        self.result = StepResult(loss=loss, grad_norm=norm, lr=lr, scale=scale, updated=finite, metrics=metrics)
        seen = {"digest": samples, "rng": rng, "world": self._place.coordinator.world_size}
        line = {"step": self.number, **asdict(self.span), **asdict(self.result), **seen}
        if not metrics:
            del line["metrics"]
        self._place.record.step(line)
        return self.result

    def _reduce_totals(self) -> _Totals:
        # Each shard's number is added to zeros, which is exact; the sum over shards then has one fixed order, so
        # the loss does not depend on the world size. What is agreed at the end of a step travels along.
        self._totals[-2] = float(self._place.save_ended)
        self._totals[-1] = float(self._place.stop_requested)
        said = self._place.coordinator.gather(f"step {self.number}", (self._totals, self._logged))
        totals = torch.stack([numbers for numbers, _ in said]).sum(0)
        losses, units, samples, rngs = totals[:-2].view(4, self._shards).tolist()
        self.save_ended = totals[-2].item() > 0
        self.draining = totals[-1].item() > 0
        total = sum(units)
        if total == 0:
            raise LoopError(f"step {self.number}: the whole global batch has 0 tokens")
        return _Totals(
            loss=sum(loss * unit for loss, unit in zip(losses, units, strict=True)) / total,
            units=total,
            metrics=_means({shard: values for _, logged in said for shard, values in logged.items()}, units),
            samples=batch_digest([int(digest) for digest in samples]) if self._numbered else None,
            rng=batch_digest([self._host_rng, *(int(digest) for digest in rngs)]),
        )

    def _handle_non_finite(self, finite: bool, loss: float, norm: float) -> None:
        if finite or self._config.training.non_finite == "skip":
            return
        if self._config.training.precision == "fp16" and math.isfinite(loss) and self._state.scaler.scale > 1:
            return  # an overflow of the scaled loss, which the scaler answers
        raise NonFiniteError(
            f"step {self.number}: loss {loss}, gradient norm {norm} (samples {self.span.first} to {self.span.last - 1} "
            f"of epoch {self.span.epoch}). Lower the learning rate, clip (training.clip_norm), "
            "or set training.non_finite='skip'."
        )

    def _scale(self) -> float:
        return self._state.scaler.scale if self._config.training.precision == "fp16" else 1.0


def _means(logged: Mapping[int, Mapping[str, float]], units: Sequence[float]) -> dict[str, float]:
    """Of what was logged, by shard: weighted by the shards' units and added in their order."""
    sums: dict[str, tuple[float, float]] = {}
    for shard in sorted(logged):
        for name, value in logged[shard].items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = total + value * units[shard], weight + units[shard]
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast by ``training.precision``. FSDP casts by its own policy, unless it has to equal other strategies."""
    sharded = config.strategy.name in ("fsdp", "hsdp") and config.determinism != "elastic"
    if config.training.precision == "fp32" or sharded:
        return nullcontext()
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)
