"""Restoring by several ranks: each node reads each file once, and what one rank finds is everybody's."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elastic_runner import paths
from elastic_runner.checkpoint import source
from elastic_runner.checkpoint.metadata import METADATA, parse_metadata
from elastic_runner.storage import LocalStorage
from tests.support import saving_jobs as jobs
from tests.support.checkpoint_jobs import Dump
from tests.support.ranks import RankFailed, run_ranks
from tests.support.saving_jobs import Found

FORMATS = pytest.mark.parametrize("format", ["sharded", "full"])


def checkpoints(run_dir: Path) -> LocalStorage:
    return LocalStorage(run_dir / paths.CHECKPOINTS)


def metadata_of(run_dir: Path, step: int) -> Metadata:
    path = f"{paths.data_directory(step, 1)}/{METADATA}"
    return parse_metadata(checkpoints(run_dir).read(path), path)


def files(run_dir: Path, step: int = 1) -> set[str]:
    """Names of the files in which there is an element of a tensor."""
    metadata = metadata_of(run_dir, step)
    chunks = {
        (key, chunk.offsets): chunk.sizes.numel()
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
    return {
        info.relative_path for index, info in metadata.storage_data.items() if chunks.get((index.fqn, index.offset))
    }


def restore(run_dir: Path, strategy: str, world_size: int, format: str = "sharded", **how: object) -> list[Found]:
    return run_ranks(call, world_size, str(run_dir), strategy, format, how)


def call(run_dir: str, strategy: str, format: str, how: dict[str, object]) -> Found:
    return jobs.restore(run_dir, strategy, format, **how)  # type: ignore[arg-type]


def of_tensors(found: Found, names: set[str]) -> Counter[str]:
    return Counter(name for name in found.read if name in names)


@pytest.fixture(
    scope="module", params=[("ddp", 2), ("fsdp", 3), ("hsdp", 4)], ids=lambda saved: f"{saved[0]}{saved[1]}"
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dump]:
    strategy, world_size = request.param
    run_dir = tmp_path_factory.mktemp("saved")
    states = run_ranks(jobs.save_steps, world_size, str(run_dir), strategy, "sharded", 1)
    names = files(run_dir)
    assert all(len([name for name in names if name.startswith(f"__{rank}_")]) >= 2 for rank in range(world_size))
    return run_dir, states[0]


def test_each_element_is_written_once(saved: tuple[Path, Dump]) -> None:
    """Whatever several ranks hold alike."""
    run_dir, state = saved
    metadata = metadata_of(run_dir, 1)
    for key, (_, shape, _) in state.items():
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == shape
        chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
        assert sum(chunk.sizes.numel() for chunk in chunks) == entry.size.numel()
        assert len({chunk.offsets for chunk in chunks}) == len(chunks)


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)])
def test_each_file_is_read_once_on_a_node(strategy: str, world_size: int, saved: tuple[Path, Dump]) -> None:
    run_dir, state = saved
    found = restore(run_dir, strategy, world_size)
    assert all((each.step, each.state) == (1, state) for each in found)
    names = files(run_dir)
    counts = [of_tensors(each, names) for each in found]
    assert sum(counts, Counter()) == Counter(names)
    shares = [count.total() for count in counts]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("nodes", ["ABA", "ABC"])
def test_each_node_reads_what_it_needs_once(nodes: str, strategy: str, saved: tuple[Path, Dump]) -> None:
    run_dir, state = saved
    found = restore(run_dir, strategy, len(nodes), nodes=nodes)
    assert all((each.step, each.state) == (1, state) for each in found)
    names = files(run_dir)
    for node in set(nodes):
        counts = sum((of_tensors(f, names) for f, of in zip(found, nodes, strict=True) if of == node), Counter())
        assert set(counts.values()) == {1}
        if strategy == "ddp":
            assert set(counts) == names


@pytest.mark.parametrize(("strategy", "unshared"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_ranks_that_cannot_share_memory_read_for_themselves(
    strategy: str, unshared: int, saved: tuple[Path, Dump]
) -> None:
    run_dir, state = saved
    found = restore(run_dir, strategy, 2, unshared=unshared)
    for each in found:
        assert (each.step, each.state) == (1, state)
        counts = of_tensors(each, files(run_dir))
        assert set(counts.values()) == {1}
        if strategy == "ddp":
            assert set(counts) == files(run_dir)


@pytest.mark.parametrize(("strategy", "forbidden"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_ranks_that_may_not_read_each_others_memory_map_it(
    strategy: str, forbidden: int, saved: tuple[Path, Dump]
) -> None:
    """As under a seccomp filter, or Yama's strictest settings."""
    run_dir, state = saved
    found = restore(run_dir, strategy, 2, forbidden=forbidden)
    assert all((each.step, each.state) == (1, state) for each in found)
    names = files(run_dir)
    assert sum((of_tensors(each, names) for each in found), Counter()) == Counter(names)


