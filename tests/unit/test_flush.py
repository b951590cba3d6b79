"""What is flushed when a launcher gives up, by whom, and that it is there whole or not at all."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from elastic_runner import paths
from elastic_runner.chaos.crash_points import check_crash_points
from elastic_runner.checkpoint.layout import Piece, pieces_of
from elastic_runner.checkpoint.manifest import Checkpoint, Manifest, encode, list_checkpoints
from elastic_runner.checkpoint.marks import Marks
from elastic_runner.checkpoint.snapshot import Head, Keep, Known, Snapshot, SnapshotBuffer, arrange, encode_index
from elastic_runner.checkpoint.snapshot_source import Found
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.checkpoint.tools.overview import damage
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.errors import Fenced
from elastic_runner.history import End
from elastic_runner.storage import LocalStorage, Storage
from elastic_runner.verdict import RunPlace
from elastic_runner.worker import flush as module
from elastic_runner.worker.attempt import attempts, begin_attempt, check_fence
from elastic_runner.worker.flush import choose, flush
from tests.unit.test_record import line

W, COUNT = "model.weight", "optimizer.state.weight.step"
STATE = {W: torch.arange(12.0).view(6, 2), COUNT: torch.tensor(5.0)}
PLAIN = {
    "model.aliases": {},
    "model.plain": {},
    "optimizer.plain": {},
    "optimizer.param_groups": [{"params": ["weight"], "lr": 0.1}],
}
HALVES = [Piece(key=W, dtype=torch.float32, shape=(6, 2), offsets=(first, 0), sizes=(3, 2), row=0) for first in (0, 3)]
COMMITTED = 3
"""Step of the checkpoint that is there."""


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"event": "step", "attempt": 1, **line(step)}).encode() + b"\n" for step in steps)


def keep_in(run: str) -> Keep:
    return Keep(run=run, url=f"{run}/checkpoints", options={}, seconds=10, demote_after=2)


def packed() -> bytes:
    archive = io.BytesIO()
    torch.save(PLAIN, archive)
    return archive.getvalue()


def seal(path: str, head: Head, pieces: Sequence[Piece], *, leads: bool, state: dict[str, torch.Tensor]) -> None:
    stored = arrange(pieces)
    known = {key: Known(tensor.dtype, tuple(tensor.shape), True) for key, tensor in STATE.items()}
    buffer = SnapshotBuffer(path)
    buffer.lay_out(stored, encode_index(known, stored))
    for piece, target in buffer.targets:
        whole = state[piece.key]
        target.copy_(whole[piece.offsets[0] :][: piece.sizes[0]] if whole.dim() else whole)
    buffer.seal(head, packed() if leads else b"", lines(4, 5))
    buffer.close()


class Node:
    """Memory of two ranks of a sharded model, each with its half, that a run of attempt 1 has left at step 5."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.handles = [os.memfd_create("test") for _ in range(2)]
        self.files = [f"/proc/{os.getpid()}/fd/{handle}" for handle in self.handles]
        self.place = RunPlace(url=str(run), options={}, attempt=1)
        for rank in range(2):
            self.seal(rank)

    def seal(self, local: int, state: dict[str, torch.Tensor] = STATE, **changes: Any) -> None:
        head = Head(run="r", step=5, attempt=1, world_size=2, rank=local, origin=None, keep=keep_in(str(self.run)))
        mine = [HALVES[local], *(piece for piece in pieces_of(STATE) if piece.key == COUNT and local == 0)]
        seal(self.files[local], replace(head, **changes), mine, leads=local == 0, state=state)

    def flush(self) -> str:
        return flush(self.place, self.files)


def prepare(run: Path) -> LocalStorage:
    """A run of one attempt with 4 of its steps on record, and a checkpoint of step 3."""
    storage = LocalStorage(run)
    begin_attempt(storage, {})
    start = {"event": "start", "attempt": 1, "resumed_at": 0}
    storage.put(paths.ledger_segment(1, 0), json.dumps(start).encode() + b"\n" + lines(1, 2, 3, 4))
    manifest = Manifest(step=COMMITTED, attempt=1, world_size=2, format="sharded", files=())
    storage.create(f"{paths.CHECKPOINTS}/{manifest.path}", encode(manifest))
    return storage


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    prepare(tmp_path)
    node = Node(tmp_path)
    yield node
    for handle in node.handles:
        os.close(handle)


