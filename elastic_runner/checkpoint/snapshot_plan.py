"""Who keeps what of a state in memory, where, and how often. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from elastic_runner.checkpoint.layout import Piece, assign
from elastic_runner.checkpoint.snapshot import arrange, end_of

ROOM_KEPT = 0.1
"""Of the memory that is available, this part is left alone."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one node, as one of its ranks sees it."""

    files: tuple[tuple[str, ...], ...] = ()
    """Files by local rank, two at least for each; none: there is no such memory."""
    local_rank: int = 0
    """This rank among them."""
    node: str = ""
    """What ranks that see each other's memory have in common."""

    @property
    def home(self) -> str:
        """Node and agent: two agents on one machine come and go by themselves."""
        return f"{self.node} {Path(self.files[0][0]).parent}" if self.files else f"{self.node} {self.local_rank}"

    @property
    def mine(self) -> tuple[str, ...]:
        """The two that this rank writes."""
        return self.files[self.local_rank][:2] if self.files else ()

    @property
    def share(self) -> tuple[str, ...]:
        """Of all files of the node, those that this rank looks after: more than two where there were more ranks."""
        return self.files[self.local_rank] if self.files else ()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a rank has to keep, and the room there is for it."""

    home: str
    """``Memory.home``."""
    alike: list[Piece]
    """What it holds, and other holders hold the same."""
    own: list[Piece]
    """What is this rank's word."""
    allocated: int
    """Bytes that its files take up already."""
    available: int | None
    """Bytes that its node has left; None: unknown."""
    trouble: str = ""
    """Why it can keep nothing, if so."""


class Share(NamedTuple):
    """What one rank is to do."""

    pieces: list[Piece]
    """What it keeps."""
    leads: bool
    """Whether it also keeps what is one rank's word, for its home."""
    refused: str
    """Why nothing is kept at all, alike on every rank; empty: it is."""


def share_out(wishes: Sequence[Wish]) -> list[Share]:
    """What each rank keeps: its part of what the ranks of a home hold alike; the lowest one also what may differ."""
    kept: dict[int, tuple[list[Piece], bool]] = {}
    refused = next((wish.trouble for wish in wishes if wish.trouble), "")
    for home in dict.fromkeys(wish.home for wish in wishes):
        ranks = [rank for rank, wish in enumerate(wishes) if wish.home == home]
        for rank, pieces in zip(ranks, assign([wishes[rank].alike for rank in ranks]), strict=True):
            leads = rank == ranks[0]
            kept[rank] = ([*pieces, *wishes[rank].own] if leads else pieces), leads
        room = [available for rank in ranks if (available := wishes[rank].available) is not None]
        needed = sum(2 * end_of(arrange(kept[rank][0])) for rank in ranks)
        more = needed - sum(wishes[rank].allocated for rank in ranks)
        if room and more > (1 - ROOM_KEPT) * min(room) and not refused:
            refused = f"{needed / 1e9:.1f} GB on a node that has {min(room) / 1e9:.1f} GB available"
    return [Share(*kept[rank], refused) for rank in range(len(wishes))]


def every_for(cost: float, step: float, share: float) -> int:
    """Steps from one snapshot to the next, so that they cost at most ``share`` of the time; both in seconds."""
    return max(1, math.ceil(cost / (share * step))) if step > 0 else 1


def run_identity(run_url: str, checkpoint_url: str | None, seed: int) -> str:
    """What tells a run from others that may have used the same memory."""
    return xxhash.xxh3_128_hexdigest(f"{run_url}\0{checkpoint_url}\0{seed}".encode())
