"""Two states compared: whatever lies how in which files, only what the state is counts."""

from __future__ import annotations

import json
import math
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runner.checkpoint.frames import frame
from elastic_runner.checkpoint.full import whole_state
from elastic_runner.checkpoint.layout import DataFile, Piece, Placed
from elastic_runner.checkpoint.metadata import make_metadata
from elastic_runner.checkpoint.tools.contents import Contents, bands, open_full, sharded_contents
from elastic_runner.checkpoint.tools.description import as_json, by_field, describe
from elastic_runner.checkpoint.tools.difference import ABSENT, Difference, compare
from elastic_runner.checkpoint.tools.difference import as_json as difference_as_json
from elastic_runner.checkpoint.tools.opening import opened
from elastic_runner.checkpoint.tools.written import raw
from elastic_runner.storage import LocalStorage, open_storage
from tests.support.checkpointing import CheckpointingPlace, Keeper, Net, checkpointer, make_state, train

PLAIN = {"model.aliases": {}, "model.plain": {}}


def full(tmp_path: Path, tensors: dict[str, torch.Tensor], plain: dict[str, Any] | None = None) -> Contents:
    """Contents of a full file."""
    name = f"{len(list(tmp_path.iterdir()))}.pt"
    torch.save(whole_state(tensors, {**PLAIN, **(plain or {})}), tmp_path / name)
    return open_full(open_storage(str(tmp_path)), name)


