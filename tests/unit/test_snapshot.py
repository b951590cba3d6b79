"""Snapshots: sealed or not there, and which of them make up a state that all ranks can get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_runner.checkpoint.layout import Piece, pieces_of
from elastic_runner.checkpoint.room import available_memory
from elastic_runner.checkpoint.snapshot import (
    DATA,
    Head,
    Known,
    Snapshot,
    SnapshotBuffer,
    Stored,
    arrange,
    discard,
    encode_index,
    map_file,
    read_snapshot,
    tensor_in,
)
from elastic_runner.checkpoint.snapshot_plan import Memory, Wish, every_for, run_identity, share_out
from elastic_runner.checkpoint.snapshot_source import Common, Found, newest_common, offers
from elastic_runner.errors import Damaged

STATE = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "flags": torch.tensor([True, False, True]),
    "half": torch.ones(5, dtype=torch.bfloat16),
}
KNOWN = {key: Known(t.dtype, tuple(t.shape), True) for key, t in STATE.items()}
HEAD = Head(run="a run", step=7, attempt=2, world_size=2, rank=1, origin=None)


@pytest.fixture
def path() -> Iterator[str]:
    handle = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{handle}"
    os.close(handle)


def write(buffer: SnapshotBuffer, head: Head = HEAD, state: dict[str, torch.Tensor] = STATE) -> None:
    stored = arrange(pieces_of(state))
    index = encode_index({key: Known(t.dtype, tuple(t.shape), True) for key, t in state.items()}, stored)
    if not buffer.is_laid_out(index):
        buffer.lay_out(stored, index)
    buffer.invalidate()
    for piece, target in buffer.targets:
        target.copy_(state[piece.key])
    buffer.seal(head, b"plain", b'{"step":7}\n')


def test_what_was_sealed_is_found_as_it_was(path: str) -> None:
    write(SnapshotBuffer(path))
    found = read_snapshot(path)
    assert found is not None
    assert (found.head, found.tensors, found.plain, found.lines) == (HEAD, KNOWN, b"plain", b'{"step":7}\n')
    view = map_file(path)
    assert {stored.piece.key for stored in found.pieces} == set(STATE)
    for stored in found.pieces:
        assert torch.equal(tensor_in(view, stored), STATE[stored.piece.key])
    assert SnapshotBuffer(path).age == (2, 7), "the next attempt knows which one is older"


def test_writing_again_takes_no_new_memory(path: str) -> None:
    buffer = SnapshotBuffer(path)
    write(buffer)
    targets, size = buffer.targets, Path(path).stat().st_size
    write(buffer, replace(HEAD, step=8))
    assert buffer.targets is targets and Path(path).stat().st_size == size
    found = read_snapshot(path)
    assert found is not None and found.head.step == 8


class Killed(BaseException):
    """Nothing after this happens."""


class CutShort:
    """os.pwrite that does so many writes, then a part of one, then nothing any more."""

    def __init__(self, writes: int, part: float) -> None:
        self.left = writes
        self._part = part
        self._pwrite = os.pwrite

    def __call__(self, file: int, data: Any, offset: int) -> int:
        if self.left == 0:
            self._pwrite(file, bytes(data)[: int(self._part * len(data))], offset)
            raise Killed
        self.left -= 1
        return self._pwrite(file, data, offset)


WRITES = 4
"""Of a snapshot into a buffer that is laid out: it does not count, what varies in length, lengths, digest."""


@pytest.mark.parametrize("part", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("writes", range(WRITES))
@pytest.mark.parametrize("fresh", [True, False])
def test_a_cut_write_never_counts(path: str, fresh: bool, writes: int, part: float) -> None:
    """Whichever write is the last one to happen, or a part of it."""
    buffer = SnapshotBuffer(path)
    if not fresh:
        write(buffer)
    changed = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    with patch.object(os, "pwrite", CutShort(writes + fresh, part)), pytest.raises(Killed):
        write(buffer, replace(HEAD, step=9), changed)
    with suppress(Damaged):
        found = read_snapshot(path)
        before_any = not fresh and (writes, part) == (0, 0.0)
        assert found is None if not before_any else found is not None and found.head == HEAD


def test_nothing_more_is_written_than_that(path: str) -> None:
    buffer = SnapshotBuffer(path)
    write(buffer)
    with patch.object(os, "pwrite", CutShort(WRITES, 0.0)) as cut:
        write(buffer, replace(HEAD, step=9))
    assert cut.left == 0


def test_every_byte_that_counts_is_looked_at(path: str) -> None:
    write(SnapshotBuffer(path))
    whole = Path(path).read_bytes()
    after_digest = range(64, DATA)
    for place in [*range(64), *range(DATA, len(whole), 7), len(whole) - 1]:
        assert place not in after_digest
        os.truncate(path, 0)
        Path(path).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with suppress(Damaged):
            assert read_snapshot(path) is None, place
    Path(path).write_bytes(whole)
    assert read_snapshot(path) is not None


@given(noise=st.binary(max_size=200), length=st.integers(0, 2 * DATA))
def test_noise_is_nothing_or_damage(noise: bytes, length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "noise"
    file.write_bytes((b"erSnap01" + noise)[:length].ljust(length, b"\0"))
    with suppress(Damaged):
        assert read_snapshot(str(file)) is None


def test_nothing_is_there_before_the_first_and_after_the_end(path: str) -> None:
    assert read_snapshot(path) is None
    write(SnapshotBuffer(path))
    discard(path)
    assert read_snapshot(path) is None and Path(path).stat().st_blocks == 0


# Which state.


def part(
    rank: int, step: int, attempt: int = 1, *, rows: Sequence[int] = (0, 1), leads: bool | None = None, world: int = 2
) -> Snapshot:
    """A rank's part of a tensor ``w`` of two rows; who leads has a buffer ``b``, too."""
    leads = rank == 0 if leads is None else leads
    tensors = {"w": Known(torch.float32, (2, 4), True)}
    held = [Piece(key="w", dtype=torch.float32, shape=(2, 4), offsets=(row, 0), sizes=(1, 4)) for row in rows]
    if leads:
        tensors["b"] = Known(torch.float32, (3,), False)
        held.append(Piece(key="b", dtype=torch.float32, shape=(3,), offsets=(0,), sizes=(3,)))
    head = Head(run="r", step=step, attempt=attempt, world_size=world, rank=rank, origin=None)
    return Snapshot(
        path=f"{rank}/{step}", head=head, tensors=tensors, pieces=tuple(arrange(held)),
        plain=b"plain" if leads else b"", lines=b"",
    )  # fmt: skip


