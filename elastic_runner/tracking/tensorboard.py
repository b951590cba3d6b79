"""TensorBoard's event files, in ``tensorboard/`` of the run directory, on any storage.

Files of an attempt sort behind those of attempts before, whatever the clocks of their hosts say: TensorBoard reads a
directory in the order of names. Each begins by taking back what is on file of its steps (SessionLog.START, see
``_CheckForRestartAndMaybePurge`` in TensorBoard's event_accumulator.py, read at 2.21).
"""

from __future__ import annotations

import io
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from elastic_runner import paths
from elastic_runner.errors import StorageError
from elastic_runner.observability.summary import Status
from elastic_runner.tracking.protocol import Opener, TrackedRun


class TensorBoard:
    """See Tracker. Where the storage can append, each line is there at once; an object store gets a file per flush."""

    def __init__(self, run: TrackedRun, run_id: str | None, step: int) -> None:
        self.run_id = run.id
        self.holds = step
        self._storage = run.storage
        self._attempt = run.attempt
        names = run.storage.list(paths.TENSORBOARD)
        self._segment = len([name for name in names if name.startswith(paths.events_of(run.attempt))])
        self._fresh = True
        """Whether nothing is in this segment yet."""
        self._waiting = b""
        """What an object store has not got yet."""

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See Tracker. Raises StorageError."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        record = _record(Event(wall_time=at, step=step, summary=summary))
        if self._fresh:
            start = SessionLog(status=SessionLog.START)
            header = _record(Event(wall_time=at, file_version="brain.Event:2"))
            record = header + _record(Event(wall_time=at, step=self.holds + 1, session_log=start)) + record
        try:
            if not self._storage.append(self._path, record):
                self._waiting += record
        except StorageError:
            self._next_segment()  # readers stop at what the error may have left of the record
            raise
        self._fresh = False
        self.holds = step

    def flush(self) -> None:
        """See Tracker. Raises StorageError."""
        if self._waiting:
            self._storage.put(self._path, self._waiting)
            self._waiting = b""
            self._next_segment()
        elif not self._fresh:
            self._storage.sync(self._path)

    def close(self, status: Status) -> None:
        """See Tracker."""

    @property
    def _path(self) -> str:
        return paths.events(self._attempt, self._segment)

    def _next_segment(self) -> None:
        self._segment += 1
        self._fresh = True


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


OPENER = Opener(open=TensorBoard, rewinds=True)
