"""Reading: the files of one rank come in beside everything else, a few ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from elastic_runner.checkpoint.image import PrivateBuffer

Read = Callable[[str, memoryview], None]
"""Fill the memory with the file of that name."""

READERS = 2
"""Files that are read at a time, so that the disk has work between the end of one and the beginning of the next."""
BUFFERS = 4
"""One that is in use, two that are read into, and one to go on with while the ranks agree that another is free."""
HUGE_PAGE = 2 << 20
"""Linux aligns to it, so that all of it can be huge pages, mappings of a multiple of it only."""


class Reading:
    """Files in the order of ``begin``, each in one of a few buffers until ``done``. For one thread."""

    def __init__(self, read: Read, room: int) -> None:
        """``room``: bytes of the largest file; only what is read into takes memory."""
        self._read = read
        self._room = -(-max(room, 1) // HUGE_PAGE) * HUGE_PAGE
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="restore")
        self._waiting: deque[tuple[str, int]] = deque()
        self._coming: dict[str, tuple[PrivateBuffer, Future[memoryview]]] = {}
        self._free: list[PrivateBuffer] = []
        self._made = 0

    def begin(self, name: str, size: int) -> None:
        """Read a file of ``size`` bytes when its turn comes."""
        self._waiting.append((name, size))
        self._go_on()

    @property
    def begun(self) -> tuple[str, ...]:
        """Files that are read or will be, in order."""
        return (*self._coming, *(name for name, _ in self._waiting))

    def take_over(self, names: Sequence[str], sizes: Mapping[str, int]) -> None:
        """Read these and no others; what was begun of them is gone on with."""
        self._waiting.clear()
        for name in [name for name in self._coming if name not in names]:
            self.done(name)
        for name in names:
            if name not in self._coming:
                self.begin(name, sizes[name])

    def wait(self, name: str) -> memoryview:
        """The file, when it is there; valid until ``done``. Raises what reading it raised."""
        return self._coming[name][1].result()

    def done(self, name: str) -> None:
        """The file's buffer is free for another one."""
        buffer, future = self._coming.pop(name)
        with suppress(Exception):  # of one that nobody has asked for
            future.result()
        self._free.append(buffer)
        self._go_on()

    def close(self) -> None:
        """Wait for the reads in progress, and forget the others."""
        self._waiting.clear()
        self._pool.shutdown(cancel_futures=True)
        self._coming.clear()
        self._free.clear()

    def _go_on(self) -> None:
        while self._waiting and (self._free or self._made < BUFFERS):
            name, size = self._waiting.popleft()
            buffer = self._free.pop() if self._free else self._make()
            self._coming[name] = (buffer, self._pool.submit(self._bring, name, buffer.view[:size]))

    def _make(self) -> PrivateBuffer:
        self._made += 1
        return PrivateBuffer(self._room)

    def _bring(self, name: str, view: memoryview) -> memoryview:
        self._read(name, view)
        return view