def steps(found: Sequence[Found], newer_than: int = -1, trusted_after: int = 0) -> tuple[list[int], list[str]]:
    common, refused = newest_common(found, newer_than=newer_than, trusted_after=trusted_after)
    return [one.head.step for one in common], refused


def test_the_newest_step_that_all_hold_comes_first() -> None:
    """Rank 0 was one step ahead."""
    both = [Found("a", part(0, 6, rows=[0])), Found("a", part(1, 6, rows=[1]))]
    older = [Found("a", part(0, 5, rows=[0])), Found("a", part(1, 5, rows=[1]))]
    ahead = [Found("a", part(0, 7, rows=[0]))]
    assert steps([*ahead, *older, *both]) == ([6, 5], ["step 7 in memory is not whole: it is there of 1 of 2 ranks"])


def test_not_what_a_checkpoint_has_anyway() -> None:
    found = [Found("a", part(0, step)) for step in (5, 6, 7)]
    assert steps(found, newer_than=6) == ([7], [])
    assert steps(found, newer_than=7) == ([], [])


def test_not_what_failed_again_and_again() -> None:
    found = [Found("a", part(0, 7, 3)), Found("a", part(0, 6, 4))]
    taken, refused = steps(found, trusted_after=3)
    assert taken == [6] and "step 7 in memory: it may be what" in refused[0]


def test_who_came_last_is_right() -> None:
    """An attempt that went back to storage left steps behind it that are further on."""
    assert steps([Found("a", part(0, 50, 3)), Found("a", part(0, 21, 4))])[0] == [21, 50]


def test_attempts_are_not_mixed() -> None:
    """The same step, done twice."""
    found = [Found("a", part(0, 6, 1, rows=[0])), Found("a", part(1, 6, 2, rows=[1]))]
    assert steps(found)[0] == []


def test_replicas_survive_a_node_and_shards_do_not() -> None:
    replicas = [Found("a", part(0, 6)), Found("b", part(1, 6, leads=True))]
    shards = [Found("a", part(0, 6, rows=[0])), Found("b", part(1, 6, rows=[1], leads=True))]
    for lost in (0, 1):
        assert steps([replicas[1 - lost]])[0] == [6]
        assert steps([shards[1 - lost]]) == ([], ["step 6 in memory is not whole: it is there of 1 of 2 ranks"])
    assert steps(shards)[0] == [6]


