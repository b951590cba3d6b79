"""Relay: the ranks of a node read each file once, into memory that all of them see.

In every round each rank reads one file, while it copies what it needs out of those of the round before. With three
buffers per rank nobody's reading waits while the ranks agree, and a restore needs room for three files per rank, not
for the checkpoint.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastic_runner.checkpoint.image import PrivateBuffer, SharedBuffer
from elastic_runner.coordination import Coordinator

Read = Callable[[str, memoryview], None]
"""Fill the memory with the file of that name."""
Use = Callable[[str, memoryview], None]
"""Take what this rank needs out of the file of that name."""

BUFFERS = 3
"""Of each rank: one to read into, one to use, and one to go on with while the ranks agree that another is free."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Who reads what when."""

    ranks: tuple[int, ...]
    """The ranks that share with this one, itself included."""
    files: tuple[tuple[str, ...], ...]
    """Of each of them, its files in order."""
    count: int
    """Rounds, the same on every node."""


def schedule(rank: int, needs: Sequence[tuple[str, Mapping[str, int]]]) -> Rounds:
    """Rounds for ``rank``. ``needs``: each rank's node and the sizes of the files it needs, by name. Pure."""
    count = 0
    mine: Rounds | None = None
    for ranks in _sharing(needs):
        names = sorted({name for r in ranks for name in needs[r][1]})
        files = tuple(tuple(names[place :: len(ranks)]) for place in range(len(ranks)))
        count = max(count, len(files[0]))
        if rank in ranks:
            mine = Rounds(ranks=ranks, files=files, count=0)
    assert mine is not None
    return Rounds(ranks=mine.ranks, files=mine.files, count=count)


def _sharing(needs: Sequence[tuple[str, Mapping[str, int]]]) -> Iterator[tuple[int, ...]]:
    """The ranks of each node; where no two of them need the same file, as with shards, each by itself."""
    for node in dict.fromkeys(node for node, _ in needs):
        ranks = tuple(r for r, (n, _) in enumerate(needs) if n == node)
        wanted = [name for r in ranks for name in needs[r][1]]
        if len(wanted) == len(set(wanted)):
            yield from ((rank,) for rank in ranks)
        else:
            yield ranks


class Relay:
    """One restore's reading. Collective from construction to ``run``."""

    def __init__(self, coordinator: Coordinator, needs: Sequence[tuple[str, Mapping[str, int]]], read: Read) -> None:
        self._coordinator = coordinator
        self._read = read
        self._needs = list(needs)
        self._rounds = schedule(coordinator.rank, needs)
        self._buffers: list[SharedBuffer | PrivateBuffer] = []
        self._landing: PrivateBuffer | None = None
        self._sizes = {name: size for _, files in needs for name, size in files.items()}

    def run(self, use: Use) -> None:
        """Read everything, giving each file to ``use`` when it is there. Errors of any rank are every rank's."""
        with ExitStack() as stack:
            views = self._share(stack)
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="restore"))
            me = self._rounds.ranks.index(self._coordinator.rank)
            coming = deque(self._submit(pool, views[me], number) for number in range(BUFFERS - 1))

            def go(number: int) -> None:
                for place, files in enumerate(self._rounds.files):
                    if 0 < number <= len(files):
                        name = files[number - 1]
                        use(name, views[place][(number - 1) % BUFFERS][: self._sizes[name]])
                coming.popleft().result()

            for number in range(self._rounds.count + 1):
                # Past this point everybody has read its file of this round and is done with those of the last one.
                self._coordinator.agree(f"restore: round {number} of {self._rounds.count}", partial(go, number))
                coming.append(self._submit(pool, views[me], number + BUFFERS - 1))

    def _submit(self, pool: ThreadPoolExecutor, buffers: Sequence[memoryview], number: int) -> Future[None]:
        files = self._rounds.files[self._rounds.ranks.index(self._coordinator.rank)]
        if number >= len(files):
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing
        name = files[number]
        return pool.submit(self._bring, name, buffers[number % BUFFERS][: self._sizes[name]])

    def _bring(self, name: str, buffer: memoryview) -> None:
        """Read a file into ``buffer``. Direct I/O into shared memory, page by page, takes more than twice the time of
        direct I/O into huge pages and a copy.
        """
        if self._landing is None:
            self._read(name, buffer)
            return
        landed = self._landing.view[: len(buffer)]
        self._read(name, landed)
        buffer[:] = landed

    def _share(self, stack: ExitStack) -> list[list[memoryview]]:
        """The buffers of each rank that shares, by place. Where they cannot be shared, each rank reads for itself."""
        while True:
            places = self._rounds.ranks
            shared = self._coordinator.agree("restore: buffers", partial(self._make_buffers, stack))
            found: list[list[memoryview]] = []
            try:
                for place in places:
                    own = place == self._coordinator.rank
                    found.append(
                        [b.view for b in self._buffers] if own else [_mapped(Path(path)) for path in shared[place]]
                    )
            except OSError:
                found = []
            if all(self._coordinator.gather("restore: shared", bool(found))):
                return found
            alone = [(f"rank {rank}", files) for rank, (_, files) in enumerate(self._needs)]
            self._rounds = schedule(self._coordinator.rank, alone)

    def _make_buffers(self, stack: ExitStack) -> list[str]:
        """This rank's own; where others find them, if others are to."""
        files = self._rounds.files[self._rounds.ranks.index(self._coordinator.rank)]
        self._buffers = []
        alone = len(self._rounds.ranks) == 1
        self._landing = None if alone or not files else PrivateBuffer(max(self._sizes[name] for name in files))
        for sizes in ([self._sizes[name] for name in files[k::BUFFERS]] for k in range(min(BUFFERS, len(files)))):
            buffer = PrivateBuffer(max(sizes)) if alone else SharedBuffer(max(sizes))
            self._buffers.append(buffer)
            if isinstance(buffer, SharedBuffer):
                stack.callback(buffer.close)
        return [str(buffer.path) for buffer in self._buffers if isinstance(buffer, SharedBuffer)]


def _mapped(path: Path) -> memoryview:
    """Another process's buffer."""
    with path.open("r+b") as file:
        found = mmap.mmap(file.fileno(), 0)
    return memoryview(found)
