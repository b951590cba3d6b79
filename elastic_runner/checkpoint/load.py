"""Loading one checkpoint into the present parts, at any world size and under any strategy.

torch's ``Optimizer.load_state_dict`` goes by position and casts moments to the parameter's type, so optimizer state
is put in place here, by name and in the type it was saved with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.capture import Parts, is_extra_state, optimizer_names, pack, references, unpack
from elastic_runner.checkpoint.matching import Lenience, allowed, check_shapes, match_groups, match_model
from elastic_runner.checkpoint.names import aliases, clean_name, parameter_groups
from elastic_runner.checkpoint.source import Source
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import CheckpointError, Mismatch

log = logging.getLogger(__name__)

OPTIMIZER_STATE = "optimizer.state."
OPTIMIZER_GROUPS = "optimizer.param_groups"


class Loader:
    """Loads checkpoints into ``parts``, one after the other until one is whole. Collective; errors are all ranks'."""

    def __init__(self, parts: Parts, coordinator: Coordinator, lenience: Lenience) -> None:
        self._parts = parts
        self._coordinator = coordinator
        self._lenience = lenience
        self._half_read = False

    def load(self, source: Source) -> None:
        """Load all of a checkpoint. Raises Mismatch, Damaged, NotData, StorageError.

        After an error that came while reading, model and optimizer may hold a part of it: load another, or end. Raises
        CheckpointError where another would leave that part there.
        """
        metadata, plain = self._coordinator.once("restore: read metadata", source.head)
        tensors = {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        # Everything that can be refused is refused before the first byte of the model changes.
        loading = _Loading(self._parts, tensors, plain, self._lenience)
        self._coordinator.agree("restore: match", lambda: self._prepare(loading))
        if self._coordinator.is_main:
            for setting in loading.overridden():
                log.warning("the checkpoint's optimizer settings are used: %s", setting)
        # DCP's planner knows which parts of which chunks a tensor or shard needs; its own loading does not check.
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(cast(dict[str, Any], loading.targets), metadata, self._coordinator.is_main)
        items = planner.create_local_plan().items
        self._half_read = True
        source.read(items, metadata, planner)
        self._coordinator.agree("restore: apply", loading.apply)
        self._half_read = False

    def _prepare(self, loading: _Loading) -> None:
        loading.prepare()
        if self._half_read and loading.kept:
            raise CheckpointError(
                f"{', '.join(loading.kept[:8])} would keep fresh values (checkpoint.allow_missing), but hold values of "
                "a checkpoint that could not be read to its end; the program must be started anew"
            )


class _Loading:
    """One load: targets by key of the checkpoint, and what to do once they are filled."""

    def __init__(
        self,
        parts: Parts,
        saved: Mapping[str, TensorStorageMetadata],
        plain: Mapping[str, Any],
        lenience: Lenience,
    ) -> None:
        self.targets: dict[str, torch.Tensor] = {}
        self.kept: list[str] = []
        self._parts = parts
        self._saved = saved
        self._plain = plain
        self._lenience = lenience
        self._copies: list[tuple[torch.Tensor, str]] = []
        self._extra_state: dict[str, Any] = {}
        self._optimizer: dict[torch.Tensor, dict[str, Any]] = {}
        self._fresh_states: set[str] = set()
        self._known: set[str] = set()
        self._settings: list[dict[str, Any] | None] = []
        self._consumed: set[str] = set()

    def prepare(self) -> None:
        """Match names and allocate targets; changes nothing."""
        self._prepare_model()
        self._prepare_optimizer()
        self._prepare_others()
        left = [key for key in self._saved if key not in self._consumed]
        if left:
            raise Mismatch(f"the checkpoint holds state that nothing here takes: {', '.join(left[:8])}", extra=left)

    def overridden(self) -> list[str]:
        """Optimizer settings of the script that the checkpoint's take the place of, as torch's own loading does."""
        found = []
        for number, (group, settings) in enumerate(
            zip(self._parts.optimizer.param_groups, self._settings, strict=True)
        ):
            # A schedule moves lr; what it started from tells whether it was changed.
            passed = {"params", "lr"} if "initial_lr" in group else {"params"}
            for name in sorted(set(settings or {}) & set(group) - passed):
                if repr(group[name]) != repr((settings or {})[name]):
                    found.append(f"group {number}: {name} {(settings or {})[name]}, not {group[name]}")
        return found

    def apply(self) -> None:
        """Put the loaded values in place."""
        with torch.no_grad():
            for target, key in self._copies:
                target.copy_(self.targets[key])
        self._apply_optimizer()
        for name, part in self._parts.others().items():
            if name not in self._fresh_states:
                part.load_state_dict(unpack(self._plain[f"state.{name}"], self.targets))
        if self._extra_state:
            self._parts.model.load_state_dict(unpack(self._extra_state, self.targets), strict=False)

    def _prepare_model(self) -> None:
        model = self._parts.model
        tied_names = {names[0]: names for _, names in parameter_groups(model)}
        tied = aliases(parameter_groups(model))
        absent: list[str] = []
        extra_state: dict[str, Any] = self._plain["model.plain"]
        wanted: dict[str, torch.Tensor] = {}
        for raw, value in model.state_dict(keep_vars=True).items():
            name = clean_name(model, raw)
            if isinstance(value, torch.Tensor) and not is_extra_state(name):
                if name not in tied:
                    wanted[name] = value.detach()
            elif name in extra_state:
                self._take(references(extra_state[name]))
                self._extra_state[raw] = extra_state[name]
            else:
                absent.append(name)
        prefix = "model."
        in_plain = {key for value in extra_state.values() for key in references(value)}
        saved = [k.removeprefix(prefix) for k in self._saved if k.startswith(prefix) and k not in in_plain]
        names = {name: tied_names.get(name, [name]) for name in wanted}
        # Extra state has no shape to compare, but its names must match like any other.
        names.update({name: [name] for name in absent})
        left = {clean_name(model, raw) for raw in self._extra_state}
        matched = match_model(
            names, [*saved, *(n for n in extra_state if n not in left)], self._plain["model.aliases"], self._lenience
        )
        check_shapes(
            {name: (value.shape, value.dtype) for name, value in wanted.items()},
            lambda name: (self._saved[prefix + name].size, self._saved[prefix + name].properties.dtype),
            matched.source,
        )
        for name, source in matched.source.items():
            self._target(prefix + source, wanted[name])
        for name in matched.ignored:
            self._consumed.update(references(extra_state[name]) if name in extra_state else [prefix + name])
        self.kept += matched.fresh
        if matched.fresh or matched.ignored:
            log.warning(
                "partial restore: %d tensors loaded, %d keep fresh values (%s), %d left unread (%s)",
                len(matched.source),
                len(matched.fresh),
                ", ".join(matched.fresh),
                len(matched.ignored),
                ", ".join(matched.ignored),
            )

    def _target(self, key: str, tensor: torch.Tensor) -> None:
        """Read ``key`` into ``tensor``; a second tensor that wants the same key gets a copy afterwards."""
        if key in self.targets:
            self._copies.append((tensor, key))
        self.targets.setdefault(key, tensor)
        self._consumed.add(key)

    def _take(self, keys: Sequence[str]) -> None:
        for key in keys:
            saved = self._saved[key]
            self._target(key, torch.empty(saved.size, dtype=saved.properties.dtype))

    def _prepare_optimizer(self) -> None:
        model, optimizer = self._parts.model, self._parts.optimizer
        if OPTIMIZER_GROUPS not in self._plain:
            self._leave_optimizer()
            return
        present = optimizer_names(model, optimizer)
        saved_aliases: Mapping[str, str] = self._plain["model.aliases"]
        groups = self._plain[OPTIMIZER_GROUPS]
        self._known = {name for group in groups for name in group["params"]}
        all_names = {names[0]: names for _, names in parameter_groups(model)}
        found = self._fields_by_parameter()

        def origin(name: str) -> str:
            candidates = [
                *all_names.get(name, [name]),
                *(saved_aliases.get(n, n) for n in all_names.get(name, [name])),
            ]
            return next((c for c in candidates if c in self._known), name)

        origins = {parameter: origin(name) for parameter, name in present.items()}
        order = [[origins[p] for p in group["params"]] for group in optimizer.param_groups]
        self._settings = match_groups(groups, order)
        group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, name in origins.items():
            group = group_of[parameter]
            self._optimizer[parameter] = dict(self._plain["optimizer.plain"].get(name, {}))
            for field, key in found.get(name, {}).items():
                # Its own tensor, also where two parameters were one when they were saved.
                self._optimizer[parameter][field] = self._like(parameter, key, field, group)
                self._target(key, self._optimizer[parameter][field])
            for key in references(self._plain["optimizer.plain"].get(name, {})):
                self._target(key, self._like(parameter, key, "", group))
        self._report_optimizer(set(origins.values()), found)

    def _leave_optimizer(self) -> None:
        """The checkpoint holds weights only. Raises Mismatch unless that was asked for."""
        if not allowed(OPTIMIZER_GROUPS, self._lenience.allow_missing):
            raise Mismatch(
                "the checkpoint holds a model's weights and no optimizer; to take them and start everything else "
                "fresh, name optimizer.* and state.* in checkpoint.allow_missing",
                missing=[OPTIMIZER_GROUPS],
            )
        log.warning("partial restore: the checkpoint holds no optimizer state, which starts fresh")
        if self._parts.optimizer.state:
            self.kept.append("optimizer.*")
        self._settings = [None] * len(self._parts.optimizer.param_groups)

    def _fields_by_parameter(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        nested = set(references(self._plain["optimizer.plain"]))
        for key in self._saved:
            if key.startswith(OPTIMIZER_STATE) and key not in nested:
                name, _, field = key.removeprefix(OPTIMIZER_STATE).rpartition(".")
                found.setdefault(name, {})[field] = key
        return found

    def _report_optimizer(self, present: set[str], found: Mapping[str, Mapping[str, str]]) -> None:
        fresh = sorted(present - self._known)
        if fresh:
            log.warning("optimizer state starts fresh for parameters not trained before: %s", ", ".join(fresh))
        in_model = {name for _, names in parameter_groups(self._parts.model) for name in names}
        nested: Mapping[str, Any] = self._plain["optimizer.plain"]
        keys = {n: [*found.get(n, {}).values(), *references(nested.get(n))] for n in {*found, *nested} - present}
        gone = sorted(keys)
        in_model.update(name for name, other in self._plain["model.aliases"].items() if other in in_model)
        unknown = [name for name in gone if name not in in_model]
        ignorable = Lenience(allow_extra=self._lenience.allow_extra)
        if unknown:
            match_model({}, unknown, {}, ignorable)  # raises, naming them, unless they are allowed
        for name in gone:
            self._consumed.update(keys[name])
        if gone:
            log.warning("optimizer state is dropped for parameters not trained any more: %s", ", ".join(gone))

    def _like(self, parameter: torch.Tensor, key: str, field: str, group: Mapping[str, Any]) -> torch.Tensor:
        saved = self._saved[key]
        present = self._parts.optimizer.state.get(parameter, {}).get(field)
        if isinstance(present, torch.Tensor) and (present.shape, present.dtype) == (saved.size, saved.properties.dtype):
            return present  # memory that is there already
        if saved.size == parameter.shape and saved.size != torch.Size([]):
            return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
        # Adam keeps its step count on the host unless the step runs on the device.
        on_host = field == "step" and not (group.get("capturable") or group.get("fused"))
        device = torch.device("cpu") if on_host else parameter.device
        return torch.zeros(saved.size, dtype=saved.properties.dtype, device=device)

    def _apply_optimizer(self) -> None:
        optimizer = self._parts.optimizer
        for parameter, fields in self._optimizer.items():
            state = {field: unpack(value, self.targets) for field, value in fields.items()}
            if state:
                optimizer.state[parameter] = state
            elif parameter in optimizer.state:
                del optimizer.state[parameter]
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            if settings is not None:
                group.update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()})

    def _prepare_others(self) -> None:
        for name, part in self._parts.others().items():
            packed = self._plain.get(f"state.{name}", _ABSENT)
            if packed is _ABSENT and allowed(f"state.{name}", self._lenience.allow_missing):
                log.warning("partial restore: state.%s is not in the checkpoint and starts fresh", name)
                self._fresh_states.add(name)
                continue
            if packed is _ABSENT:
                raise Mismatch(
                    f"the checkpoint holds no state named {name!r}; to start it fresh, name state.{name} in "
                    "checkpoint.allow_missing",
                    missing=[f"state.{name}"],
                )
            present: dict[str, torch.Tensor] = {}
            pack(part.state_dict(), f"state.{name}", present)
            for key in references(packed):
                saved, live = self._saved[key], present.get(key)
                if isinstance(live, DTensor) and live.shape == saved.size:
                    self._target(key, torch.zeros_like(live, dtype=saved.properties.dtype))
                else:
                    self._take([key])
        wanted = {f"state.{name}" for name in self._parts.others()}
        unwanted = [key for key in self._plain if key.startswith("state.") and key not in wanted]
        extra = [key for key in unwanted if not allowed(key, self._lenience.allow_extra)]
        if extra:
            raise Mismatch(
                f"the checkpoint holds states that TrainState was not given: {', '.join(extra)}; to leave them unread, "
                "name them in checkpoint.allow_extra",
                extra=extra,
            )
        for key in unwanted:
            log.warning("partial restore: %s is left unread", key)
            self._consumed.update(references(self._plain[key]))


_ABSENT = object()
