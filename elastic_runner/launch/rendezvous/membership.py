"""Who is in the world: the host's decisions, as pure transitions.

A round is one world of nodes. It is broken when a member is lost, leaves, comes back for another one (its workers
ended), or when a newcomer can be taken in; then the members come back and the next round is formed. Survivors keep
their order. A node whose connection was closed is gone; silence may be the network's fault, and even this host's.
One that is lost again and again is held for a while when it comes back, as a spare is, unless it is needed.
Time is the host's own monotonic clock: two machines' clocks are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from elastic_runner.launch.rendezvous import backoff
from elastic_runner.launch.rendezvous.backoff import Backoff, Losses


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a world must satisfy."""

    min_nodes: int
    """Nodes without which there is no world."""
    max_nodes: int
    """Nodes at most; others wait as spares."""
    last_call: float = 5.0
    """Seconds that the first round waits for more nodes after the smallest world is there."""
    rejoin: float = 60.0
    """Seconds that later rounds wait for members that are alive but busy ending their workers."""
    lease: float = 3.0
    """Seconds without a sign of life after which a node is lost."""
    backoff: Backoff = field(default_factory=Backoff)
    """How long one that is lost again and again is held."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The host's knowledge. Node names are any unique strings."""

    round: int = 0
    """Number of the latest round; 0: none yet."""
    world: tuple[str, ...] = ()
    """Its nodes that are still alive, in order of rank."""
    size: int = 0
    """How many it began with."""
    running: bool = False
    """Whether it is whole."""
    silent: int = 0
    """How many of it were lost by silence since it began."""
    done: bool = False
    """Whether one of its nodes has left with the work complete."""
    waiting: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Nodes that want to be in the next round, with what tells their order: the rank they had, and their arrival."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """When each node last gave a sign of life."""
    arrivals: int = 0
    """Numbers given out so far."""
    expected: int = 0
    """Survivors of another host's world, as they tell; with them the first round of this host is complete."""
    since: float | None = None
    """When the smallest world was first there since the last round, or when that round broke."""
    losses: Losses = field(default_factory=dict)
    """Machines whose nodes were lost from worlds, under this host or earlier ones."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Waiting nodes that are not to be taken in yet, with the end of that."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A node wants to be in the next round."""

    node: str
    rank: int | None = None
    """Its rank in its last world, under this host or another."""
    nodes: int = 0
    """Nodes of that world."""
    losses: Losses = field(default_factory=dict)
    """What it knows from an earlier host."""


@dataclass(frozen=True, kw_only=True)
class Alive:
    """Nodes gave a sign of life."""

    nodes: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A node goes; ``done``: because its work is complete, so that the others need not know."""

    node: str
    done: bool = False
    lost: bool = False
    """Whether it did not go in order, which is held against it."""
    reason: str = "has left"


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class Break:
    """Tell the members that their round is over."""

    round: int
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Tell the members that a round has begun; their place in ``nodes`` is their rank."""

    round: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Tell a waiting node, and people, that it is not taken in for so many seconds, unless it is needed."""

    node: str
    seconds: float
    times: int
    """How often in a row its machine was lost."""


@dataclass(frozen=True, kw_only=True)
class Resign:
    """Most of the world is lost to this host at once: it is more likely to be cut off than they."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The work is complete, and no other round will be formed."""

    spares: tuple[str, ...]
    """Nodes that have waited in vain."""
    stranded: tuple[str, ...]
    """Nodes that failed after others had finished, and are too few to go on."""


_NEWCOMER = 1 << 30
"""Comes after every rank."""

Event: TypeAlias = Join | Alive | Leave | Tick
Action: TypeAlias = Break | Form | Hold | Resign | Finish


def transition(state: Membership, event: Event, now: float, rules: Rules) -> tuple[Membership, list[Action]]:
    """What follows from ``event`` at ``now`` (seconds, monotonic). Pure."""
    actions: list[Action] = []
    if isinstance(event, Join):
        state = _join(state, event, now, rules, actions)
    elif isinstance(event, Alive):
        known = {node: now for node in event.nodes if node in state.seen}
        state = replace(state, seen={**state.seen, **known})
    elif isinstance(event, Leave):
        done = event.done and event.node in state.world
        gone = {event.node: "" if event.done else event.reason}
        state = _drop(state, gone, now, rules, actions, lost=event.lost)
        state = replace(state, done=state.done or done)
    state = _lapse(state, now, rules, actions)
    if any(isinstance(action, Resign) for action in actions):
        return state, actions
    held = _held(state, now, rules)
    state = _admit(state, held, now, rules, actions)
    state = _form(state, held, now, rules, actions)
    return _hold(state, held, now, actions), actions


def next_deadline(state: Membership, rules: Rules) -> float | None:
    """When a Tick may change something, seconds of the same clock; None: never by itself."""
    times = [seen + rules.lease for seen in state.seen.values()]
    times += state.held.values()
    if not state.running and state.since is not None and len(state.waiting) >= rules.min_nodes:
        times.append(state.since + (rules.rejoin if state.world else rules.last_call))
    return min(times, default=None)


def _join(state: Membership, event: Join, now: float, rules: Rules, actions: list[Action]) -> Membership:
    node = event.node
    # A new host means that the old one, at least, is not coming.
    expected = state.expected if state.round else max(state.expected, event.nodes - 1)
    losses = rules.backoff.learn(state.losses, event.losses, now)
    state = replace(state, seen={**state.seen, node: now}, expected=expected, losses=losses)
    if node not in state.waiting:
        number = state.arrivals + 1
        place = (_NEWCOMER if event.rank is None else event.rank, number)
        state = replace(state, waiting={**state.waiting, node: place}, arrivals=number)
    if node in state.world:
        return _break(state, f"the workers of {node} have ended", now, actions)
    return state


