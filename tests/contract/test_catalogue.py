"""Pruning looks at each save; what cannot have changed since is not asked for again, and what has changed is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_runner import paths
from elastic_runner.checkpoint.catalogue import Catalogue
from elastic_runner.checkpoint.manifest import Manifest, encode, list_checkpoints
from elastic_runner.checkpoint.marks import mark_suspect, pin, unpin
from elastic_runner.checkpoint.pruning import Pruned, prune
from elastic_runner.checkpoint.retention import EverySteps, Newest, Retention
from elastic_runner.storage import LocalStorage
from tests.support.committed import commit, manifest, write_data

KEEP_ONE = Retention(policies=(Newest(1),), unhealthy=1)
KEEP_TWO = Retention(policies=(Newest(2),), unhealthy=2)
KEEP_ALL = Retention(policies=(EverySteps(1),), unhealthy=1)


class Counting(LocalStorage):
    """Counts what is asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []

    def read(self, path: str) -> bytes:
        self.asked.append(f"read {path}")
        return super().read(path)

    def list(self, path: str) -> list[str]:
        self.asked.append(f"list {path}")
        return super().list(path)


@pytest.fixture
def storage(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


@pytest.fixture
def catalogue(storage: Counting) -> Catalogue:
    return Catalogue(storage)


def look(storage: Counting, catalogue: Catalogue) -> None:
    """It finds what one without a memory finds."""
    assert repr(catalogue.list()) == repr(list_checkpoints(storage))  # errors in it do not compare
    storage.asked.clear()


def test_a_save_costs_as_many_requests_however_many_are_kept(storage: Counting, catalogue: Catalogue) -> None:
    for step in range(1, 41):
        made = commit(storage, step)
        storage.asked.clear()
        assert len(prune(storage, KEEP_ALL, made, 1, catalogue=catalogue).kept) == step
        # That of the save before was the newest then: somebody might have been at it.
        before = [paths.step_directory(step - 1)] if step > 1 else []
        assert storage.asked == ["list ", *(f"list {each}" for each in [*before, paths.step_directory(step)])]


def test_what_goes_is_looked_at_again_and_the_rest_is_not(storage: Counting, catalogue: Catalogue) -> None:
    for step in range(1, 11):
        prune(storage, KEEP_ALL, commit(storage, step), 1, catalogue=catalogue)
    pinned = manifest(4)
    pin(storage, pinned)  # since it was listed
    storage.asked.clear()
    pruned = prune(storage, KEEP_TWO, commit(storage, 11), 1, catalogue=catalogue)
    assert pruned.kept[pinned.path] == "pinned"
    assert len(pruned.deleted) == 8
    look(storage, catalogue)
    unpin(storage, pinned)
    assert prune(storage, KEEP_TWO, commit(storage, 12), 1, catalogue=catalogue).deleted == (
        pinned.path,
        paths.manifest(10, 1),
    )


def test_what_others_do_is_seen(storage: Counting, catalogue: Catalogue) -> None:
    made = [commit(storage, step) for step in (1, 2, 3)]
    look(storage, catalogue)
    storage.delete(paths.step_directory(1))
    look(storage, catalogue)
    commit(storage, 3, 2)
    mark_suspect(storage, made[2], "whatever", 2)
    look(storage, catalogue)
    write_data(storage, 4)
    look(storage, catalogue)
    storage.put(made[2].path, b"torn")
    catalogue.forget(3)
    look(storage, catalogue)
    storage.put(made[2].path, encode(made[2]))
    look(storage, catalogue)


def test_an_import_may_be_replaced_and_is_always_read(storage: Counting, catalogue: Catalogue) -> None:
    commit(storage, 2)
    for loss in (1.0, 2.0):
        commit(storage, 1, 0, metrics={"loss": loss})
        look(storage, catalogue)


def test_a_step_that_is_saved_again_is_another_checkpoint(storage: Counting, catalogue: Catalogue) -> None:
    def save(step: int, loss: float) -> Manifest:
        made = commit(storage, step, metrics={"loss": loss})
        prune(storage, KEEP_ALL, made, 1, catalogue=catalogue)
        return made

    for step in (1, 2, 3):
        save(step, 1.0)
    # The run went back: what it saved of step 2 is withdrawn, and saved anew.
    catalogue.forget(2)
    storage.delete(paths.manifest(2, 1))
    look(storage, catalogue)
    again = save(2, 2.0)
    look(storage, catalogue)
    assert again in catalogue.list().manifests


def test_trouble_of_any_kind_is_told_and_not_raised(storage: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **keywords: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    newest = commit(storage, 1)
    monkeypatch.setattr("elastic_runner.checkpoint.pruning.decide", broken)
    assert prune(storage, KEEP_ONE, newest, 1) == Pruned(deleted=(), swept=(), kept={}, trouble=("a mistake of ours",))
