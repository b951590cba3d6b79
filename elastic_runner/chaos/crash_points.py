"""The crash-point checker: a save that fails at any of its operations leaves the old state or the new one.

After "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014): run once to list the operations, then
fail at each of them in turn, and look at what a restart would find.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from elastic_runner.chaos.faulty_storage import Died, FaultyStorage, How
from elastic_runner.errors import ElasticRunnerError
from elastic_runner.storage import Storage

T = TypeVar("T")


class CrashPointsFound(ElasticRunnerError):
    """A failure at some operation leaves neither the old nor the new state."""


def check_crash_points(
    prepare: Callable[[], Storage], save: Callable[[Storage], None], restore: Callable[[Storage], T], *, old: T, new: T
) -> list[str]:
    """Fail ``save`` at each of its changes to the storage, by an error and by death, and ``restore`` after it.

    ``prepare`` gives a fresh storage that holds the old state. ``restore`` returns what a new process finds, as
    something that compares. After an error ``save``, called again as a new attempt would, must succeed. Returns the
    changes that were tried. Raises CrashPointsFound naming every change after which the state is wrong.
    """
    counted = FaultyStorage(prepare())
    save(counted)
    wrong = []
    for number, change in enumerate(counted.changes, 1):
        for how in ("error", "death"):
            wrong += [
                f"{how} at {change}: {trouble}" for trouble in _try(prepare(), save, restore, number, how, old, new)
            ]
    if wrong:
        raise CrashPointsFound(f"{len(wrong)} of {2 * len(counted.changes)} failures lose state: " + "; ".join(wrong))
    return counted.changes


def _try(
    storage: Storage,
    save: Callable[[Storage], None],
    restore: Callable[[Storage], T],
    number: int,
    how: How,
    old: T,
    new: T,
) -> list[str]:
    with suppress(Exception, Died):
        save(FaultyStorage(storage, fail_at=number, how=how))
    trouble = []
    if (found := _found(restore, storage)) not in (old, new):
        trouble.append(f"found {found!r}")
    if how == "error":
        try:
            save(storage)
        except ElasticRunnerError as error:
            trouble.append(f"another try failed: {error}")
        if (found := _found(restore, storage)) != new:
            trouble.append(f"found {found!r} after another try")
    return trouble


def _found(restore: Callable[[Storage], T], storage: Storage) -> T | str:
    try:
        return restore(storage)
    except ElasticRunnerError as error:
        return f"{type(error).__name__}: {error}"