def test_without_plain_data_nothing_is_whole() -> None:
    assert steps([Found("a", part(1, 6))])[0] == []


def test_where_ranks_may_differ_the_lowest_one_s_word_counts() -> None:
    common, _ = newest_common(
        [Found("b", part(1, 6, leads=True)), Found("a", part(0, 6))], newer_than=-1, trusted_after=0
    )
    told = offers(common, ["b", "a", "c"])
    assert [[path for path, _ in one.near] for (one,) in told] == [["1/6"], ["0/6"], []]
    assert [{s.piece.key for _, stored in one.near for s in stored} for (one,) in told] == [{"w"}, {"w", "b"}, set()]
    assert isinstance(told[0][0].common, Common) and told[1][0].common is None


# Who keeps what.


def wish(home: str, alike: list[Piece], own: list[Piece], available: int | None = None) -> Any:
    return Wish(home=home, alike=alike, own=own, allocated=0, available=available)


def pieces(**sizes: int) -> list[Piece]:
    return pieces_of({key: torch.zeros(size) for key, size in sizes.items()})


def test_replicas_are_kept_once_a_node_and_one_leads() -> None:
    held, own = pieces(x=100, y=100, z=50), pieces(buffer=3)
    shares = share_out([wish(home, held, own) for home in ("a", "b", "a", "b")])
    for ranks in ((0, 2), (1, 3)):
        kept = sorted(piece.key for rank in ranks for piece in shares[rank][0])
        assert kept == ["buffer", "x", "y", "z"]
        assert [shares[rank][1] for rank in ranks] == [True, False]
        assert all(shares[rank][0] for rank in ranks), "each has some of the work"


def test_what_has_no_room_is_said_on_all() -> None:
    held = pieces(x=1_000_000)
    shares = share_out([wish("a", held, [], 10_000_000), wish("b", held, [], 8_000_000)])
    assert {said for _, _, said in shares} == {"0.0 GB on a node that has 0.0 GB available"}
    assert {said for _, _, said in share_out([wish("a", held, [], 10_000_000)])} == {""}


@pytest.mark.parametrize(
    ("cost", "step", "every"), [(0.001, 1.0, 1), (0.05, 1.0, 1), (0.06, 1.0, 2), (1.0, 1.0, 20), (1.0, 0.0, 1)]
)
def test_snapshots_cost_no_more_than_their_share(cost: float, step: float, every: int) -> None:
    assert every_for(cost, step, 0.05) == every


def test_runs_are_told_apart() -> None:
    names = {run_identity(*r) for r in [("a", None, 0), ("b", None, 0), ("a", "c", 0), ("a", None, 1), ("a", None, 0)]}
    assert len(names) == 4


def test_memory_as_a_rank_sees_it() -> None:
    assert (Memory().mine, Memory().share) == ((), ())
    fewer = Memory(files=(("/m/0", "/m/1", "/m/2", "/m/3"),), node="n")
    assert (fewer.mine, len(fewer.share), fewer.home) == (("/m/0", "/m/1"), 4, "n /m")


# Room.


def test_the_smallest_room_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_memory(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(proc, groups) == 8000 * 1024
    (proc / "self/cgroup").write_text("0::/job/step\n")
    for name, limit, used in (("job", "5000000", 1_000_000), ("job/step", "max", 1)):
        (groups / name).mkdir(parents=True)
        (groups / name / "memory.max").write_text(f"{limit}\n")
        (groups / name / "memory.current").write_text(f"{used}\n")
        (groups / name / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert available_memory(proc, groups) == 4_500_000
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    (groups / "memory/job").mkdir(parents=True)
    (groups / "memory/job/memory.limit_in_bytes").write_text("3000000\n")
    (groups / "memory/job/memory.usage_in_bytes").write_text("2999999\n")
    (groups / "memory/job/memory.stat").write_text("total_inactive_file 9\n")
    assert available_memory(proc, groups) == 10


def test_this_machine_has_room() -> None:
    found = available_memory()
    assert found is not None and found > 1 << 20


def test_pieces_do_not_meet() -> None:
    stored = arrange(pieces_of(STATE))
    ends = [0, *(Stored(piece, offset).offset + piece.nbytes for piece, offset in stored)]
    assert all(offset >= end and offset % 64 == 0 for end, (_, offset) in zip(ends, stored, strict=False))
