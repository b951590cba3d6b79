"""DDP as this package uses it: gradients are summed, and what does not fit is said in terms of our options.

DDP itself notices an incomplete reduction at the next forward, when the optimizer has stepped already, each rank
with gradients of its own. Here it is noticed before the optimizer steps.
"""

from __future__ import annotations

import re
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from elastic_runner.checkpoint.names import clean_name
from elastic_runner.errors import ModelError
from elastic_runner.train.reduction import Reduction, sum_gradients

_UNUSED = (
    "a step used only a part of the model, so some parameters got no gradient{names}. "
    "Set strategy.ddp.find_unused_parameters = true, or use every parameter in every step."
)
_STATIC = (
    "a step used other parameters than the first one did{names}, which strategy.ddp.static_graph does not allow. "
    "Switch it off and set strategy.ddp.find_unused_parameters = true."
)
_AROUND = (
    "gradients were not exchanged between the ranks: the loss was not computed by a forward of the model that "
    "worker.prepare returned. Call that model, not a module inside of it."
)
_TWICE = (
    "DDP saw a parameter's gradient twice in one backward{names}: re-entrant activation checkpointing, or a forward "
    "outside of the wrapped model. Use strategy.checkpoint_classes (non-reentrant) for recomputation, and switch "
    "strategy.ddp.find_unused_parameters off when every parameter is used."
)
_SAID_BY_DDP = (
    (re.compile(r"Expected to have finished reduction in the prior iteration"), _UNUSED),
    (re.compile(r"marked (as )?ready (twice|only once)|Expected to mark a variable ready only once"), _TWICE),
)


class Replicas(DistributedDataParallel):
    """A replica of the model on each rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reduction = Reduction()
        self.register_comm_hook(self._reduction, sum_gradients)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's own forward. Raises ModelError."""
        with Explained(self):
            return super().forward(*inputs, **keywords)

    def begin_reduction(self) -> None:
        """The next backward exchanges gradients."""
        self._reduction.complete = False

    def check_reduced(self) -> None:
        """Raise ModelError unless the backward just done has exchanged the gradient of every parameter."""
        if self._reduction.complete:
            return
        without = [name for name, p in trained(self) if p.grad is None]
        if self.static_graph:
            raise ModelError(_STATIC.format(names=_listed(without)))
        with Explained(self):
            self.reducer.prepare_for_backward([])  # what a forward would do; it knows which gradients are lacking
        raise ModelError(_UNUSED.format(names=_listed(without)) if without else _AROUND)


class Explained:
    """Maps what DDP says about unused or doubly used parameters to the option to change, with parameter names."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        for pattern, advice in _SAID_BY_DDP:
            if pattern.search(str(error)):
                raise ModelError(advice.format(names=self._names(str(error)))) from error

    def _names(self, text: str) -> str:
        named = re.search(r"name (\S+) has been marked", text)
        if named:
            return _listed([clean_name(self._model.module, named.group(1))])
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text) or re.search(r"index (\d+)", text)
        if indices is None:
            return ""
        names = [name for name, _ in trained(self._model)]
        return _listed([names[int(i)] for i in indices.group(1).split() if int(i) < len(names)])


def trained(model: DistributedDataParallel) -> list[tuple[str, Any]]:
    """Clean names and parameters that get a gradient, in DDP's order."""
    return [(clean_name(model, name), p) for name, p in model.named_parameters() if p.requires_grad]


def _listed(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