def in_boxes(tmp_path: Path, key: str, whole: torch.Tensor, cuts: list[list[int]]) -> Contents:
    """Contents of a directory in DCP layout in which ``whole`` lies in boxes between ``cuts`` of each dimension."""
    directory = f"boxes{len(list(tmp_path.iterdir()))}"
    (tmp_path / directory).mkdir()
    placed: list[Placed] = []
    data = bytearray()
    spans = [list(pairwise(c)) for c in cuts]
    for combination in torch.cartesian_prod(*(torch.arange(len(s)) for s in spans)).reshape(-1, len(spans)).tolist():
        chosen = [span[i] for span, i in zip(spans, combination, strict=True)]
        part = whole[tuple(slice(a, b) for a, b in chosen)].contiguous()
        sizes, offsets = tuple(part.shape), tuple(a for a, _ in chosen)
        piece = Piece(key=key, dtype=whole.dtype, shape=tuple(whole.shape), offsets=offsets, sizes=sizes)
        placed.append(Placed(piece=piece, offset=len(data)))
        made = frame(whole.dtype, sizes)
        data += made.head + bytes(raw(part)) + made.tail
    (tmp_path / directory / "__0_1.distcp").write_bytes(data)
    metadata = make_metadata([DataFile(name="__0_1.distcp", size=len(data), pieces=tuple(placed))], {})
    (tmp_path / directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return sharded_contents(open_storage(str(tmp_path)), directory, metadata, PLAIN)


CUTS: list[list[list[int]]] = [
    [[0, 100], [0, 30]],
    [[0, 33, 66, 100], [0, 30]],
    [[0, 50, 100], [0, 30]],
    [[0, 100], [0, 7, 30]],
    [[0, 1, 99, 100], [0, 10, 20, 30]],
]


@pytest.mark.parametrize("one", CUTS)
@pytest.mark.parametrize("limit", [64, 1 << 20])
def test_boxes_do_not_matter(one: list[list[int]], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_runner.checkpoint.tools.difference._BAND_BYTES", limit)
    monkeypatch.setattr("elastic_runner.checkpoint.tools.stored.BLOCK", 16)  # so that archives are read in parts
    whole = torch.randn(100, 30)
    a = in_boxes(tmp_path, "model.w", whole, one)
    assert b"".join(bytes(raw(band)) for band in a.bands("model.w", limit)) == bytes(raw(whole))
    for other in CUTS:
        assert compare(a, in_boxes(tmp_path, "model.w", whole, other)).same
    assert compare(a, full(tmp_path, {"model.w": whole})).same
    changed = whole.clone()
    changed[99, 29] += 1
    found = compare(a, full(tmp_path, {"model.w": changed})).tensors[0]
    assert (found.elements, found.of) == (1, 3000)
    assert found.max_abs == pytest.approx(1, rel=1e-5)


def test_bands_stay_within_boxes_and_the_limit(tmp_path: Path) -> None:
    entry = in_boxes(tmp_path, "model.w", torch.randn(100, 30), CUTS[1]).tensors["model.w"]
    assert list(bands(entry)) == [(0, 33), (33, 66), (66, 100)]
    assert max(stop - start for start, stop in bands(entry, limit=1200)) == 10


def difference(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> Difference:
    return compare(full(tmp_path, a), full(tmp_path, b))


def test_names_shapes_and_types(tmp_path: Path) -> None:
    found = difference(
        tmp_path,
        {"model.a": torch.ones(2), "model.s": torch.ones(2, 3), "model.t": torch.ones(2), "model.same": torch.ones(1)},
        {"model.b": torch.ones(2), "model.s": torch.ones(3, 2), "model.t": torch.ones(2).half(),
         "model.same": torch.ones(1)},
    )  # fmt: skip
    assert (found.only_a, found.only_b, found.equal, found.same) == (("model.a",), ("model.b",), 1, False)
    assert [(t.key, t.what) for t in found.tensors] == [("model.s", "shape"), ("model.t", "dtype")]
    assert found.tensors[1].a == "float32 [2]" and found.tensors[1].b == "float16 [2]"


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "elements", "max_abs", "max_rel", "nans"),
    [
        ([1.0, 2.0], [1.0, 2.5], 1, 0.5, 0.2, (0, 0)),
        ([1.0, NAN], [1.0, 1.0], 1, 0.0, 0.0, (1, 0)),
        ([NAN, NAN], [NAN, 1.0], 1, None, None, (2, 1)),
        ([0.0], [-0.0], 1, 0.0, 0.0, (0, 0)),
        ([INF, 1.0], [INF, 3.0], 1, 2.0, 2 / 3, (0, 0)),
        ([INF], [-INF], 1, INF, 1.0, (0, 0)),
    ],
)
def test_numbers(
    a: list[float], b: list[float], elements: int, max_abs: Any, max_rel: Any, nans: Any, tmp_path: Path
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        found = difference(
            tmp_path, {"model.w": torch.tensor(a, dtype=dtype)}, {"model.w": torch.tensor(b, dtype=dtype)}
        ).tensors[0]
        assert (found.elements, found.nan_a, found.nan_b) == (elements, *nans)
        if not dtype.is_complex:
            assert found.max_abs == (pytest.approx(max_abs) if max_abs is not None else None)
            assert found.max_rel == (pytest.approx(max_rel) if max_rel is not None else None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int8, torch.uint16, torch.bool, torch.float8_e5m2])
def test_numbers_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = torch.tensor([0, 1, 1], dtype=torch.int64).to(dtype), torch.tensor([0, 0, 1], dtype=torch.int64).to(dtype)
    found = difference(tmp_path, {"model.w": a}, {"model.w": b}).tensors[0]
    assert (found.elements, found.max_abs, found.max_rel) == (1, 1, 1)


def test_large_integers_are_exact(tmp_path: Path) -> None:
    a, b = torch.tensor([2**62]), torch.tensor([2**62 + 1])
    assert difference(tmp_path, {"model.w": a}, {"model.w": b}).tensors[0].max_abs == 1


def test_json_has_no_infinity(tmp_path: Path) -> None:
    found = difference(tmp_path, {"model.w": torch.tensor([INF, NAN])}, {"model.w": torch.tensor([1.0, 1.0])})
    told = json.loads(json.dumps(difference_as_json(found), allow_nan=False))
    assert (told["same"], told["tensors"][0]["max_abs"], told["tensors"][0]["nan_a"]) == (False, "inf", 1)


def test_the_same_nan_is_no_difference(tmp_path: Path) -> None:
    assert difference(tmp_path, {"model.w": torch.tensor([NAN])}, {"model.w": torch.tensor([NAN])}).same


def test_plain_data(tmp_path: Path) -> None:
    tensors = {"model.w": torch.ones(1)}
    one = {
        "state.data": {"position": 1, "gone": 2, "nan": NAN, "set": {1, 2, "x"}},
        "optimizer.param_groups": [{"lr": 1, "params": []}],
        "optimizer.plain": {},
    }
    other = {
        "state.data": {"position": 3, "new": (1,), "nan": NAN, "set": {"x", 2, 1}},
        "optimizer.param_groups": [{"lr": 1.0, "params": []}],
        "optimizer.plain": {},
    }
    found = compare(full(tmp_path, tensors, one), full(tmp_path, tensors, other))
    assert {(p.path, str(p.a), str(p.b)) for p in found.plain} == {
        ("state.data.position", "1", "3"),
        ("state.data.gone", "2", ABSENT),
        ("state.data.new", ABSENT, "{'$': 'tuple', 'v': [1]}"),
        # A whole number and a real one: it matters where a learning rate is read again.
        ("optimizer.param_groups.0.lr", "1", "1.0"),
    }


def test_an_exported_file_can_be_compared(local: CheckpointingPlace) -> None:
    state = make_state()
    train(state)
    checkpointer(state, local).save()
    with torch.no_grad():
        state.model.untouched[1] += 1
    other = CheckpointingPlace(local.run_url + "-2")
    checkpointer(state, other, "full").save()
    with opened(local.run_url, {}) as a, opened(other.run_url, {}) as b:
        found = compare(a.contents, b.contents)
    assert [(t.key, t.elements) for t in found.tensors] == [("model.untouched", 1)]
    assert not (found.only_a or found.only_b or found.plain)


def test_a_description(local: CheckpointingPlace, format: str) -> None:
    state = make_state(Net(), mine=Keeper({"t": torch.ones(3), "n": 1}))
    train(state, 3)
    checkpointer(state, local, format).save()
    with opened(local.run_url, {}, lease=False) as source:
        told = describe(source)
    assert (told.step, told.attempt, told.world_size, told.kind) == (3, 1, 1, format)
    model = {line.key: line for line in told.tensors if line.part == "model"}
    assert model["model.embed.weight"].shape == (6, 4) and model["model.embed.weight"].dtype == "float32"
    assert told.totals["model"].numel == sum(
        t.numel() for n, t in state.model.state_dict().items() if n != "head.weight"
    )
    assert told.aliases == {"head.weight": "embed.weight"}
    assert told.optimizer is not None and (told.optimizer[0]["lr"], told.optimizer[0]["params"]) == (0.01, 8)
    assert told.states["state.data"] == {"epoch": 0, "position": 24}
    assert {line.field for line in by_field(told.tensors)} == {"step", "exp_avg", "exp_avg_sq"}
    assert as_json(told)["optimizer"][0]["betas"] == {"$": "tuple", "v": [0.9, 0.999]}


def test_a_description_reads_no_tensor(local: CheckpointingPlace, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(torch.nn.Linear(1000, 30_000))
    state.step = 1
    checkpointer(state, local, format).save()
    read: list[int] = []
    original = LocalStorage.read_range

    def counting(self: LocalStorage, path: str, offset: int, length: int) -> bytes:
        read.append(length)
        return original(self, path, offset, length)

    monkeypatch.setattr(LocalStorage, "read_range", counting)
    with opened(local.run_url, {}, lease=False) as source:
        assert describe(source).totals["model"].nbytes > 120_000_000
    assert sum(read) < (10_000_000 if format == "full" else 20_000)  # the ends of the one file
