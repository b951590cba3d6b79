"""The flush: what is only in a node's memory is saved, when its launcher gives up.

    python -m elastic_runner.worker.flush AGENT_DIRECTORY MEMORY_FILE...

It saves the state that the next attempt would have gone on from, and is an attempt itself, which trains nothing: its
number keeps away whatever of the attempts before may still run. It says what has come of it in one line, or nothing
where there is nothing to do, and exits with 1 where it failed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

from elastic_runner.checkpoint.manifest import Checkpoint, create_fenced, list_checkpoints
from elastic_runner.checkpoint.snapshot import read_snapshot
from elastic_runner.checkpoint.snapshot_source import Common, Found, newest_common
from elastic_runner.checkpoint.tools.in_memory import contents_in_memory
from elastic_runner.checkpoint.tools.whole import given_up, write_files
from elastic_runner.checkpoint.trust import Health, blamed, describe_non_finite, health, memory_distrusted
from elastic_runner.data.ledger import LedgerWriter, read_records
from elastic_runner.data.lineage import Lineage
from elastic_runner.data.skips import recorded
from elastic_runner.errors import Damaged, ElasticRunnerError, NonFiniteError, ReplayDiverged
from elastic_runner.history import End, read_ends
from elastic_runner.storage import Storage, open_storage
from elastic_runner.train.lines import missing
from elastic_runner.train.skips import unanswered
from elastic_runner.verdict import RunPlace, last_place
from elastic_runner.worker.attempt import begin_next, check_fence

_OPERATION = 60.0
"""Seconds for one operation of a storage, at most: the launcher does not wait for long."""
_OF_THE_STATE = {NonFiniteError.__name__, ReplayDiverged.__name__}
"""Failures that the state led to: the step before is in memory, and a start from there would lead to them again."""


def flush(place: RunPlace, files: Sequence[str]) -> str:
    """Save what is newer in ``files`` than all healthy checkpoints, and say so, or why not; "": there is nothing.

    ``place``: of the newest attempt that the launcher knows of. Raises Fenced when there is a newer one, StorageError,
    Damaged, NotData, OSError.
    """
    found, refused = _look(place, files)
    keep = max(found, key=lambda one: one.snapshot.head.attempt).snapshot.head.keep if found else None
    if keep is not None:
        seconds = min(keep.seconds, _OPERATION)
        run = open_storage(place.url, place.options, seconds)
        checkpoints = open_storage(keep.url, keep.options, seconds)
        known, lineage = list_checkpoints(checkpoints).checkpoints, Lineage()
        ends = unanswered(read_ends(run), recorded(lineage.through(read_records(run))))
        state, more = choose(found, ends, known, demote_after=keep.demote_after)
        if state is not None:
            return _save(state, lineage, checkpoints, run, place.attempt) if _is_ours(state) else ""
        refused += more
    return f"what is in memory is not saved: {refused[0]}" if refused else ""


def _look(place: RunPlace, files: Sequence[str]) -> tuple[list[Found], list[str]]:
    """What is sealed of this run, and what cannot be used, in words."""
    found, refused = [], []
    for path in files:
        try:
            snapshot = read_snapshot(path)
        except (Damaged, OSError) as error:
            refused.append(str(error))
            continue
        if snapshot is not None and snapshot.head.keep is not None and snapshot.head.keep.run == place.url:
            found.append(Found("here", snapshot))
    return found, refused


def choose(
    found: Sequence[Found], ends: Sequence[End], known: Sequence[Checkpoint], *, demote_after: int
) -> tuple[Common | None, list[str]]:
    """The state that the next attempt would go on from, if that is in memory, and why others are not used. Pure."""
    distrusted = blamed(ends, demote_after)
    newest = max((c.manifest.step for c in known if health(c, distrusted) == Health.HEALTHY), default=-1)
    led = max((end.attempt for end in ends if end.kind in _OF_THE_STATE), default=0)
    trusted_after = max(led, memory_distrusted(ends, demote_after))
    whole, refused = newest_common(found, newer_than=newest, trusted_after=trusted_after)
    return (whole[0] if whole else None), refused


def _is_ours(state: Common) -> bool:
    """Whether to save it is this node's part. Under DDP each node has all of it: rank 0's does."""
    return any(one.snapshot.head.rank == 0 for one in state.found)


def _save(state: Common, lineage: Lineage, checkpoints: Storage, run: Storage, known: int) -> str:
    """Commit it as the attempt after ``known``: the data first, then the ledger, the manifest last."""
    head, contents = state.head, contents_in_memory(state)
    facts = {"flush": head.step, "workers": [{"host": socket.gethostname(), "pid": os.getpid()}]}
    attempt = begin_next(run, known, facts)
    with given_up(checkpoints, head.step, attempt):
        manifest = write_files(
            checkpoints,
            contents,
            step=head.step,
            attempt=attempt,
            world_size=head.world_size,
            format="sharded",
            metrics={},
            tick=lambda more: None,
        )
        check_fence(run, attempt)
        _put_on_record(state, lineage, LedgerWriter(run, attempt), attempt)
        create_fenced(checkpoints, manifest, partial(check_fence, run, attempt))
    doubt = f", with {describe_non_finite(manifest)}" if manifest.non_finite else ""
    return f"step {head.step}, which was in memory only, is saved ({manifest.size / 1e6:.1f} MB){doubt}"


def _put_on_record(state: Common, lineage: Lineage, ledger: LedgerWriter, attempt: int) -> None:
    """What came with the state and is not there: a checkpoint must not be younger than the record of its steps. Then
    what the checkpoint rests on, as any attempt says it."""
    head = state.head
    for line in missing(state.lead.snapshot.lines, lineage.reached(head.attempt), head.step):
        ledger.append(line)
    start = {"event": "start", "resumed_at": head.step, "rests_on": head.attempt}
    ledger.append({**start, "attempt": attempt, "time": round(time.time(), 3)})
    ledger.flush()


def main(directory: str, files: Sequence[str]) -> int:
    """Flush, and print what has come of it."""
    place = last_place(directory)
    try:
        said = "" if place is None else flush(place, files)
    except (ElasticRunnerError, OSError) as error:
        print(f"what is in memory is not saved: {error}")
        return 1
    if said:
        print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
