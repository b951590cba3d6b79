"""What can be restored from memory: which state all ranks can get, and where each rank gets its part from."""

from __future__ import annotations

import io
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from elastic_runner.checkpoint.archive import load_plain
from elastic_runner.checkpoint.layout import DataFile, Placed
from elastic_runner.checkpoint.metadata import make_metadata
from elastic_runner.checkpoint.plain import check_plain
from elastic_runner.checkpoint.snapshot import Head, Snapshot, Stored, map_file, tensor_in
from elastic_runner.checkpoint.source import place
from elastic_runner.coordination import Coordinator

log = logging.getLogger(__name__)


class BoxName(NamedTuple):
    """A box of a tensor; those of one layout never overlap."""

    key: str
    """The tensor."""
    offsets: tuple[int, ...]
    """Where it begins."""


class Found(NamedTuple):
    """A snapshot of this run and who can map it."""

    home: str
    """What ranks that see the same memory have in common."""
    snapshot: Snapshot
    """What was found."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """A state that is there as a whole, by its snapshots."""

    lead: Found
    """The one whose word counts where ranks may differ: plain data, buffers, what is not the model's."""
    found: tuple[Found, ...]
    """All of them, by rank."""

    @property
    def head(self) -> Head:
        """Which state it is."""
        return self.lead.snapshot.head

    def usable(self, found: Found) -> list[Stored]:
        """The pieces of ``found`` that may be used: none of another's word."""
        tensors = self.lead.snapshot.tensors
        return [s for s in found.snapshot.pieces if found.home == self.lead.home or tensors[s.piece.key].alike]


def newest_common(found: Iterable[Found], *, newer_than: int, trusted_after: int) -> tuple[list[Common], list[str]]:
    """States that are whole, newest first, and why others that might have been are not used, in words. Pure.

    ``newer_than``: the step of the newest healthy checkpoint, -1 without one. ``trusted_after``: what attempts up to
    this number left behind is not used.

    Newest is who came last: an attempt that went back to storage is right against steps that were ahead of it.
    """
    states: dict[tuple[int, int], list[Found]] = defaultdict(list)
    for one in found:
        states[one.snapshot.head.attempt, one.snapshot.head.step].append(one)
    whole, refused = [], []
    for (attempt, step), parts in sorted(states.items(), reverse=True):
        parts.sort(key=lambda one: one.snapshot.head.rank)
        if step <= newer_than:
            continue
        if attempt <= trusted_after:
            refused.append(f"step {step} in memory: it may be what the attempts before failed of")
            continue
        lead = next((one for one in parts if one.snapshot.plain), None)
        common = None if lead is None else Common(lead=lead, found=tuple(parts))
        if common is not None and _is_whole(common):
            whole.append(common)
        else:
            ranks, world = len({one.snapshot.head.rank for one in parts}), parts[0].snapshot.head.world_size
            refused.append(f"step {step} in memory is not whole: it is there of {ranks} of {world} ranks")
    return whole, refused


