"""Which epoch to join, and when to open the next one: a contender's decisions. Pure.

An epoch is one host of the store. A host that cannot be reached may be dead, or be alive while this node is cut off;
its beat on the storage tells. Opening an epoch that is not needed costs a restart, never a second world that commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Reach: TypeAlias = Literal["untried", "refused", "silent"]
"""What came of connecting; refused: the machine is there, and nobody listens on it."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a contender knows."""

    epoch: int = 0
    """The newest epoch on the storage; 0: none."""
    ended: bool = False
    """Whether its host has said that it ends."""
    reach: Reach = "untried"
    """What came of connecting to its host."""
    beat: str | None = None
    """The host's latest beat; any text, compared for change only."""
    beat_since: float = 0.0
    """When this contender first saw that beat, by its own monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class Connect:
    """Try to reach the epoch's host, and join through it."""


@dataclass(frozen=True, kw_only=True)
class Open:
    """Try to become the host of this epoch."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Look again at this time, or earlier."""

    until: float


Decision: TypeAlias = Connect | Open | Wait


def look(view: View, now: float, *, epoch: int, ended: bool, beat: str | None) -> View:
    """The view after a look at the storage, which ended at ``now``.

    It showed the newest epoch (0: none), whether it has ended, its host's beat.
    """
    if ended or epoch == 0:
        return View(epoch=epoch, ended=ended)
    if epoch == view.epoch and beat == view.beat and not view.ended:
        return view
    # A host that has given a sign of life is tried again.
    return View(epoch=epoch, beat=beat, beat_since=now)


def decide(view: View, now: float, *, patience: float, not_before: float = 0.0) -> Decision:
    """What follows from a view. ``now``: when the look at the storage began, so that however long this process is held
    up between looking and acting, only a host that has really been silent is taken for dead.

    ``patience``: seconds without a new beat after which a host that cannot be reached is dead; ``not_before``: when
    this contender may open an epoch at the earliest (it has resigned, and others are to go first).
    """
    if view.epoch and not view.ended:
        if view.reach == "untried":
            return Connect()
        # A firewall may refuse in the name of a host that is alive, so a refusal alone is no proof.
        dead = view.beat_since + (patience / 2 if view.reach == "refused" else patience)
        if now < dead:
            return Wait(until=dead)
    if now < not_before:
        return Wait(until=not_before)
    return Open(epoch=view.epoch + 1)
