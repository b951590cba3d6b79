"""Layout of a sharded checkpoint: which rank writes which piece of which tensor, and where in which file. Pure.

What several ranks hold alike (DDP replicas, HSDP groups) is written once, by one of them, the work spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from elastic_runner.checkpoint.frames import ALIGNMENT, frame
from elastic_runner.errors import StateError

PIECE_BYTES = 16 << 20
"""A tensor is cut by rows into pieces of at most this much, so that they spread evenly over ranks and files."""
FILES_PER_RANK = 8
"""A reader works on one file while the next one comes in."""
FILE_BYTES = (16 << 20, 256 << 20)
"""Smallest and largest size that a rank's files are cut to."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one tensor."""

    key: str
    """The tensor."""
    dtype: torch.dtype
    """Its type."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    sizes: tuple[int, ...]
    """The box's own shape."""
    row: int = 0
    """Where it begins in what its rank holds of the tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A piece and where its frame lies in a file."""

    piece: Piece
    """What."""
    offset: int
    """Bytes from the file's beginning."""

    @property
    def length(self) -> int:
        """Bytes of the frame."""
        return frame(self.piece.dtype, self.piece.sizes).size


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of one rank."""

    name: str
    """Its name, as DCP's own writer would choose it."""
    size: int
    """Bytes."""
    pieces: tuple[Placed, ...]
    """What lies in it, in order."""


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """What this rank holds, cut into pieces. Raises StateError for a tensor that has no plain strided memory."""
    require_dense(tensors)
    result: list[Piece] = []
    for key, tensor in tensors.items():
        for offsets, sizes in _boxes(key, tensor):
            whole = Piece(key=key, dtype=tensor.dtype, shape=tuple(tensor.shape), offsets=offsets, sizes=sizes)
            result.extend(_cut(whole))
    return result


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError for a tensor that has no plain strided memory."""
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise StateError(f"{key} is a {kind} tensor; a checkpoint holds dense ones. Convert it in state_dict.")


def _boxes(key: str, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of what this rank holds of a tensor: all of it, or its shard of a DTensor."""
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    items = create_default_local_save_plan({key: tensor}, False).items
    chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def _cut(piece: Piece) -> Iterator[Piece]:
    if piece.nbytes <= PIECE_BYTES:
        yield piece
        return
    rows = max(1, piece.sizes[0] * PIECE_BYTES // piece.nbytes)
    for row in range(0, piece.sizes[0], rows):
        yield replace(
            piece,
            offsets=(piece.offsets[0] + row, *piece.offsets[1:]),
            sizes=(min(rows, piece.sizes[0] - row), *piece.sizes[1:]),
            row=row,
        )


def assign(held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Give each piece to one of the ranks that hold it (``held`` by rank), the bytes spread evenly."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders.setdefault((piece.key, piece.offsets, piece.sizes), []).append(rank)
    load = [0] * len(held)
    chosen: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    sizes = {(p.key, p.offsets, p.sizes): p.nbytes for pieces in held for p in pieces}
    # Those without a choice first, then the largest first, each to whoever has least: close to even, and the same
    # on every run.
    for box in sorted(holders, key=lambda box: (len(holders[box]) > 1, -sizes[box], box)):
        rank = min(holders[box], key=lambda rank: (load[rank], rank))
        chosen[box] = rank
        load[rank] += sizes[box]
    return [
        [piece for piece in pieces if chosen[piece.key, piece.offsets, piece.sizes] == rank]
        for rank, pieces in enumerate(held)
    ]


def files_of(rank: int, pieces: Sequence[Piece]) -> list[DataFile]:
    """Lay a rank's pieces out in files. Number 0 is left to plain data."""
    total = sum(frame(piece.dtype, piece.sizes).size for piece in pieces)
    target = min(max(total // FILES_PER_RANK, FILE_BYTES[0]), FILE_BYTES[1])
    files: list[DataFile] = []
    placed: list[Placed] = []
    end = 0
    for piece in pieces:
        if placed and end + piece.nbytes > target:
            files.append(DataFile(name=data_file(rank, len(files) + 1), size=end, pieces=tuple(placed)))
            placed, end = [], 0
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        placed.append(Placed(piece=piece, offset=offset))
        end = offset + placed[-1].length
    if placed:
        files.append(DataFile(name=data_file(rank, len(files) + 1), size=end, pieces=tuple(placed)))
    return files


def data_file(rank: int, number: int) -> str:
    """The name of a rank's file."""
    return f"__{rank}_{number}.distcp"


def lay_out(held: Sequence[Sequence[Piece]]) -> list[list[DataFile]]:
    """The files of every rank, from what each holds."""
    return [files_of(rank, pieces) for rank, pieces in enumerate(assign(held))]
