"""A membership without a host: events with times given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic_runner.launch.rendezvous.membership import (
    Action,
    Alive,
    Break,
    Event,
    Form,
    Join,
    Leave,
    Membership,
    Rules,
    Tick,
    transition,
)

RULES = Rules(min_nodes=2, max_nodes=3, last_call=5, rejoin=60, lease=3)
ONE = replace(RULES, min_nodes=1)


@dataclass
class Play:
    """A membership whose nodes give signs of life unless they are ``mute``."""

    rules: Rules = RULES
    state: Membership = field(default_factory=Membership)
    now: float = 0.0
    mute: set[str] = field(default_factory=set)

    def apply(self, event: Event) -> list[Action]:
        self.state, actions = transition(self.state, event, self.now, self.rules)
        return actions

    def join(self, *nodes: str, rank: int | None = None, of: int = 0) -> list[Action]:
        return [action for node in nodes for action in self.apply(Join(node=node, rank=rank, nodes=of))]

    def rejoin(self, *nodes: str) -> list[Action]:
        """Nodes of the present world, as their members do it: with the rank that they have."""
        ranks = {node: rank for rank, node in enumerate(self.state.world)}
        size = self.state.size
        return [action for node in nodes for action in self.join(node, rank=ranks.get(node), of=size)]

    def leave(self, node: str, *, done: bool = False) -> list[Action]:
        return self.apply(Leave(node=node, done=done))

    def lose(self, *nodes: str) -> list[Action]:
        """Their connections are closed."""
        return [action for node in nodes for action in self.apply(Leave(node=node, lost=True, reason="is gone"))]

    def wait(self, seconds: float) -> list[Action]:
        """Time passes, in steps of half a second."""
        actions: list[Action] = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            alive = frozenset(self.state.seen) - self.mute
            actions += self.apply(Alive(nodes=alive)) if alive else self.apply(Tick())
        return actions


def formed(actions: Sequence[Action]) -> list[tuple[str, ...]]:
    return [action.nodes for action in actions if isinstance(action, Form)]


def reasons(actions: Sequence[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Break)]


def world(*nodes: str, rules: Rules = RULES) -> Play:
    """A play in which these form the first round."""
    play = Play(rules)
    assert formed([*play.join(*nodes), *play.wait(rules.last_call)]) == [nodes]
    return play
