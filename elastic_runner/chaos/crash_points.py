"""The crash-point checker: a save that fails at any of its operations leaves the old state or the new one.

After "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014): run once to list the operations, then
fail at each of them in turn, and look at what a restart would find.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Generic, TypeVar

from elastic_runner.chaos.faulty_storage import Died, FaultyStorage, How
from elastic_runner.errors import ElasticRunnerError
from elastic_runner.storage import Storage

T = TypeVar("T")

Save = Callable[[Storage], None]
Committed = Callable[[Storage], Collection[str]]


class CrashPointsFound(ElasticRunnerError):
    """A failure at some operation leaves neither the old nor the new state."""


def check_crash_points(
    prepare: Callable[[], Storage],
    save: Save,
    restore: Callable[[Storage], T],
    *,
    old: T,
    new: T,
    retry: Save | None = None,
    committed: Committed = lambda storage: (),
    reads: bool = False,
) -> list[str]:
    """Fail ``save`` at each of its changes to the storage, by an error and by death, and ``restore`` after it.

    ``prepare`` gives a fresh storage that holds the old state. ``restore`` returns what a new process finds, as
    something that compares. After an error ``save``, called again as a new attempt would, must succeed; ``retry`` is
    the same process trying again (after ``save`` on the same storage object). With ``reads``, what only looks fails as
    well, and each error is also tried as the beginning of an outage, in which what would make amends fails too.

    A save that is reported as failed may be whole, when only what follows its commit has failed: the new state is
    right then. But nothing may write over it or take parts of it away: ``committed`` names the files on which
    committed states rest, and none is touched before its state is withdrawn.

    Returns the operations that were tried. Raises CrashPointsFound naming every one after which the state is wrong.
    """
    check = _Check(prepare, save, restore, old, new, committed, reads)
    counted = _Watched(prepare(), committed, reads=reads)
    save(counted)
    wrong = [f"without a failure: {each}" for each in counted.touched]
    again = [("another try", save)] + ([("a try of the same process", retry)] if retry else [])
    failures = 0
    for number, change in enumerate(counted.changes, 1):
        for how in ("error", "outage", "death") if reads else ("error", "death"):
            for name, other in again if how != "death" else [("", None)]:
                failures += 1
                wrong += [f"{how} at {change}: {trouble}" for trouble in check.fail(number, how, name, other)]
    if wrong:
        raise CrashPointsFound(f"{len(wrong)} of {failures} failures lose state: " + "; ".join(wrong))
    return counted.changes


class _Check(Generic[T]):
    """One failure after the other; the arguments are those of ``check_crash_points``."""

    def __init__(
        self,
        prepare: Callable[[], Storage],
        save: Save,
        restore: Callable[[Storage], T],
        old: T,
        new: T,
        committed: Committed,
        reads: bool,
    ) -> None:
        self._prepare, self._save, self._restore = prepare, save, restore
        self._old, self._new = old, new
        self._committed, self._reads = committed, reads

    def fail(self, number: int, how: How, name: str, again: Save | None) -> list[str]:
        """What is wrong after a failure at operation ``number``, and after saving ``again``."""
        storage = self._prepare()
        faulty = _Watched(storage, self._committed, fail_at=number, how=how, reads=self._reads)
        with suppress(Exception, Died):
            self._save(faulty)
        trouble = []
        if (found := self._found(storage)) not in (self._old, self._new):
            trouble.append(f"found {found!r}")
        if again is not None:
            faulty.heal()
            try:
                again(faulty)
            except ElasticRunnerError as error:
                trouble.append(f"{name} failed: {error}")
            if (found := self._found(storage)) != self._new:
                trouble.append(f"found {found!r} after {name}")
        return trouble + faulty.touched

    def _found(self, storage: Storage) -> T | str:
        try:
            return self._restore(storage)
        except ElasticRunnerError as error:
            return f"{type(error).__name__}: {error}"


class _Watched(FaultyStorage):
    """Notes what is changed of committed states."""

    def __init__(
        self, inner: Storage, committed: Committed, *, fail_at: int | None = None, how: How = "error", reads: bool
    ) -> None:
        super().__init__(inner, fail_at=fail_at, how=how, reads=reads)
        self.touched: list[str] = []
        self._committed = committed

    def change(self, verb: str, path: str) -> None:
        super().change(verb, path)
        below = path + "/" if path else ""
        if any(each == path or each.startswith(below) for each in self._committed(self._inner)):
            self.touched.append(f"{verb} {path} touches what is committed")
