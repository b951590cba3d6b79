"""The ledger: one line per committed optimizer step, and what else happened to the run.

Each attempt appends to files of its own (JSON lines). Its first line says where it resumed; before that come lines of
an earlier attempt's steps that it has found in memory.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from elastic_runner import paths
from elastic_runner.errors import NotFound, StorageError
from elastic_runner.storage import Storage

log = logging.getLogger(__name__)

Record = dict[str, Any]

_SEGMENT_LINES = 256
_BLOCK = 1 << 20
"""Bytes that are read at once: more than a segment on an object store has."""
_TORN = b"#torn\n"
"""Ends what an error may have left of a line, so that nobody takes it for one; it lacks its line break at least."""


class LedgerWriter:
    """Appends records of one attempt; used on global rank 0 only, by the steps and by a save beside them.

    Where the storage can append, each line is there at once and survives the process; ``flush`` makes it survive the
    machine. Object stores get a new segment every 256 lines and at each ``flush``. What is not flushed belongs to
    steps that will be done again. Trouble with the storage does not stop a step: its line waits for the next try.
    """

    def __init__(self, storage: Storage, attempt: int) -> None:
        self._storage = storage
        self._attempt = attempt
        self._segment = 0
        self._pending: list[bytes] = []
        self._appended = False
        self._trouble = False
        self._torn = False
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, record: Record) -> None:
        """Add one record."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            waiting = len(self._pending)
        try:
            if not self._append_pending() and waiting % _SEGMENT_LINES == 0:
                self.flush()
        except StorageError as error:
            if not self._trouble:
                log.warning("ledger lines wait in memory until the storage takes them: %s", error)
            self._trouble = True

    def flush(self) -> None:
        """Make all records so far durable. Raises StorageError."""
        with self._flushing:
            if self._append_pending():
                self._sync()
                return
            with self._lock:
                lines = list(self._pending)
            if lines:
                self._storage.put(paths.ledger_segment(self._attempt, self._segment), b"".join(lines))
                self._segment += 1
                self._trouble = False
                with self._lock:
                    del self._pending[: len(lines)]

    def _sync(self) -> None:
        if not self._appended:
            return
        self._appended = False  # before: a line that comes meanwhile is of the next flush
        try:
            self._storage.sync(paths.ledger_segment(self._attempt, 0))
        except StorageError:
            self._appended = True
            raise

    def _append_pending(self) -> bool:
        """Append what waits, where the storage can; whether nothing waits any more."""
        with self._lock:
            # One by one: of several in one call, an error would leave some written and all to be written again.
            while self._pending:
                line = (_TORN if self._torn else b"") + self._pending[0]
                self._torn = True
                if not self._storage.append(paths.ledger_segment(self._attempt, 0), line):
                    return False
                self._torn = self._trouble = False
                self._appended = True
                del self._pending[0]
            return True


def read_records(storage: Storage) -> Iterator[Record]:
    """All records in order of attempt; a torn last line of a segment is left out. No file is in memory as a whole."""
    for name in storage.list(paths.LEDGER):
        with suppress(NotFound):
            yield from parse(_lines(storage, f"{paths.LEDGER}/{name}"))


def _lines(storage: Storage, path: str) -> Iterator[bytes]:
    """With their line breaks, but for a torn last one."""
    offset, torn = 0, b""
    while True:
        block = storage.read_range(path, offset, _BLOCK)
        for line in (torn + block).splitlines(keepends=True):
            torn = b"" if line.endswith(b"\n") else line
            if not torn:
                yield line
        offset += len(block)
        if len(block) < _BLOCK or offset >= storage.size(path):  # an object store refuses to read from the end on
            return


def parse(lines: Iterable[bytes]) -> Iterator[Record]:
    """Records of whole lines; what is torn is left out, and what an append wrote that said it had failed, and wrote
    again."""
    whole = b""
    for line in lines:
        if line == whole:
            continue
        whole = whole if line == _TORN else line
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