def _is_whole(common: Common) -> bool:
    volumes: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for one in common.found:
        if not {piece.key for piece, _ in one.snapshot.pieces} <= set(common.lead.snapshot.tensors):
            return False
        for piece, _ in common.usable(one):
            volumes[piece.key][piece.offsets] = math.prod(piece.sizes)
    return all(
        sum(volumes[key].values()) == math.prod(known.shape) for key, known in common.lead.snapshot.tensors.items()
    )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A common state, as one rank is told of it."""

    head: Head
    """Which state it is."""
    lines: bytes
    """Ledger lines that came with it."""
    near: tuple[tuple[str, tuple[Stored, ...]], ...]
    """What this rank can map: paths, with the pieces to use of each."""
    common: Common | None
    """All of it, on global rank 0 only."""


def offers(common: Sequence[Common], homes: Sequence[str]) -> list[list[Offer]]:
    """What each rank is told; ``homes`` by rank. Pure."""
    return [[_offer(one, home, whole=rank == 0) for one in common] for rank, home in enumerate(homes)]


def _offer(common: Common, home: str, *, whole: bool) -> Offer:
    near = tuple((f.snapshot.path, tuple(common.usable(f))) for f in common.found if f.home == home)
    return Offer(head=common.head, lines=common.lead.snapshot.lines, near=near, common=common if whole else None)


class SnapshotSource:
    """Satisfies ``source.Source``. Digests were compared when the memory was looked into.

    A rank maps what its own node has; what a node lacks comes from the lowest rank that has it, piece by piece.
    """

    def __init__(self, offer: Offer, coordinator: Coordinator) -> None:
        self._offer = offer
        self._coordinator = coordinator
        self._near: dict[BoxName, torch.Tensor] = {}

    def head(self) -> tuple[Metadata, dict[str, Any]]:
        """What is in it, and the plain data; on rank 0."""
        common, where = self._offer.common, f"step {self._offer.head.step} in memory"
        assert common is not None, "only rank 0 is told all of it"
        boxes: dict[BoxName, Placed] = {}
        for one in common.found:
            for piece, offset in common.usable(one):
                boxes.setdefault(BoxName(piece.key, piece.offsets), Placed(piece=piece, offset=offset))
        metadata = make_metadata([DataFile(name=where, size=0, pieces=tuple(boxes.values()))], {})
        plain = load_plain(io.BytesIO(common.lead.snapshot.plain), where)
        check_plain(plain, metadata.state_dict_metadata, where)
        return metadata, plain

    def read(self, items: Sequence[ReadItem], metadata: Metadata, planner: LoadPlanner) -> None:
        """Copy what is near, then send around what some node lacks."""
        wanted: dict[BoxName, list[ReadItem]] = defaultdict(list)
        for item in items:
            wanted[_box(item, metadata)].append(item)
        label = "restore from memory"
        lacking = self._coordinator.agree(f"{label}: copy", lambda: self._copy(wanted, planner))
        boxes = sorted({box for of_rank in lacking for box in of_rank})
        if not boxes:
            return
        givers = self._coordinator.gather(f"{label}: who has what", [box in self._near for box in boxes])
        for number, box in enumerate(boxes):
            giver = next(rank for rank, has in enumerate(givers) if has[number])
            tensor = self._near[box].clone() if giver == self._coordinator.rank else _empty(box, metadata)
            self._coordinator.broadcast(f"{label}: send", tensor.view(-1).view(torch.uint8), giver)
            for item in wanted[box] if box not in self._near else ():
                place(planner, item, tensor)
        self._coordinator.gather(f"{label}: sent", None)

    def _copy(self, wanted: dict[BoxName, list[ReadItem]], planner: LoadPlanner) -> list[BoxName]:
        """Take what is near; what else this rank needs."""
        for path, pieces in self._offer.near:
            view = map_file(path)
            for stored in pieces:
                self._near.setdefault(BoxName(stored.piece.key, stored.piece.offsets), tensor_in(view, stored))
        for box in [box for box in wanted if box in self._near]:
            for item in wanted[box]:
                place(planner, item, self._near[box])
        return [box for box in wanted if box not in self._near]

    def close(self) -> None:
        """Let go of the memory."""
        self._near = {}


def _box(item: ReadItem, metadata: Metadata) -> BoxName:
    index = item.storage_index
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata) and index.index is not None, "the planner asks for chunks"
    return BoxName(index.fqn, tuple(entry.chunks[index.index].offsets))


def _empty(box: BoxName, metadata: Metadata) -> torch.Tensor:
    entry = metadata.state_dict_metadata[box.key]
    assert isinstance(entry, TensorStorageMetadata)
    chunk = next(chunk for chunk in entry.chunks if tuple(chunk.offsets) == box.offsets)
    return torch.empty(chunk.sizes, dtype=entry.properties.dtype)