def committed(node: Node) -> list[int]:
    return [m.step for m in list_checkpoints(LocalStorage(node.run / paths.CHECKPOINTS)).manifests]


def on_record(storage: Storage) -> list[int]:
    return [r["step"] for r in effective(read_records(storage))[0] if r["event"] == "step"]


def test_what_was_in_memory_is_a_checkpoint_with_its_ledger(node: Node) -> None:
    assert node.flush().startswith("step 5, which was in memory only, is saved (")
    storage = LocalStorage(node.run / paths.CHECKPOINTS)
    manifest = list_checkpoints(storage).manifests[0]
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.non_finite) == (5, 2, 2, ())
    assert damage(storage, manifest, digests=True) == ""
    with opened(f"{node.run}/checkpoints", {}) as found:
        assert found.contents.plain == PLAIN
        assert {key: found.contents.rows(key, 0, 6 if key == W else 1).tolist() for key in STATE} == {
            W: STATE[W].tolist(), COUNT: [5.0]
        }  # fmt: skip
    run = LocalStorage(node.run)
    assert on_record(run) == [1, 2, 3, 4, 5]
    (start,) = [r for r in read_records(run) if r["event"] == "start" and r["attempt"] == 2]
    assert (start["resumed_at"], start["rests_on"]) == (5, 1)
    assert attempts(LocalStorage(node.run)) == [1, 2], "what still runs of attempt 1 commits nothing more"


def test_a_state_that_is_not_finite_is_marked(node: Node) -> None:
    node.seal(1, state={**STATE, W: torch.full((6, 2), torch.nan)})
    assert "NaN or infinity in model.weight" in node.flush()


def test_shards_of_other_nodes_are_missed(node: Node) -> None:
    node.files = node.files[:1]
    assert node.flush() == "what is in memory is not saved: step 5 in memory is not whole: it is there of 1 of 2 ranks"
    assert committed(node) == [COMMITTED] and attempts(LocalStorage(node.run)) == [1]


def test_damage_is_said(node: Node) -> None:
    os.pwrite(node.handles[1], b"\1", 4096 + 3)
    assert "has other bytes than were sealed" in node.flush()
    assert committed(node) == [COMMITTED]


def test_a_node_without_rank_0_leaves_it_to_the_one_with_it(node: Node) -> None:
    for rank in range(2):
        node.seal(rank, rank=rank + 2, world_size=4)
    assert node.flush() == "" and committed(node) == [COMMITTED]


def test_another_run_s_memory_is_not_saved(node: Node) -> None:
    for rank in range(2):
        node.seal(rank, keep=keep_in("elsewhere"))
    assert node.flush() == "" and committed(node) == [COMMITTED]


def test_a_newer_attempt_s_word_stands(node: Node) -> None:
    begin_attempt(LocalStorage(node.run), {})
    with pytest.raises(Fenced, match="attempt 2 has taken over"):
        node.flush()
    assert committed(node) == [COMMITTED] and on_record(LocalStorage(node.run)) == [1, 2, 3, 4]


@pytest.mark.parametrize("before", [1, 2, 3], ids=["ledger", "manifest", "end"])
def test_an_attempt_that_begins_meanwhile_is_noticed(before: int, node: Node) -> None:
    """Nothing is committed. Lines that are on record by then are of steps that it has from memory, or does again."""
    run, looks = LocalStorage(node.run), 0

    def look(storage: Storage, attempt: int) -> None:
        nonlocal looks
        looks += 1
        if looks == before:
            begin_attempt(run, {})
        check_fence(storage, attempt)

    with patch.object(module, "check_fence", look), pytest.raises(Fenced, match="attempt 3 has taken over"):
        node.flush()
    assert committed(node) == [COMMITTED]
    assert on_record(run) == ([1, 2, 3, 4] if before == 1 else [1, 2, 3, 4, 5])
    assert run.list(f"{paths.CHECKPOINTS}/{paths.step_directory(5)}") == []