def _admit(state: Membership, held: Mapping[str, float], now: float, rules: Rules, actions: list[Action]) -> Membership:
    """Break the round for a newcomer, where there is room for it."""
    if state.running and len(state.world) == state.size < rules.max_nodes:  # none of it is done
        for node in state.waiting:
            if node not in held:
                return _break(state, f"{node} joins", now, actions)
    return state


def _held(state: Membership, now: float, rules: Rules) -> dict[str, float]:
    """Who has to wait, with the end of that: who was lost, and new agents of its machine; not another that is left."""
    if rules.min_nodes == rules.max_nodes:  # all are needed
        return {}
    waits = {machine: loss for machine, loss in state.losses.items() if loss.until > now}
    held = {}
    for node, (rank, _) in state.waiting.items() if waits else ():
        loss = waits.get(backoff.machine(node))
        if loss is not None and (rank == _NEWCOMER or node == loss.node) and node not in state.world:
            held[node] = loss.until
    return held


def _hold(state: Membership, held: Mapping[str, float], now: float, actions: list[Action]) -> Membership:
    """What is left of ``held`` after the round was formed."""
    held = {node: until for node, until in held.items() if node in state.waiting}
    for node, until in held.items():
        if node not in state.held:
            times = state.losses[backoff.machine(node)].times
            actions.append(Hold(node=node, seconds=until - now, times=times))
    return replace(state, held=held)


def _drop(
    state: Membership, gone: Mapping[str, str], now: float, rules: Rules, actions: list[Action], *, lost: bool
) -> Membership:
    """Take nodes out, each with the reason; an empty reason breaks nothing."""
    members = [node for node in state.world if gone.get(node)]
    if members:
        state = _break(state, "; ".join(f"{node} {gone[node]}" for node in members), now, actions, gone=gone)
    if lost:
        for node in members:
            state = replace(state, losses=rules.backoff.lose(state.losses, node, now))
    return replace(
        state,
        world=tuple(node for node in state.world if node not in gone),
        waiting={node: number for node, number in state.waiting.items() if node not in gone},
        seen={node: seen for node, seen in state.seen.items() if node not in gone},
    )


def _break(
    state: Membership, reason: str, now: float, actions: list[Action], gone: Mapping[str, str] | None = None
) -> Membership:
    if not state.running:
        return state
    told = tuple(node for node in state.world if node not in (gone or {}))
    actions.append(Break(round=state.round, reason=reason, nodes=told))
    return replace(state, running=False, since=now)


def _lapse(state: Membership, now: float, rules: Rules, actions: list[Action]) -> Membership:
    silent = {
        node: f"gave no sign of life for {rules.lease:g} s"
        for node, seen in state.seen.items()
        if now - seen >= rules.lease
    }
    if not silent:
        return state
    lost = sum(node in silent for node in state.world)
    state = _drop(replace(state, silent=state.silent + lost), silent, now, rules, actions, lost=True)
    if lost and 2 * state.silent > state.size:
        actions.append(Resign(reason=f"{state.silent} of {state.size} nodes went silent"))
    return state


def _form(state: Membership, held: Mapping[str, float], now: float, rules: Rules, actions: list[Action]) -> Membership:
    """The next round, if it is time for it."""
    if state.running:
        if state.done and not state.world:
            return _finish(state, actions)
        return state
    enough = len(state.waiting) >= rules.min_nodes
    if enough and state.since is None:
        state = replace(state, since=now)
    if not enough and not state.world:
        state = replace(state, since=None)
    if state.done and not enough and all(node in state.waiting for node in state.world):
        return _finish(state, actions)
    free = len(state.waiting) - len(held)
    if not enough or not _complete(state, free, now, rules):
        return state
    order = sorted(state.waiting, key=lambda node: (node in held, state.waiting[node]))
    chosen = tuple(order[: min(max(free, rules.min_nodes), rules.max_nodes)])
    number = state.round + 1
    actions.append(Form(round=number, nodes=chosen))
    return replace(
        state,
        round=number,
        world=chosen,
        size=len(chosen),
        running=True,
        silent=0,
        done=False,
        expected=0,
        waiting={node: place for node, place in state.waiting.items() if node not in chosen},
        since=None,
        losses=backoff.release(state.losses, held.keys() & set(chosen), now),
    )


def _finish(state: Membership, actions: list[Action]) -> Membership:
    """Nodes that come later are of another start of the job: they wait for another epoch."""
    stranded = tuple(node for node in state.waiting if node in state.world)
    spares = tuple(node for node in state.waiting if node not in state.world)
    if state.waiting:
        actions.append(Finish(spares=spares, stranded=stranded))
    return replace(state, world=(), running=True, done=False, waiting={})


def _complete(state: Membership, free: int, now: float, rules: Rules) -> bool:
    """Whether there is nobody left to wait for. ``free``: how many wait and can be taken in."""
    since = now if state.since is None else state.since
    if state.world:
        survivors_back = all(node in state.waiting for node in state.world)
        return survivors_back or now - since >= rules.rejoin
    complete = max(rules.min_nodes, min(rules.max_nodes, state.expected or rules.max_nodes))
    return free >= complete or now - since >= rules.last_call
