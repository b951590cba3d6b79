"""Kill one rank or all at any moment of saving: the next start restores the newest committed step, wholly."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from elastic_runner import paths
from elastic_runner.checkpoint.manifest import Manifest, check_file, list_checkpoints
from elastic_runner.storage import LocalStorage
from tests.support.killed_jobs import KEEP, Start, check, fill, make_state, save_until_killed
from tests.support.ranks import RankFailed, run_ranks

KILLS = int(os.environ.get("ELASTIC_RUNNER_TEST_KILLS", "100"))
SERIES = 5
"""Each with a directory of its own."""


def draw(rng: random.Random, number: int) -> Start:
    """Two ranks; now and then another world takes over, and is killed in its turn."""
    world_size = rng.choice([1, 3]) if number % 8 == 7 else 2
    format, rank = rng.choice(["sharded", "sharded", "full"]), rng.randrange(world_size)
    # Of a full checkpoint rank 0 writes everything.
    by_change = rng.random() < 0.7 and (format == "sharded" or rank == 0)
    return Start(
        world_size=world_size,
        strategy=rng.choice(["ddp", "fsdp"]),
        format=format,  # type: ignore[arg-type]
        rank=rank,
        everybody=rng.random() < 0.5,
        change=rng.randint(1, 60) if by_change else None,
        delay=0 if by_change else rng.uniform(0, 0.15),
    )


def killed(run_dir: Path, start: Start) -> None:
    """One start, to its end."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(save_until_killed, start.world_size, str(run_dir), start, timeout=60)
    errors = failed.value.errors
    dead = [rank for rank, text in errors.items() if text == "died with exit code -9"]
    assert start.rank in dead, failed.value
    assert len(dead) == (start.world_size if start.everybody else 1), failed.value
    others = [text for rank, text in errors.items() if rank not in dead]
    # The end of the peer, wherever they met it, and nothing else.
    assert all("PeerLost" in text or "by peer" in text for text in others), failed.value


def told(run_dir: Path, what: str, world_size: int) -> list[int]:
    """What the ranks have said last of how far they came."""
    files = [run_dir / "told" / f"{what}-{rank}" for rank in range(world_size)]
    return [int(file.read_text()) for file in files if file.exists()]


def verified(storage: LocalStorage) -> list[Manifest]:
    """Everything that is committed, newest first, each byte of it compared."""
    manifests = list_checkpoints(storage).manifests
    for manifest in manifests:
        for file in manifest.files:
            assert check_file(storage, manifest, file, digests=True) is None
    return list(manifests)


@pytest.mark.parametrize("series", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SERIES))])
def test_a_kill_at_any_moment_of_saving_leaves_the_newest_committed_step(series: int, tmp_path: Path) -> None:
    """Case c28; each element of the state is the number of its step, as in case c21."""
    rng = random.Random(series)
    storage = LocalStorage(tmp_path / paths.CHECKPOINTS)
    committed = left = 0
    for number in range(-(-KILLS // SERIES)):
        start = draw(rng, number)
        print(f"series {series}, kill {number}, from step {committed}: {start}")
        for file in (tmp_path / "told").glob("*"):
            file.unlink()
        killed(tmp_path, start)
        assert told(tmp_path, "restored", start.world_size) == [committed] * start.world_size
        manifests = verified(storage)
        newest = max([m.step for m in manifests], default=0)
        assert newest >= max(told(tmp_path, "saved", start.world_size), default=committed), "it was said to be saved"
        # The second save of a start follows the tidying after its first, which a kill may have come before.
        assert newest >= committed and len(manifests) <= (KEEP + 1 if newest > committed + 1 else left + 1)
        committed, left = newest, len(manifests)
    assert committed > 0
    assert run_ranks(save_until_killed, 2, str(tmp_path), None) == [committed] * 2


def test_the_oracle_can_fail() -> None:
    """One element of another step is enough."""
    state = make_state(lambda model: model)
    state.step = 3
    fill(state)
    check(state, 3)
    with torch.no_grad():
        next(iter(state.optimizer.state.values()))["exp_avg"].view(-1)[-1] = 2
    with pytest.raises(AssertionError, match=r"optimizer\.state\.0\.weight\.exp_avg"):
        check(state, 3)
