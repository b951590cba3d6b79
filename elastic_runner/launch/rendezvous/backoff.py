"""How long a node that is lost again and again is left out, so that it does not break world after world. Pure.

Times are of one machine's monotonic clock; what another machine is sent is how much longer each wait takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

_DOUBLINGS = 32
"""More of them do not matter to any wait, and would be too much for a float some day."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """That a machine's node was lost from a world."""

    times: int
    """How often in a row."""
    until: float
    """When it can be taken in again; long after that, all is forgotten."""
    node: str
    """The name that it had the last time."""


Losses: TypeAlias = Mapping[str, Loss]
"""By machine: a node that is started again has another name, and the same cable."""


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The rule."""

    first: float = 30.0
    """Seconds that a node waits after its second loss in a row, doubled with each further one; 0: nobody waits."""
    most: float = 1800.0
    """Seconds that it waits at most, and after a wait after which what was before is forgotten."""

    def wait(self, times: int) -> float:
        """Seconds after so many losses; a first one is an accident."""
        return 0.0 if times < 2 else min(self.first * 2.0 ** min(times - 2, _DOUBLINGS), self.most)

    def lose(self, losses: Losses, node: str, now: float) -> Losses:
        """What is known after one more loss."""
        if not self.first:
            return losses
        known = {each: loss for each, loss in losses.items() if self._remembers(loss, now)}
        times = known[machine(node)].times + 1 if machine(node) in known else 1
        return {**known, machine(node): Loss(times=times, until=now + self.wait(times), node=node)}

    def unsteady(self, losses: Losses, node: str, now: float) -> bool:
        """Whether it was lost more than once of late."""
        loss = losses.get(machine(node))
        return loss is not None and loss.times > 1 and self._remembers(loss, now)

    def learn(self, losses: Losses, told: Losses, now: float) -> Losses:
        """What is known when another node has told what it knows: the account with more losses counts."""
        more = {each: loss for each, loss in told.items() if each not in losses or loss.times > losses[each].times}
        return {**losses, **{each: loss for each, loss in more.items() if self._remembers(loss, now)}}

    def _remembers(self, loss: Loss, now: float) -> bool:
        return now < loss.until + self.most


def machine(node: str) -> str:
    """Where a node named machine:pid:word is."""
    return node.rsplit(":", 2)[0]


def release(losses: Losses, nodes: Iterable[str], now: float) -> Losses:
    """Their waits are over before their time."""
    machines = {machine(node) for node in nodes}
    return {each: replace(loss, until=now) if each in machines else loss for each, loss in losses.items()}


def pack(losses: Losses, now: float) -> list[tuple[str, int, float]]:
    """For another machine."""
    return [(loss.node, loss.times, round(loss.until - now, 3)) for loss in losses.values()]


def unpack(packed: Any, now: float) -> Losses:
    """From another machine. Raises TypeError, ValueError."""
    losses = (Loss(node=str(node), times=int(times), until=now + float(left)) for node, times, left in packed)
    return {machine(loss.node): loss for loss in losses}
