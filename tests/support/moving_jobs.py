"""What ranks run when the storage of rank 0 is slow, or stands still."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from elastic_runner.storage import local
from tests.support.saving_jobs import Saving

LIMIT = 2.5
"""Seconds that a save and a load may stand still."""
_PAUSE = 0.3
_PIECES = 10


class _Slow:
    """Holds up the first pieces, one after the other."""

    def __init__(self, action: Callable[..., Any]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self.held_up = 0

    def on(self, rank: int) -> Callable[..., Any]:
        def slowly(*arguments: Any) -> Any:
            with self._lock:
                if self.held_up < _PIECES:
                    self.held_up += 1
                    time.sleep(_PAUSE)
            return self._action(*arguments)

        return slowly if rank == 0 else self._action

    @property
    def seconds(self) -> float:
        return self.held_up * _PAUSE


def _stand_still(*arguments: Any) -> None:
    threading.Event().wait()


def train(run_dir: str, steps: int, stands_still: bool) -> tuple[float, float]:
    """Restore, train and save after the last step; what a rank says goes to a file beside ``run_dir``.

    On rank 0 reading is slow, and writing is slow or ``stands_still``. For how many seconds each was held up.
    """
    rank = int(os.environ["RANK"])
    with Path(f"{run_dir}.{rank}").open("a") as said:
        os.dup2(said.fileno(), 2)
    reading, writing = _Slow(local._fill), _Slow(local.DirectWriter.write)

    def during(saving: Saving, step: int) -> None:
        assert not (stands_still and rank == 0) or reading.seconds > LIMIT

    timeouts = {"save": LIMIT, "load": LIMIT}
    write = _stand_still if stands_still and rank == 0 else writing.on(rank)
    with patch.object(local, "_fill", reading.on(rank)), patch.object(local.DirectWriter, "write", write):
        Saving(run_dir, steps=steps, checkpoint={"every": 100, "mode": "sync"}, timeouts=timeouts).run(during)
    return reading.seconds, writing.seconds
