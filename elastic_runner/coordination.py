"""Agreement among the ranks of a job: every exchange is labelled, so that ranks which took different ways notice.

What is decided (a stop, a checkpoint, an error) is decided once and known to all before the next collective.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from elastic_runner.errors import ElasticRunnerError, LoopError, PeerLost, PhaseTimeout

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class _Outcome:
    label: str
    value: Any = None
    error: BaseException | None = None
    pending: bool = False
    """Still at work: there will be another round."""


class Coordinator:
    """Labelled exchanges over one (gloo) process group; of one rank when ``group`` is None.

    Raises PeerLost or PhaseTimeout when a peer is gone or does not come, LoopError when the ranks' labels differ.
    ``every``: a rank that is at work within an exchange says so every so many seconds; None: never. Those that wait for
    it call ``moved`` then, which restarts their clocks: its own clock judges it, by the bytes that it moves itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        moved: Callable[[], None] = lambda: None,
        every: float | None = None,
    ) -> None:
        self.group = group
        self.moved = moved
        self._every = every
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._closed = False

    def close(self) -> None:
        """Let go of the group.

        The last reference's end joins gloo's threads. One still busy with the tail of its last work when the
        interpreter shuts down ends the process by SIGABRT ("terminate called without an active exception").
        """
        self.group = None
        self._closed = True

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, which does what must happen once in the job."""
        return self.rank == 0

    def gather(self, label: str, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on every rank."""
        return self._all_values(_Outcome(label, value))

    def agree(self, label: str, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank. If it raises anywhere, the lowest such rank's error is raised on all."""
        return self._all_values(self._attempt(label, action))

    def once(self, label: str, action: Callable[[], T]) -> T:
        """Run ``action`` on global rank 0 alone; its result, or its error, is everybody's."""
        mine = self._attempt(label, action) if self.is_main else _Outcome(label)
        outcome = self._exchange(mine)[0]
        if outcome.error is not None:
            _raise(outcome.error, 0, self.rank)
        return outcome.value

    def decide(self, label: str, value: T, action: Callable[[list[T]], Sequence[U]]) -> U:
        """Send every rank's ``value`` to global rank 0 and get back this rank's part of what ``action`` makes of them.

        What is large and different on each rank goes to one place only, not to all. An error in ``action`` is
        everybody's. Unlabelled: call it where an exchange has just shown that all ranks are at the same place.
        """
        self._check_open(label)
        if self.group is None:
            return action([value])[0]
        asked: list[Any] | None = [None] * self.world_size if self.is_main else None
        mine: list[Any] = [None]
        with _mapped(label):
            dist.gather_object(_sendable(_Outcome(label, value)), asked, group=self.group, group_dst=0)
            answers = None if asked is None else _answers(label, asked, action)
            dist.scatter_object_list(mine, answers, group=self.group, group_src=0)
        if mine[0].error is not None:
            _raise(mine[0].error, 0, self.rank)
        return mine[0].value

    def sum(self, label: str, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum of a CPU tensor over ranks, in rank order.

        Gathered and added here: an all-reduce of one rank and a labelled exchange of another could not tell each
        other apart.
        """
        self._check_open(label)
        if self.group is None:
            return values
        return torch.stack(self.gather(label, values)).sum(0)

    def broadcast(self, label: str, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous CPU ``tensor`` on every rank with that of rank ``source``. Unlabelled, as ``decide``."""
        self._check_open(label)
        if self.group is not None and tensor.numel():
            with _mapped(label):
                dist.broadcast(tensor, group=self.group, group_src=source)
            self.moved()

    def _check_open(self, label: str) -> None:
        """Without its group a rank of several would agree with itself alone."""
        if self._closed and self.world_size > 1:
            raise PeerLost(f"'{label}': this rank has left the group")

    def _all_values(self, mine: _Outcome) -> list[Any]:
        outcomes = self._exchange(mine)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                _raise(outcome.error, rank, self.rank)
        return [outcome.value for outcome in outcomes]

    def _attempt(self, label: str, action: Callable[[], T]) -> _Outcome:
        if self.group is None or self._every is None:
            return _attempt(label, action)
        with _Company(lambda: self._round(_Outcome(label, pending=True)), self._every):
            return _attempt(label, action)

    def _exchange(self, mine: _Outcome) -> Sequence[_Outcome]:
        """Rounds until nobody is at work any more."""
        outcomes = self._round(mine)
        while any(outcome.pending for outcome in outcomes):
            self.moved()
            outcomes = self._round(mine)
        return outcomes

    def _round(self, mine: _Outcome) -> Sequence[_Outcome]:
        self._check_open(mine.label)
        if self.group is None:
            return [mine]
        gathered: list[Any] = [None] * self.world_size
        with _mapped(mine.label):
            dist.all_gather_object(gathered, _sendable(mine), group=self.group)
        labels = {outcome.label for outcome in gathered}
        if len(labels) > 1:
            met = ", ".join(f"rank {rank}: {o.label}" for rank, o in enumerate(gathered))
            raise LoopError(
                f"ranks are in different places ({met}). Call it on every rank; "
                "what only rank 0 shall do belongs inside coordinator.once(...)."
            )
        return gathered


class _Company:
    """A thread that takes part in a round every so many seconds, while the one that enters is at work: none where that
    is done sooner. What it raises is raised on leaving."""

    def __init__(self, take_part: Callable[[], object], every: float) -> None:
        self._take_part = take_part
        self._every = every
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="elastic_runner company", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if error is None:  # else this process ends: it waits for nobody
            self._thread.join()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            while not self._over.wait(self._every):
                self._take_part()
        except BaseException as error:
            self._error = error


class Place(Protocol):
    """What the lower layers need to know of the worker they run in."""

    coordinator: Coordinator
    """For steps and decisions."""
    checkpoint_coordinator: Coordinator
    """For saving and loading, with the deadlines of those."""
    background_coordinator: Coordinator
    """For what is written beside training: its exchanges must never meet those of the steps in one group."""
    device: torch.device
    """Where the model lives."""
    attempt: int
    """Number of this start of the run, from 1; the fence of everything that is committed."""
    seed: int
    """Seed of the run."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Enter a named phase with its own deadline."""
        ...


def _attempt(label: str, action: Callable[[], T]) -> _Outcome:
    # BaseException: torch's CheckpointException derives from it, and one rank's error must reach all.
    try:
        return _Outcome(label, value=action())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return _Outcome(label, error=_portable(error))


def _answers(label: str, asked: Sequence[_Outcome], action: Callable[[list[Any]], Sequence[Any]]) -> list[_Outcome]:
    """What ``decide`` sends back: to each rank its part, or to all the same error."""

    def parts() -> list[Any]:
        error = next((one.error for one in asked if one.error is not None), None)
        if error is not None:
            raise error
        parts = list(action([one.value for one in asked]))
        if len(parts) != len(asked):
            raise LoopError(f"'{label}': {len(parts)} parts for {len(asked)} ranks")
        return parts

    decided = _attempt(label, parts)
    answers = [_sendable(_Outcome(label, part)) for part in decided.value or ()]
    error = decided.error or next((answer.error for answer in answers if answer.error is not None), None)
    return answers if error is None else [_Outcome(label, error=error)] * len(asked)


def _sendable(outcome: _Outcome) -> _Outcome:
    # A value that cannot be pickled is an error like any other: the peers wait for this rank's answer.
    try:
        pickle.dumps(outcome)
    except Exception as error:
        reason = f"'{outcome.label}': a {type(outcome.value).__qualname__} cannot be sent to the other ranks: {error}"
        return _Outcome(outcome.label, error=LoopError(reason))
    return outcome


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ElasticRunnerError(f"{type(error).__name__}: {error}")
    return error


def _raise(error: BaseException, origin: int, rank: int) -> None:
    if origin != rank:
        error.add_note(f"raised on rank {origin}") if hasattr(error, "add_note") else None
    raise error


class _mapped:
    """Maps gloo's errors to ours, naming the exchange."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            text = str(error)
            if "DataLoader worker" in text:  # raised by torch's handler of SIGCHLD, wherever the program is
                return
            if "imed out" in text or "imeout" in text:
                raise PhaseTimeout(f"'{self.label}': a peer did not come in time ({text.splitlines()[0]})") from error
            raise PeerLost(f"'{self.label}': a peer went away ({text.splitlines()[0]})") from error
