"""Calls of an fsspec filesystem that can be given up for good and that tell how far they are."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.dirfs import DirFileSystem

from elastic_runner.storage.faults import Deadline


class Call:
    """Calls of the filesystem within one try. Given up, a pending request is cancelled and no other begins."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        # It wraps others, whose methods may not be coroutines.
        self._cancels = isinstance(filesystem, AsyncFileSystem) and not isinstance(filesystem, DirFileSystem)
        self._pending: concurrent.futures.Future[Any] | None = None
        self._over = False
        self._lock = threading.Lock()

    def __call__(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call ``method``. Raises CancelledError once given up: what comes late has no effect on the caller."""
        if not self._cancels:
            result = getattr(self._fs, method)(*args, **keywords)
            if self._over:
                raise concurrent.futures.CancelledError
            return result
        with self._lock:
            if self._over:
                raise concurrent.futures.CancelledError
            work = getattr(self._fs, f"_{method}")(*args, **keywords)
            self._pending = asyncio.run_coroutine_threadsafe(work, self._fs.loop)
        return self._pending.result()

    def give_up(self) -> bool:
        """Cancel; False where the filesystem has no way to."""
        with self._lock:
            self._over = True
            return self._pending is not None and self._pending.cancel()


def fill(window: memoryview, start: int, part: int, call: Call, at: str) -> None:
    """Fill ``window`` with the bytes of ``at`` from ``start``, ``part`` bytes a request."""
    offsets = range(0, len(window), part)
    ends = [min(offset + part, len(window)) for offset in offsets]
    found = call("cat_ranges", [at] * len(ends), [start + each for each in offsets], [start + each for each in ends])
    for offset, end, block in zip(offsets, ends, found, strict=True):
        if isinstance(block, BaseException):
            raise block
        if len(block) != end - offset:
            raise OSError(f"{len(block)} bytes came where {end - offset} were asked for")
        window[offset:end] = block


class Progress(Callback):
    """Tells a deadline how many bytes are done; ``moved`` that there were some."""

    def __init__(self, deadline: Deadline, moved: Callable[[], None]) -> None:
        super().__init__()
        self._deadline = deadline
        self._moved = moved

    def call(self, hook_name: str | None = None, **keywords: Any) -> None:
        """Each step of a transfer ends here."""
        self._deadline.progress(self.value)
        self._moved()