def restore_but_die(run_dir: str, dying: int) -> Found:
    """One rank dies when it is to copy from a file, while the others copy from its memory."""
    if int(os.environ["RANK"]) == dying:
        with patch.object(source, "_Copy", lambda *_: lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            return jobs.restore(run_dir, "ddp", "sharded")
    return jobs.restore(run_dir, "ddp", "sharded")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_in_the_middle_is_a_lost_peer(dying: int, saved: tuple[Path, Dump]) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(restore_but_die, 2, str(saved[0]), dying)
    assert "died with exit code -9" in failed.value.errors[dying]
    assert "PeerLost" in failed.value.errors[1 - dying]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("nodes", ["AAA", "ABA", "ABC"])
def test_one_rank_of_a_node_brings_a_full_checkpoint(nodes: str, strategy: str, tmp_path: Path) -> None:
    (state,) = run_ranks(jobs.save_steps, 1, str(tmp_path), "single", "full", 1)
    found = restore(tmp_path, strategy, 3, "full", nodes=nodes)
    assert all((each.step, each.state) == (1, state) for each in found)
    bringing = [rank for rank, each in enumerate(found) if "full.pt" in each.read]
    assert bringing == [nodes.index(node) for node in sorted(set(nodes))]


def damage(file: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("finder", [0, 1])
def test_what_one_rank_finds_damaged_is_rejected_by_all(finder: int, tmp_path: Path) -> None:
    first = run_ranks(jobs.save_steps, 2, str(tmp_path), "ddp", "sharded", 1)[0]
    run_ranks(jobs.save_steps, 2, str(tmp_path / "more"), "ddp", "sharded", 2)
    # The same training, a step further.
    (tmp_path / "more" / paths.CHECKPOINTS / "step-0000000002").rename(tmp_path / paths.CHECKPOINTS / "step-0000000002")
    name = f"__{finder}_1.distcp"  # a rank begins with what it wrote
    assert name in files(tmp_path, 2)
    damage(tmp_path / paths.CHECKPOINTS / "step-0000000002" / "data-000001" / name)
    found = restore(tmp_path, "ddp", 2)
    assert all((each.step, each.state) == (1, first) for each in found)
    newest = Counter(found[finder].read)
    assert newest[name] >= 2, "it was read again"
    (said,) = [line for line in found[0].said if "checkpoint not used" in line]
    assert "step 2: " in said and f"{name} has other bytes than were written" in said
    marks = [name for name in checkpoints(tmp_path).list("step-0000000002") if name.startswith("suspect")]
    assert len(marks) == 1


@FORMATS
@pytest.mark.parametrize("finder", [0, 1])
def test_what_one_rank_cannot_read_is_passed_over_by_all(finder: int, format: str, tmp_path: Path) -> None:
    run_ranks(jobs.save_steps, 2, str(tmp_path), "ddp", format, 2)
    name = sorted(files(tmp_path, 2))[finder::2][1] if format == "sharded" else "full.pt"
    unreadable = f"{paths.data_directory(2, 1)}/{name}"
    nodes = "AA" if format == "sharded" or finder == 0 else "AB"
    found = restore(tmp_path, "ddp", 2, format, unreadable=(unreadable,), nodes=nodes)
    assert [each.step for each in found] == [1, 1] and found[0].state == found[1].state
    (said,) = [line for line in found[0].said if "checkpoint not used" in line]
    assert f"step 2: cannot be read: read {unreadable}" in said
    assert not [name for name in checkpoints(tmp_path).list("step-0000000002") if name.startswith("suspect")]
    assert [each.step for each in restore(tmp_path, "ddp", 2, format)] == [2, 2]


@pytest.mark.parametrize(("strategy", "which"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_a_read_that_is_wrong_once_is_done_again(strategy: str, which: int, saved: tuple[Path, Dump]) -> None:
    run_dir, state = saved
    flaky = sorted(files(run_dir))[which]
    found = restore(run_dir, strategy, 2, flaky=(flaky,))
    assert all((each.step, each.state) == (1, state) for each in found)
    counts = [each.read.count(flaky) for each in found]
    assert sorted(counts) == [0, 2]
    said = [f"{flaky} came with wrong bytes at first" in " ".join(each.said) for each in found]
    assert said == [count == 2 for count in counts]


@FORMATS
@pytest.mark.parametrize(
    ("lists", "step"),
    [({1: []}, 2), ({1: ["step-0000000001"]}, 2), ({0: ["step-0000000001"]}, 1), ({0: [], 1: ["step-0000000002"]}, 0)],
    ids=["none on 1", "stale on 1", "stale on 0", "none on 0"],
)
def test_listings_that_differ_do_not_part_the_ranks(
    format: str, lists: dict[int, list[str]], step: int, tmp_path: Path
) -> None:
    """Rank 0's is everybody's."""
    run_ranks(jobs.save_steps, 1, str(tmp_path), "single", format, 2)
    found = restore(tmp_path, "ddp", 2, format, lists=lists)
    assert [each.step for each in found] == [step] * 2
    if step:
        assert found[0].state == found[1].state