class Below:
    """A storage within another one."""

    def __init__(self, inner: Storage, below: str) -> None:
        self.url, self._inner, self._below = f"{inner.url}/{below}", inner, below

    def __getattr__(self, name: str) -> Any:
        return lambda path, *rest: getattr(self._inner, name)(f"{self._below}/{path}".rstrip("/"), *rest)


def test_whatever_fails_while_it_is_flushed(tmp_path: Path) -> None:
    """The checkpoint is there with its steps on record, or not at all; either way no line is there twice."""
    runs = iter(range(10000))
    nodes: list[Node] = []

    def fresh() -> Storage:
        run = tmp_path / str(next(runs))
        nodes.append(Node(run))
        return prepare(run)

    def save(storage: Storage) -> None:
        place = replace(nodes[-1].place, attempt=max(attempts(storage)))

        def open_it(url: str, *_: Any) -> Any:
            return Below(storage, paths.CHECKPOINTS) if url.endswith(paths.CHECKPOINTS) else storage

        with patch.object(module, "open_storage", open_it):
            flush(place, nodes[-1].files)

    def restore(storage: Storage) -> tuple[int, list[int]]:
        checkpoints = Below(storage, paths.CHECKPOINTS)
        newest = list_checkpoints(checkpoints).manifests[0]
        assert damage(checkpoints, newest, digests=True) == ""
        return newest.step, [step for step in on_record(storage) if step <= newest.step]

    tried = check_crash_points(fresh, save, restore, old=(3, [1, 2, 3]), new=(5, [1, 2, 3, 4, 5]))
    assert len(tried) >= 10, tried
    for node in nodes:
        for handle in node.handles:
            os.close(handle)


def found(step: int, attempt: int) -> Found:
    head = Head(run="r", step=step, attempt=attempt, world_size=1, rank=0, origin=None)
    tensors = {W: Known(torch.float32, (6, 2), True)}
    whole = tuple(arrange(piece for piece in pieces_of(STATE) if piece.key == W))
    return Found("here", Snapshot(path="", head=head, tensors=tensors, pieces=whole, plain=b"x", lines=b""))


def checkpoint(step: int, *, suspect: bool = False, non_finite: tuple[str, ...] = ()) -> Checkpoint:
    manifest = Manifest(step=step, attempt=1, world_size=1, format="sharded", files=(), non_finite=non_finite)
    return Checkpoint(manifest=manifest, marks=Marks(suspicions=("why",) if suspect else ()))


def end(attempt: int, kind: str, step: int = 6) -> End:
    return End(attempt=attempt, kind=kind, step=step, restored=None)


@pytest.mark.parametrize(
    ("ends", "known", "chosen"),
    [
        ([], [], 5),
        ([], [checkpoint(4)], 5),
        ([], [checkpoint(5)], None),
        ([], [checkpoint(5, suspect=True), checkpoint(6, non_finite=("a",)), checkpoint(4)], 5),
        ([end(3, "SIGKILL")] * 5, [], 5),
        ([end(2, "ZeroDivisionError")], [], 5),
        ([end(2, "ZeroDivisionError"), end(3, "ZeroDivisionError")], [], None),
        ([end(2, "ZeroDivisionError"), end(3, "SIGKILL")], [], 5),
        ([end(2, "NonFiniteError")], [], None),
        ([end(2, "ReplayDiverged")], [], None),
        ([end(2, "ReplicasDiffer")], [], None),
        ([end(1, "NonFiniteError")], [], 5),
    ],
)
def test_what_the_next_attempt_would_go_on_from(ends: list[End], known: list[Checkpoint], chosen: int | None) -> None:
    """In memory is step 5 of attempt 2."""
    state, _ = choose([found(4, 2), found(5, 2)], ends, known, demote_after=2)
    assert (state.head.step if state else None) == chosen
