"""What goes, goes manifest first; what may still be wanted or written stays; trouble is told, not raised."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runner import paths
from elastic_runner.chaos.faulty_storage import FaultyStorage
from elastic_runner.checkpoint.manifest import Manifest, decode, list_checkpoints
from elastic_runner.checkpoint.marks import LEASE_SECONDS, mark_suspect, pin, reading
from elastic_runner.checkpoint.pruning import Pruned, carry_out, plan_pruning, prune
from elastic_runner.checkpoint.retention import Best, Newest, Retention
from elastic_runner.errors import AccessDenied, NotFound, StorageTimeout
from elastic_runner.storage import LocalStorage, Storage
from tests.support.checkpointing import CheckpointingPlace, storage_of
from tests.support.committed import commit, write_data

KEEP_ONE = Retention(policies=(Newest(1),), unhealthy=1)
KEEP_TWO = Retention(policies=(Newest(2),), unhealthy=2)


@pytest.fixture
def storage(place: CheckpointingPlace) -> Storage:
    return storage_of(place)


def steps(storage: Storage) -> list[int]:
    return [step for name in storage.list("") if (step := paths.step_number(name)) is not None]


def test_superseded_ones_go_and_nothing_of_them_is_left(storage: Storage) -> None:
    made = [commit(storage, step) for step in (1, 2, 3, 4)]
    mark_suspect(storage, made[0], "whatever", 1)
    storage.put("step-notes/mine", b"x")
    storage.put("notes", b"x")
    pruned = prune(storage, KEEP_TWO, made[-1], 1)
    assert storage.list("") == ["notes", *(paths.step_directory(step) for step in (3, 4)), "step-notes"]
    assert pruned == Pruned(
        deleted=(made[0].path, made[1].path),
        swept=(),
        kept={made[3].path: "one of the newest 2", made[2].path: "one of the newest 2"},
        trouble=(),
    )
    assert prune(storage, KEEP_TWO, made[-1], 1).deleted == ()


def test_one_attempt_s_checkpoint_goes_and_another_s_of_the_step_stays(storage: Storage) -> None:
    pinned, other = commit(storage, 1, 1), commit(storage, 1, 2)
    pin(storage, pinned)
    mark_suspect(storage, other, "whatever", 2)
    assert prune(storage, KEEP_ONE, commit(storage, 2, 2), 2).deleted == (other.path,)
    assert storage.list(paths.step_directory(1)) == ["data-000001", "manifest-000001.json", "pinned-000001.json"]


def test_the_manifest_goes_first_then_data_then_the_directory(tmp_path: Path) -> None:
    made = [commit(LocalStorage(tmp_path), step) for step in (1, 2)]
    storage = FaultyStorage(LocalStorage(tmp_path))
    prune(storage, KEEP_ONE, made[-1], 1)
    assert storage.changes == [
        f"delete {made[0].path}",
        f"delete {paths.data_directory(1, 1)}",
        f"delete {paths.step_directory(1)}",
    ]


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_what_a_death_leaves_goes_next_time(fail_at: int, tmp_path: Path) -> None:
    made = [commit(LocalStorage(tmp_path), step) for step in (1, 2)]
    storage = FaultyStorage(LocalStorage(tmp_path), fail_at=fail_at, how="death")
    with pytest.raises(BaseException, match="delete"):
        prune(storage, KEEP_ONE, made[-1], 1)
    whole = [m.step for m in list_checkpoints(LocalStorage(tmp_path)).manifests]
    assert whole == ([2, 1] if fail_at == 1 else [2])
    prune(LocalStorage(tmp_path), KEEP_ONE, made[-1], 1)
    assert steps(LocalStorage(tmp_path)) == [2]


def test_being_read_it_stays_until_the_reader_is_done_or_long_dead(storage: Storage) -> None:
    made = [commit(storage, step) for step in (1, 2)]
    with reading(storage, made[0]):
        assert prune(storage, KEEP_ONE, made[1], 1).kept[made[0].path] == "being read"
    storage.put(paths.lease(1, 1, time.time() - LEASE_SECONDS + 100, "a"), b"{}")
    assert prune(storage, KEEP_ONE, made[1], 1).deleted == ()
    storage.delete(paths.lease(1, 1, time.time() - LEASE_SECONDS + 100, "a"))
    storage.put(paths.lease(1, 1, time.time() - LEASE_SECONDS - 100, "b"), b"{}")
    assert prune(storage, KEEP_ONE, made[1], 1).deleted == (made[0].path,)
    assert steps(storage) == [2]


@pytest.mark.parametrize("when", ["listed", "manifest gone"])
@pytest.mark.parametrize("mark", ["pin", "reading"])
def test_who_comes_while_it_is_being_deleted_gets_it_or_is_told(when: str, mark: str, tmp_path: Path) -> None:
    """At each moment, either the newcomer is told that it is gone, or it stays whole."""
    made = [commit(LocalStorage(tmp_path), step) for step in (1, 2)]

    class Meeting(LocalStorage):
        """The newcomer has looked for the manifest just before it goes, or puts its mark just before."""

        def delete(self, path: str) -> None:
            if path == made[0].path:
                inner = LocalStorage(tmp_path)
                name = paths.pin(1, 1) if mark == "pin" else paths.lease(1, 1, time.time(), "a")
                if when == "manifest gone":
                    super().delete(path)
                inner.put(name, b"{}")
            super().delete(path)

    pruned = prune(Meeting(tmp_path), KEEP_ONE, made[1], 1)
    assert pruned.deleted == ()
    assert pruned.kept[made[0].path] == {"pin": "pinned", "reading": "being read"}[mark]
    storage = LocalStorage(tmp_path)
    assert decode(storage.read(made[0].path), "m") == made[0]
    assert storage.list(paths.data_directory(1, 1)) == ["full.pt"]


def test_a_plan_that_has_become_old_is_checked_again(storage: Storage) -> None:
    made = [commit(storage, step) for step in (1, 2, 3)]
    plan = plan_pruning(list_checkpoints(storage), KEEP_ONE, made[-1], 1)
    assert [checkpoint.manifest.step for checkpoint, _ in plan.delete] == [1, 2]
    pin(storage, made[0])
    done = carry_out(storage, plan)
    assert done.deleted == (made[1].path,) and done.kept[made[0].path] == "pinned"
    assert steps(storage) == [1, 3]


def test_remnants_of_older_attempts_are_swept_at_any_step(storage: Storage) -> None:
    """The fence lets none of them be committed; what this attempt or a newer one writes is left."""
    remnants = [write_data(storage, step, attempt) for step, attempt in ((1, 1), (5, 1), (9, 2))]
    mine, newer = write_data(storage, 9, 3), write_data(storage, 1, 4)
    half = write_data(storage, 3, 2)
    newest = commit(storage, 5, 3)
    commit(storage, 3, 1)
    pruned = prune(storage, KEEP_TWO, newest, 3)
    assert sorted(pruned.swept) == sorted([*remnants, half])
    assert storage.list(paths.step_directory(1)) == [newer.rpartition("/")[2]]
    assert storage.list(paths.step_directory(3)) == ["data-000001", "manifest-000001.json"]
    assert storage.list(paths.step_directory(9)) == [mine.rpartition("/")[2]]


def test_the_directory_of_a_step_to_come_is_left(local: CheckpointingPlace) -> None:
    """A save of that step may be about to put its first file there."""
    storage = storage_of(local)
    for step in (3, 9):
        write_data(storage, step)
    newest = [commit(storage, step, 2) for step in (2, 5)][-1]
    assert len(prune(storage, KEEP_TWO, newest, 2).swept) == 2
    assert steps(storage) == [2, 5, 9]
    assert storage.list(paths.step_directory(9)) == []


def test_this_attempt_s_own_remnants_are_swept_below_the_oldest_checkpoint(storage: Storage) -> None:
    """Case c33."""
    write_data(storage, 1)
    write_data(storage, 9)
    newest = [commit(storage, step) for step in (2, 3)][-1]
    assert prune(storage, KEEP_TWO, newest, 1).swept == (paths.data_directory(1, 1),)
    assert steps(storage) == [2, 3, 9]


def test_data_of_a_damaged_manifest_and_data_being_read_are_not_swept(storage: Storage) -> None:
    damaged, read = write_data(storage, 1, 1), write_data(storage, 2, 1)
    storage.put(paths.manifest(1, 1), b"torn")
    storage.put(paths.lease(2, 1, time.time(), "a"), b"{}")
    assert prune(storage, KEEP_ONE, commit(storage, 5, 2), 2).swept == ()
    assert storage.list(damaged) == storage.list(read) == ["full.pt"]


def test_c69_the_best_survives_on_the_storage(storage: Storage) -> None:
    """Case c69, scores .5 .9 | restart | .6 .7."""
    best = Retention(policies=(Newest(1), Best(1, "score", "max")), unhealthy=1)
    for step, attempt, score in ((1, 1, 0.5), (2, 1, 0.9), (3, 2, 0.6), (4, 2, 0.7)):
        prune(storage, best, commit(storage, step, attempt, metrics={"score": score}), attempt)
    assert [m.metrics["score"] for m in list_checkpoints(storage).manifests] == [0.7, 0.9]


def test_c72_the_last_healthy_one_survives_on_the_storage(storage: Storage) -> None:
    for step in range(10, 90, 10):
        prune(storage, KEEP_TWO, commit(storage, step, non_finite=("w",) if step >= 25 else ()), 1)
    assert [(m.step, m.non_finite) for m in list_checkpoints(storage).manifests] == [
        (80, ("w",)), (70, ("w",)), (20, ()), (10, ()),
    ]  # fmt: skip


class Failing(LocalStorage):
    """Fails at paths that hold ``where``."""

    def __init__(self, root: Any, where: str, error: Callable[[str], Exception]) -> None:
        super().__init__(root)
        self.where, self.error, self.asked = where, error, 0

    def delete(self, path: str) -> None:
        if self.where in path:
            self.asked += 1
            raise self.error(path)
        super().delete(path)


def three(root: Path) -> Manifest:
    return [commit(LocalStorage(root), step) for step in (1, 2, 3)][-1]


def test_trouble_is_told_and_the_rest_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = three(tmp_path)
    pruned = prune(Failing(tmp_path, "step-0000000001/", AccessDenied), KEEP_ONE, newest, 1)
    assert pruned.trouble == (paths.manifest(1, 1),)
    assert steps(LocalStorage(tmp_path)) == [1, 3]
    assert "old checkpoints could not be deleted" in caplog.text


def test_a_storage_that_hangs_is_asked_once(tmp_path: Path) -> None:
    newest = three(tmp_path)
    storage = Failing(tmp_path, "step-", StorageTimeout)
    assert len(prune(storage, KEEP_ONE, newest, 1).trouble) == storage.asked == 1


def test_a_listing_that_fails_is_no_error_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = three(tmp_path)

    class Unlisted(LocalStorage):
        def list(self, path: str) -> list[str]:
            raise NotFound("nowhere")

    assert prune(Unlisted(tmp_path), KEEP_ONE, newest, 1).trouble == ("nowhere",)
    assert "could not be looked for" in caplog.text
