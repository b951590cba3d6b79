"""Slow storage on one of two ranks, without an agent: bytes that move are no hang, and a standstill is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.moving_jobs import LIMIT, train
from tests.support.ranks import RankFailed, run_ranks
from tests.support.saving_jobs import committed


def test_while_bytes_move_nobody_is_ended_and_who_stands_still_is(tmp_path: Path) -> None:
    """Case c17: rank 0 saves and loads for longer than ``timeouts.save`` and ``load``, and rank 1 waits for it.

    Then rank 0 stands still in a save: it is the one that says so, with the phase, and the checkpoint before stays.
    """
    run = tmp_path / "run"
    (_, writing), other = run_ranks(train, 2, str(run), 2, False, timeout=60)
    assert writing > LIMIT and other == (0, 0)
    assert committed(str(run)) == [2]

    with pytest.raises(RankFailed) as caught:
        run_ranks(train, 2, str(run), 4, True, timeout=60)
    assert caught.value.errors[0] == "died with exit code 1"
    said, waiting = [(tmp_path / f"run.{rank}").read_text() for rank in range(2)]
    assert "restored step 2 (" in said
    assert "rank 0" in said and f"phase 'save' took longer than {LIMIT:g} s without a byte moving" in said
    assert "took longer" not in waiting
    assert committed(str(run)) == [2]
