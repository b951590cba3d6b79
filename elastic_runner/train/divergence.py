"""Replicas of the parameters are compared, so that silent corruption on one rank is noticed and named.

What is compared was there when a step began, and travels with the exchange that comes then: nobody waits for it.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.names import parameter_groups
from elastic_runner.config import RunConfig
from elastic_runner.coordination import Coordinator
from elastic_runner.errors import ReplicasDiffer
from elastic_runner.train.record import RunRecord
from elastic_runner.train.state import TrainState

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ReplicaPlace(Protocol):
    """What a comparison needs of its worker."""

    config: RunConfig
    """The run."""
    coordinator: Coordinator
    """For steps and decisions."""
    record: RunRecord
    """Where what differs is put on record."""


class Replica(NamedTuple):
    """What a rank tells the others of its parameters."""

    part: int
    """Those of equal part are replicas of each other; always 0 but under hsdp."""
    digest: int
    """Of all of them."""


class Opinion(NamedTuple):
    """Which ranks differ from their replicas."""

    wrong: tuple[int, ...]
    """Those that a majority is against; where there is none, all whose replicas differ. Empty: all agree."""
    certain: bool
    """Whether there was a majority each time."""


def judge(replicas: Sequence[Replica]) -> Opinion:
    """Compare what the ranks have told, in rank order. Pure."""
    parts: dict[int, list[int]] = defaultdict(list)
    for rank, replica in enumerate(replicas):
        parts[replica.part].append(rank)
    wrong: list[int] = []
    certain = True
    for ranks in parts.values():
        digest, count = Counter(replicas[rank].digest for rank in ranks).most_common(1)[0]
        if count == len(ranks):
            continue
        majority = 2 * count > len(ranks)
        certain &= majority
        wrong += [rank for rank in ranks if not majority or replicas[rank].digest != digest]
    return Opinion(tuple(sorted(wrong)), certain)


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number for each, that a flipped bit changes: of its bytes on the CPU, elsewhere the sum of them as integers.

    Moves one number a tensor from a device.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in flat):
        return [xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy().data) for tensor in flat]
    return integer_sums(flat)


def integer_sums(flat: Sequence[torch.Tensor]) -> list[int]:
    """Sums of flat tensors' bits, read as integers, modulo 2**64."""
    sums = [t.view(_INTEGERS.get(t.element_size(), torch.int64)).sum(dtype=torch.int64) for t in flat]
    found: list[int] = torch.stack(sums).tolist()
    return found


class ReplicaCheck:
    """Compares the parameters of all ranks when the attempt begins, when that is due, and when the loop ends."""

    def __init__(self, state: TrainState, place: ReplicaPlace) -> None:
        self._state = state
        self._place = place
        training, strategy = place.config.training, place.config.strategy.name
        self._on = bool(training.compare_replicas) and strategy in ("ddp", "hsdp") and place.coordinator.world_size > 1
        # A checkpoint must be of a state that all agree on, so that there is one to go back to.
        self._every = (training.compare_replicas, place.config.checkpoint.every)
        groups = parameter_groups(state.model) if self._on else []
        self._names = [names[0] for _, names in groups]
        self._parameters = [parameter for parameter, _ in groups]
        self._digests: list[int] = []

    def report(self, *, ends: bool) -> Replica | None:
        """For the exchange in which all ranks say where they stand; ``hear`` takes everybody's. None: not due."""
        step, state = self._state.step, self._state
        if not self._on or step == state.agreed_at:
            return None
        if not (ends or step == state.begun_at or any(step % every == 0 for every in self._every)):
            return None
        self._digests = digests([p.to_local() if isinstance(p, DTensor) else p for p in self._parameters])
        return Replica(self._part(), xxhash.xxh3_64_intdigest(repr(self._digests).encode()))

    def hear(self, told: Sequence[Replica | None]) -> None:
        """What all ranks have reported. Raises ReplicasDiffer, alike on all. Collective, where they differ."""
        replicas = [replica for replica in told if replica is not None]
        if not replicas:
            return
        opinion = judge(replicas)
        if not opinion.wrong:
            self._state.agreed_at = self._state.step
            return
        label = f"replicas differ after step {self._state.step}"
        details = self._place.coordinator.gather(label, (socket.gethostname(), self._digests))
        hosts = [host for host, _ in details]
        first = self._first_of(replicas, opinion, [found for _, found in details])
        message = describe(opinion, hosts, first, step=self._state.step, agreed=self._state.agreed_at)
        event = {"after": self._state.step, "agreed": self._state.agreed_at, "parameter": first}
        self._place.record.replicas_differ({**event, "ranks": opinion.wrong, "certain": opinion.certain})
        raise ReplicasDiffer(message)

    def _part(self) -> int:
        for parameter in self._parameters:
            if isinstance(parameter, DTensor):
                return parameter.device_mesh.get_local_rank("shard")
        return 0

    def _first_of(self, replicas: Sequence[Replica], opinion: Opinion, found: Sequence[list[int]]) -> str:
        """The first parameter, in the model's order, in which a rank differs from a replica."""
        part = replicas[opinion.wrong[0]].part
        alike = [digests for replica, digests in zip(replicas, found, strict=True) if replica.part == part]
        return next(
            name for name, values in zip(self._names, zip(*alike, strict=True), strict=True) if len(set(values)) > 1
        )


def describe(opinion: Opinion, hosts: Sequence[str], parameter: str, *, step: int, agreed: int | None) -> str:
    """What a person has to know: who, since when, and what may be the reason."""
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in opinion.wrong)
    if opinion.certain:
        said = f"after step {step} the parameters of {who} are not those of the other ranks"
    else:
        said = f"after step {step} the parameters of {who} differ, and no majority tells who is wrong"
    since = "The attempt began so" if agreed is None else f"All were the same after step {agreed}: the run goes back"
    return (
        f"{said}; the first one is {parameter!r}. {since}. Should it come again: test that host's memory and "
        "processor, and look for code that changes parameters on some ranks only (training.compare_replicas)"
    )
