"""Layout: every element of every tensor lies in one place, and the work is even."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runner.checkpoint import layout
from elastic_runner.checkpoint.frames import frame
from elastic_runner.checkpoint.layout import ALIGNMENT, Piece, assign, files_of, lay_out, pieces_of
from elastic_runner.checkpoint.saver import box
from elastic_runner.errors import StateError

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128]
CUT = 256
"""Bytes of a piece in these tests."""


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = st.lists(st.integers(0, 9), max_size=3)
    made = draw(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(shapes, st.sampled_from(DTYPES))))
    return {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in made.items()}


def marked(state: dict[str, torch.Tensor], pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """How often each element is in a piece."""
    counts = {key: torch.zeros(tensor.shape, dtype=torch.int64) for key, tensor in state.items()}
    for piece in pieces:
        region = counts[piece.key]
        for dimension, (offset, length) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
            assert offset + length <= piece.shape[dimension]
            region = region.narrow(dimension, offset, length)
        region += 1
    return counts


@given(state=tensors())
@settings(max_examples=150, deadline=None)
def test_pieces_cover_each_tensor_once(state: dict[str, torch.Tensor]) -> None:
    with patch.object(layout, "PIECE_BYTES", CUT):
        pieces = pieces_of(state)
    assert {piece.key for piece in pieces} == set(state), "also those without an element"
    assert all((count == 1).all() for count in marked(state, pieces).values())
    for piece in pieces:
        tensor = state[piece.key]
        assert (piece.shape, piece.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert tuple(box(tensor, piece).shape) == piece.sizes
        rows = piece.sizes[0] if piece.sizes else 1
        assert piece.nbytes <= CUT or rows == 1


def test_a_piece_is_taken_from_its_own_rows() -> None:
    tensor = torch.arange(90.0).view(30, 3)
    with patch.object(layout, "PIECE_BYTES", CUT):
        pieces = pieces_of({"t": tensor})
    assert len(pieces) > 1
    assert torch.equal(torch.cat([box(tensor, piece) for piece in pieces]), tensor)
    # Held from row 100 on, as a shard of a larger tensor.
    shard = replace(pieces[1], shape=(200, 3), offsets=(100 + pieces[1].row, 0))
    assert torch.equal(box(tensor, shard), tensor[shard.row : shard.row + shard.sizes[0]])


@st.composite
def holdings(draw: st.DrawFn) -> list[list[Piece]]:
    """``held`` by rank, as under HSDP: shards over columns of a mesh, each held alike by a column's ranks; some tensors
    on all ranks, some on one only."""
    shards, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    held: list[list[Piece]] = [[] for _ in range(shards * replicas)]
    for number in range(draw(st.integers(0, 12))):
        rows, columns = draw(st.integers(0, 40)), draw(st.integers(1, 8))
        whole = Piece(
            key=f"t{number}", dtype=torch.float32, shape=(rows, columns), offsets=(0, 0), sizes=(rows, columns)
        )
        how = draw(st.sampled_from(["sharded", "everywhere", "alone"]))
        owner = draw(st.integers(0, len(held) - 1))
        for rank, pieces in enumerate(held):
            if how == "sharded":
                each = -(-rows // shards)
                first = min(rank % shards * each, rows)
                mine = replace(whole, offsets=(first, 0), sizes=(min(each, rows - first), columns))
                pieces += layout._cut(mine) if mine.sizes[0] else []
            elif how == "everywhere" or rank == owner:
                pieces += layout._cut(whole)
    return held


def boxes(pieces: list[Piece]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(piece.key, piece.offsets, piece.sizes) for piece in pieces]


@given(held=holdings())
@settings(max_examples=150, deadline=None)
def test_each_box_is_written_by_one_of_its_holders(held: list[list[Piece]]) -> None:
    with patch.object(layout, "PIECE_BYTES", CUT):
        given_out = assign(held)
    wanted = {box for pieces in held for box in boxes(pieces)}
    assert Counter(box for pieces in given_out for box in boxes(pieces)) == Counter(wanted)
    for mine, pieces in zip(given_out, held, strict=True):
        assert [piece for piece in pieces if piece in mine] == mine


@given(
    shapes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 8)), min_size=1, max_size=20),
    world=st.integers(1, 6),
)
@settings(max_examples=150, deadline=None)
def test_what_all_hold_is_shared_out_evenly(shapes: list[tuple[int, int]], world: int) -> None:
    """To within one piece."""
    with patch.object(layout, "PIECE_BYTES", CUT):
        pieces = pieces_of({f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    loads = [sum(piece.nbytes for piece in mine) for mine in assign([pieces] * world)]
    assert max(loads) - min(loads) <= max(piece.nbytes for piece in pieces)


@given(state=tensors(), world=st.integers(1, 4), draw=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_who_writes_what_does_not_depend_on_the_order_of_a_dict(
    state: dict[str, torch.Tensor], world: int, draw: object
) -> None:
    pieces = pieces_of(state)
    held = []
    for _ in range(world):
        mixed = list(pieces)
        draw.shuffle(mixed)  # type: ignore[attr-defined]
        held.append(mixed)
    one, other = assign([pieces] * world), assign(held)
    assert [sorted(boxes(mine)) for mine in one] == [sorted(boxes(mine)) for mine in other]
    assert assign(held) == other


@given(held=holdings(), smallest=st.integers(1, 3000))
@settings(max_examples=150, deadline=None)
def test_files_have_names_of_their_own_and_frames_do_not_overlap(held: list[list[Piece]], smallest: int) -> None:
    with patch.object(layout, "PIECE_BYTES", CUT), patch.object(layout, "FILE_BYTES", (smallest, 4 * smallest)):
        by_rank = lay_out(held)
        again = lay_out(held)
    assert by_rank == again
    names = [file.name for files in by_rank for file in files]
    assert len(names) == len(set(names))
    assert [layout.data_file(rank, 0) in names for rank in range(len(held))] == [False] * len(held)
    for rank, files in enumerate(by_rank):
        assert [p.piece for file in files for p in file.pieces] == assign(held)[rank]
        for file in files:
            assert file.name.startswith(f"__{rank}_") and file.name.endswith(".distcp")
            end = 0
            for placed in file.pieces:
                assert placed.offset % ALIGNMENT == 0
                assert end <= placed.offset < end + ALIGNMENT
                assert placed.length == frame(placed.piece.dtype, placed.piece.sizes).size
                end = placed.offset + placed.length
            assert file.size == end > 0
            assert len(file.pieces) == 1 or sum(p.piece.nbytes for p in file.pieces) <= 4 * smallest


def test_a_rank_has_a_handful_of_files_whatever_the_size() -> None:
    rows = [
        Piece(key=f"t{i}", dtype=torch.float32, shape=(4 << 20,), offsets=(0,), sizes=(4 << 20,)) for i in range(64)
    ]
    files = files_of(0, rows)  # 1 GiB
    assert layout.FILES_PER_RANK <= len(files) <= layout.FILES_PER_RANK + 2
    assert max(file.size for file in files) <= layout.FILE_BYTES[1]
    assert len(files_of(0, rows[:2])) == 2
    assert files_of(0, []) == []


def test_a_row_larger_than_a_piece_is_one_piece() -> None:
    with patch.object(layout, "PIECE_BYTES", 16):
        pieces = pieces_of({"wide": torch.zeros(3, 100), "scalar": torch.zeros((), dtype=torch.complex128)})
    assert [piece.sizes for piece in pieces] == [(1, 100)] * 3 + [()]
    assert pieces[-1].nbytes == 16


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("convert", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (torch.Tensor.to_sparse_csr, "sparse_csr"),
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["coo", "csr", "quantized"],
)
def test_what_has_no_plain_memory_is_refused_by_name(
    convert: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    with pytest.raises(StateError, match=f"^moments is a {kind} tensor"):
        pieces_of({"fine": torch.ones(1), "moments": convert(torch.eye(3))})
