"""Which failures are their samples' fault, so that the global batch is to be skipped. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic_runner.data.skips import Skip
from elastic_runner.errors import ElasticRunnerError, names
from elastic_runner.history import FROM_OUTSIDE, HANG, End


def next_skip(ends: Iterable[End], known: Sequence[Skip], *, times: int, most: int) -> Skip | None:
    """The global batch to skip besides the ``known`` ones; None: none.

    That of the last ``times`` failures, if it is the same one each time, at the same step, with the same kind of error.
    What tells nothing of the samples is passed over. ``most``: skips in a run; ``times`` 0: never.
    """
    left = [end for end in unanswered(ends, known) if _may_be_of_samples(end)]
    last = left[-times or len(left) :]
    if len(known) >= most or not len(last) == times > 0 or len({_what(end) for end in last}) > 1:
        return None
    newest = last[-1]
    if newest.step is None or newest.epoch is None or newest.first is None or newest.last is None:
        return None
    said = newest.message.splitlines()[0] if newest.message else newest.kind
    return Skip(
        epoch=newest.epoch,
        first=newest.first,
        last=newest.last,
        step=newest.step,
        reason=f"step {newest.step} failed {times} times with them: {said}",
    )


def unanswered(ends: Iterable[End], skips: Iterable[Skip]) -> list[End]:
    """The ends that skips have not done away with: only these speak against a state."""
    skipped = {(skip.epoch, skip.first) for skip in skips}
    return [end for end in ends if (end.epoch, end.first) not in skipped or not _may_be_of_samples(end)]


def _what(end: End) -> tuple[object, ...]:
    return end.kind, end.step, end.epoch, end.first, end.last


def _may_be_of_samples(end: End) -> bool:
    # Of a loader process that died it is not known how far ahead of the step it was.
    return end.kind not in _NOT_OF_SAMPLES and "DataLoader worker (pid" not in end.message


_NOT_OF_SAMPLES = {*names(ElasticRunnerError), "KeyboardInterrupt", "SystemExit", HANG, *FROM_OUTSIDE}
"""Failures that other samples would not have kept away, or that have an answer of their own. Running out of memory is
none of them: it may be one long sample."""
