"""Snapshots in memory: whoever is killed when, no committed step is lost, and what is restored is what was there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import list_checkpoints
from elastic_runner.checkpoint.snapshot import read_snapshot
from elastic_runner.config import CheckpointConfig, FsdpConfig, SnapshotConfig, StrategyConfig
from elastic_runner.data.ledger import read_records
from elastic_runner.data.lineage import effective
from elastic_runner.data.tally import tally
from elastic_runner.environment import SNAPSHOTS
from elastic_runner.history import read_ends
from elastic_runner.launch.memory import NodeMemory
from elastic_runner.storage import LocalStorage, open_storage
from elastic_runner.train.record import read_summary
from tests.support.job import Kill, config
from tests.support.ranks import RankFailed, run_ranks
from tests.support.snapshot_jobs import WINDOWS, Seen, train

STEPS = 8
EVERY_STEP = SnapshotConfig(every=1)


def settings(run_dir: Path, strategy: str = "ddp", every: int = 100, **changes: Any) -> Any:
    return config(
        str(run_dir), strategy=strategy, steps=STEPS, every=every, **{"snapshot": EVERY_STEP, **changes}
    )  # fmt: skip


@pytest.fixture
def agent() -> Iterator[str]:
    """The memory of a node of two, as an agent gives it."""
    memory = NodeMemory(2)
    yield memory.variables()[SNAPSHOTS]
    memory.close()


def node(directory: Path, ranks: int = 1) -> str:
    """The memory of a simulated node."""
    directory.mkdir()
    files = [directory / str(number) for number in range(2 * ranks)]
    for file in files:
        file.touch()
    return os.pathsep.join(map(str, files))


def killed(world: int, *given: Any) -> RankFailed:
    with pytest.raises(RankFailed) as failed:
        run_ranks(train, world, *given)
    return failed.value


def on_record(run_dir: Path) -> list[int]:
    return [r["step"] for r in effective(read_records(LocalStorage(run_dir)))[0] if r["event"] == "step"]


def assert_complete(run_dir: Path) -> None:
    """Each step once and none lost, in the ledger and by the summary."""
    records, lost = effective(read_records(open_storage(str(run_dir))))
    counts = tally(records)
    assert (counts.steps, counts.gaps, counts.repeated, counts.skipped, lost) == (STEPS, 0, 0, 0, 0)
    summary = read_summary(open_storage(str(run_dir)))
    assert summary is not None and (summary.status, summary.step, summary.lost_steps) == ("finished", STEPS, 0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Seen]:
    """Rank 0 of a run that nobody disturbs and that takes no snapshots, by world and strategy."""
    known: dict[tuple[int, str], Seen] = {}

    def of(world: int, strategy: str) -> Seen:
        if (world, strategy) not in known:
            run_dir = tmp_path_factory.mktemp("undisturbed")
            known[world, strategy] = run_ranks(train, world, settings(run_dir, strategy), [""] * world)[0]
        return known[world, strategy]

    return of


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp", 1)])
def test_no_committed_step_is_lost_whenever_a_worker_is_killed(
    strategy: str, window: str, rank: int, tmp_path: Path, agent: str, undisturbed: Callable[[int, str], Seen]
) -> None:
    job = settings(tmp_path, strategy)
    error = killed(2, job, [agent, agent], Kill(rank=rank, step=5, phase=window))
    assert "exit code -9" in error.errors[rank], error
    committed = on_record(tmp_path)
    again = run_ranks(train, 2, job, [agent, agent])
    resumed = again[0].resumed
    assert {seen.resumed for seen in again} == {resumed} and resumed in (4, 5)
    assert committed == list(range(1, len(committed) + 1)) and len(committed) <= resumed, "a committed step is lost"
    assert any(f"restored step {resumed} from memory" in line for line in again[0].said)
    reference = undisturbed(2, strategy)
    assert again[0].found == reference.states[resumed]
    assert again[0].states[STEPS] == reference.states[STEPS]
    assert_complete(tmp_path)


def test_a_worker_that_is_killed_again_before_its_first_step(tmp_path: Path, agent: str) -> None:
    """The lines that came with the snapshot are put on record once."""
    job = settings(tmp_path)
    killed(2, job, [agent, agent], Kill(rank=0, step=5, phase="sealed"))
    killed(2, job, [agent, agent], Kill(rank=0, step=6, phase="copying"))
    killed(2, job, [agent, agent], Kill(rank=0, step=6, phase="releasing"))
    assert run_ranks(train, 2, job, [agent, agent])[0].resumed in (5, 6)
    assert_complete(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_restored_stays_until_all_have_a_newer_one(rank: int, tmp_path: Path, agent: str) -> None:
    """The other rank was a step ahead: of its two, the older one is the one that counts."""
    job = settings(tmp_path)
    for _ in range(3):
        killed(2, job, [agent, agent], Kill(rank=rank, step=5, phase="copying"))
    assert [seen.resumed for seen in run_ranks(train, 2, job, [agent, agent])] == [4, 4]
    assert_complete(tmp_path)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_world_may_change(
    before: int, after: int, strategy: str, tmp_path: Path, agent: str, undisturbed: Callable[[int, str], Seen]
) -> None:
    job = settings(tmp_path, strategy)
    killed(before, job, [agent] * before, Kill(rank=0, step=5, phase="saved"))
    again = run_ranks(train, after, job, [agent] * after)
    assert [seen.resumed for seen in again] == [5] * after
    assert again[0].found == undisturbed(before, strategy).states[5]
    assert_complete(tmp_path)


@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_the_strategy_may_change(
    before: str, after: str, tmp_path: Path, agent: str, undisturbed: Callable[[int, str], Seen]
) -> None:
    killed(2, settings(tmp_path, before), [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    again = run_ranks(train, 2, settings(tmp_path, after), [agent] * 2)
    assert again[0].resumed == 5 and again[0].found == undisturbed(2, before).states[5]


@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_node_lost_comes_from_another(
    lost: int, tmp_path: Path, undisturbed: Callable[[int, str], Seen]
) -> None:
    job, nodes = settings(tmp_path / "run"), [node(tmp_path / "a"), node(tmp_path / "b")]
    killed(2, job, nodes, Kill(rank=lost, step=5, phase="saved"))
    nodes[lost] = node(tmp_path / "c")
    again = run_ranks(train, 2, job, nodes)
    assert [seen.resumed for seen in again] == [5, 5]
    found, expected = again[0].found, undisturbed(2, "ddp").states[5]
    if lost == 0:  # with rank 0's memory its BatchNorm statistics are gone: another rank's are as good
        statistics = ("running_mean", "running_var")
        found, expected = ({k: v for k, v in one.items() if not k.endswith(statistics)} for one in (found, expected))
    assert found == expected
    assert again[1].found == again[0].found
    assert_complete(tmp_path / "run")


def test_a_lost_node_takes_its_shards_with_it(tmp_path: Path) -> None:
    job, nodes = settings(tmp_path / "run", "fsdp", every=3), [node(tmp_path / "a"), node(tmp_path / "b")]
    killed(2, job, nodes, Kill(rank=1, step=5, phase="saved"))
    again = run_ranks(train, 2, job, [nodes[0], node(tmp_path / "c")])
    assert [seen.resumed for seen in again] == [3, 3]
    assert "snapshot not used: step 5 in memory is not whole: it is there of 1 of 2 ranks" in again[0].said


def test_hybrid_shards_survive_a_node(tmp_path: Path) -> None:
    """Sharded within a node, replicated across: each node has all of it."""
    nodes = [node(tmp_path / name, 2) for name in "ab"]
    hybrid = StrategyConfig(name="hsdp", fsdp=FsdpConfig(wrap_classes=("Linear",), shard_size=2))
    job = replace(settings(tmp_path / "run"), strategy=hybrid)
    killed(4, job, [nodes[0]] * 2 + [nodes[1]] * 2, Kill(rank=3, step=5, phase="saved"))
    fresh = node(tmp_path / "c", 2)
    again = run_ranks(train, 4, job, [nodes[0]] * 2 + [fresh] * 2)
    assert [seen.resumed for seen in again] == [5] * 4
    undisturbed = run_ranks(train, 4, replace(job, run_dir=str(tmp_path / "other")), [""] * 4)
    assert again[0].found == again[2].found == undisturbed[0].states[5]
    assert_complete(tmp_path / "run")


def flip(path: str) -> None:
    with Path(path).open("r+b") as file:
        file.seek(4096 + 40)
        byte = file.read(1)
        file.seek(4096 + 40)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("flipped", ["newest", "both"])
def test_flipped_bits_are_not_loaded(
    flipped: str, tmp_path: Path, agent: str, undisturbed: Callable[[int, str], Seen]
) -> None:
    job = settings(tmp_path, every=3)
    killed(2, job, [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    mine = agent.split(os.pathsep)[:2]
    steps = {found.head.step: path for path in mine if (found := read_snapshot(path)) is not None}
    assert sorted(steps) == [4, 5]
    for step in (5,) if flipped == "newest" else (4, 5):
        flip(steps[step])
    again = run_ranks(train, 2, job, [agent] * 2)
    expected = 4 if flipped == "newest" else 3
    assert [seen.resumed for seen in again] == [expected] * 2
    assert any("has other bytes than were sealed" in line for line in again[0].said)
    assert again[0].found == undisturbed(2, "ddp").states[expected]


def test_another_run_s_memory_is_not_used(tmp_path: Path, agent: str) -> None:
    killed(2, settings(tmp_path / "one"), [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    killed(2, settings(tmp_path / "two"), [agent] * 2, Kill(rank=1, step=3, phase="saved"))
    assert run_ranks(train, 2, settings(tmp_path / "two"), [agent] * 2)[0].resumed == 3
    assert run_ranks(train, 2, settings(tmp_path / "one"), [agent] * 2)[0].resumed == 0


def test_a_checkpoint_of_the_same_step_comes_first(tmp_path: Path, agent: str) -> None:
    job = settings(tmp_path, every=5, checkpoint=CheckpointConfig(every=5, mode="sync"))
    killed(2, job, [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    again = run_ranks(train, 2, job, [agent] * 2)
    assert again[0].resumed == 5 and "restored step 5 (sharded, by 2 ranks)" in again[0].said
    assert_complete(tmp_path)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(m.step for m in list_checkpoints(LocalStorage(run_dir / "checkpoints")).manifests)


def test_a_checkpoint_that_is_damaged_gives_way_to_memory(tmp_path: Path, agent: str) -> None:
    job = settings(tmp_path, every=5, checkpoint=CheckpointConfig(every=5, mode="sync"))
    killed(2, job, [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    data = next((tmp_path / "checkpoints/step-0000000005/data-000001").glob("__0_1*"))
    data.write_bytes(data.read_bytes()[:-1])
    again = run_ranks(train, 2, job, [agent] * 2)
    assert again[0].resumed == 5 and "restored step 5 from memory (by 2 ranks, attempt 1)" in again[0].said
    assert_complete(tmp_path)


def test_who_is_asked_to_stop_before_the_first_step_saves_what_is_only_in_memory(tmp_path: Path, agent: str) -> None:
    """The memory goes with the launcher."""
    job = settings(tmp_path)
    killed(2, job, [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    assert "Interrupted" in killed(2, job, [agent] * 2, None, 0, True).errors[0]
    assert checkpoints(tmp_path) == [6]
    assert run_ranks(train, 2, job, ["", ""])[0].resumed == 6
    assert_complete(tmp_path)


def test_memory_that_cannot_be_opened_is_done_without(tmp_path: Path) -> None:
    gone = os.pathsep.join(str(tmp_path / f"gone/{number}") for number in range(4))
    seen = run_ranks(train, 2, settings(tmp_path / "run"), [gone] * 2)
    assert any("no snapshots are taken in memory: the launcher's memory cannot be" in line for line in seen[0].warned)
    assert_complete(tmp_path / "run")


@pytest.mark.parametrize("step", [6, STEPS])
def test_a_save_that_was_due_is_made_up_for(step: int, tmp_path: Path, agent: str) -> None:
    """Killed before the save of step 6, or of the last one, wrote anything."""
    job = settings(tmp_path, every=6)
    killed(2, job, [agent] * 2, Kill(rank=0, step=step, phase="sealed"))
    assert step not in checkpoints(tmp_path)
    assert run_ranks(train, 2, job, [agent] * 2)[0].resumed in (step - 1, step)
    assert checkpoints(tmp_path) == [6, STEPS]
    assert_complete(tmp_path)


def test_what_fails_again_and_again_is_tried_from_storage(tmp_path: Path, agent: str) -> None:
    """From memory, then from the checkpoint behind it, and from the one before when that led there twice."""
    job = settings(tmp_path, every=3)
    for _ in range(4):
        assert "ZeroDivisionError" in killed(2, job, [agent] * 2, None, 6).errors[0]
    ends = [(end.restored, end.in_memory) for end in read_ends(LocalStorage(tmp_path))]
    behind = paths.manifest(3, 1)
    assert ends == [(None, False), (behind, True), (behind, False), (behind, False)]
    again = run_ranks(train, 2, job, [agent] * 2)
    assert again[0].resumed == 3, "for want of a better one"
    assert any("step 3 is not used while there is a better one: suspect: led 2 times" in line for line in again[0].said)


def test_the_memory_is_given_back_at_the_end(tmp_path: Path, agent: str) -> None:
    run_ranks(train, 2, settings(tmp_path), [agent] * 2)
    assert [Path(path).stat().st_size for path in agent.split(os.pathsep)] == [0] * 4


def test_where_there_is_no_room_it_is_said_once_and_training_goes_on(
    tmp_path: Path, agent: str, undisturbed: Callable[[int, str], Seen]
) -> None:
    seen = run_ranks(without_room, 2, settings(tmp_path), [agent] * 2)
    (said,) = [line for line in seen[0].warned if "snapshots" in line]
    assert "no snapshots are taken in memory: 0.0 GB on a node that has 0.0 GB available" in said
    assert seen[0].states[STEPS] == undisturbed(2, "ddp").states[STEPS]
    assert_complete(tmp_path)


def without_room(job: Any, memory: list[str]) -> Seen:
    from unittest.mock import patch

    from elastic_runner.checkpoint import snapshots

    with patch.object(snapshots, "available_memory", lambda: 1000):
        return train(job, memory)


def test_switched_off_by_configuration(tmp_path: Path, agent: str) -> None:
    job = settings(tmp_path, snapshot=SnapshotConfig(enabled=False))
    with suppress(RankFailed):
        run_ranks(train, 2, job, [agent] * 2, Kill(rank=1, step=5, phase="saved"))
    assert run_ranks(train, 2, replace(job, snapshot=EVERY_STEP), [agent] * 2)[0].resumed == 0
