"""The run's id: made once for a run directory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic_runner import paths
from elastic_runner.errors import Damaged
from elastic_runner.storage.local import LocalStorage
from elastic_runner.worker.attempt import run_id


def test_it_is_the_same_ever_after_and_another_one_elsewhere(tmp_path: Path) -> None:
    here, there = LocalStorage(tmp_path / "here"), LocalStorage(tmp_path / "there")
    assert run_id(here) == run_id(here) != run_id(there)


def test_those_who_make_it_at_once_agree(tmp_path: Path) -> None:
    storage, found = LocalStorage(tmp_path), []
    together = threading.Barrier(4)

    def make() -> None:
        together.wait(60)
        found.append(run_id(storage))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1


def test_one_that_is_damaged_says_what_to_do(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put(paths.RUN, b"{}")
    with pytest.raises(Damaged, match="delete it"):
        run_id(storage)
