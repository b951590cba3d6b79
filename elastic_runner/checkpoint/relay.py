"""Relay: the ranks of a node read each file once, into memory that all of them can copy from.

In every round each rank has read one file, and copies what it needs out of those of the round before. A restore needs
room for a few files per rank, not for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from elastic_runner.checkpoint.image import SharedBuffer
from elastic_runner.checkpoint.peer_memory import PeerFile, Probe, can_read, readable
from elastic_runner.checkpoint.reading import Reading
from elastic_runner.checkpoint.sharing import SHARED_BUFFERS, ByMapping, ByReading, Way
from elastic_runner.coordination import Coordinator

Use = Callable[[str, "memoryview | PeerFile"], None]
"""Take what this rank needs out of the file of that name."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Who reads what when."""

    ranks: tuple[int, ...]
    """The ranks that share with this one, itself included."""
    files: tuple[tuple[str, ...], ...]
    """Of each of them, its files in order."""
    count: int
    """Rounds, the same on every node."""
    shared: bool
    """Whether ranks share anywhere; else none has to wait for another."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a rank tells the others."""

    node: str
    """What ranks that can share have in common."""
    sizes: Mapping[str, int]
    """Bytes of the files it needs, by name."""
    begun: tuple[str, ...]
    """Files that it reads already; no two ranks the same."""
    probe: Probe
    """For the others to try whether they can read its memory."""


def schedule(
    rank: int, needs: Sequence[tuple[str, Mapping[str, int]]], begun: Sequence[Collection[str]] = ()
) -> Rounds:
    """Rounds for ``rank``. ``needs``: each rank's node and the sizes of the files it needs, by name. Pure.

    ``begun``: by rank, what it reads already: that stays its own to read, wherever it is needed.
    """
    plans: dict[tuple[int, ...], tuple[tuple[str, ...], ...]] = {}
    for ranks in _sharing(needs):
        wanted = {name for r in ranks for name in needs[r][1]}
        plans[ranks] = _deal(wanted, [begun[r] if begun else () for r in ranks])
    mine = next(ranks for ranks in plans if rank in ranks)
    return Rounds(
        ranks=mine,
        files=plans[mine],
        count=max(len(names) for files in plans.values() for names in files),
        shared=any(len(ranks) > 1 for ranks in plans),
    )


def _sharing(needs: Sequence[tuple[str, Mapping[str, int]]]) -> Iterator[tuple[int, ...]]:
    """The ranks of each node; where no two of them need the same file, as with shards, each by itself."""
    for node in dict.fromkeys(node for node, _ in needs):
        ranks = tuple(r for r, (n, _) in enumerate(needs) if n == node)
        wanted = [name for r in ranks for name in needs[r][1]]
        if len(wanted) == len(set(wanted)):
            yield from ((rank,) for rank in ranks)
        else:
            yield ranks


def _deal(wanted: Collection[str], begun: Sequence[Collection[str]]) -> tuple[tuple[str, ...], ...]:
    """Each file to one of the ranks, evenly: what it has begun, then in turn."""
    files = [[name for name in names if name in wanted] for names in begun]
    taken = {name for names in files for name in names}
    for name in sorted(set(wanted) - taken):
        min(files, key=len).append(name)
    return tuple(tuple(names) for names in files)


class Relay:
    """One restore's reading. ``run`` is collective; ``reading`` may have begun before."""

    def __init__(self, coordinator: Coordinator, node: str, reading: Reading) -> None:
        self._coordinator = coordinator
        self._rank = coordinator.rank
        self._node = node
        self._reading = reading

    def run(self, sizes: Callable[[], Mapping[str, int]], use: Use) -> None:
        """Read the files of those names and sizes, giving each to ``use`` when it is there, here or on another rank.

        Errors of any rank are every rank's. Raises PeerLost.
        """
        with ExitStack() as stack:
            probe = stack.enter_context(readable())
            needs = self._coordinator.agree(
                "restore: needs",
                lambda: Need(node=self._node, sizes=sizes(), begun=self._reading.begun, probe=probe),
            )
            rounds, way = self._share(stack, needs)
            of_all = {name: size for need in needs for name, size in need.sizes.items()}
            mine = rounds.files[rounds.ranks.index(self._rank)]
            self._reading.take_over(mine, of_all)
            if way is None:
                self._coordinator.agree("restore: read", partial(self._alone, mine, use))
            else:
                self._go_round(rounds, of_all, way, use)

    def _alone(self, files: Sequence[str], use: Use) -> None:
        for name in files:
            use(name, self._reading.wait(name))
            self._reading.done(name)

    def _go_round(self, rounds: Rounds, sizes: Mapping[str, int], way: Way, use: Use) -> None:
        mine = rounds.files[rounds.ranks.index(self._rank)]
        offers: list[int | None] = []

        def go(number: int) -> int | None:
            for rank, files in zip(rounds.ranks, rounds.files, strict=True):
                if 0 < number <= len(files):
                    name, handle = files[number - 1], offers[rank]
                    assert handle is not None, "it was read"
                    own = rank == self._rank
                    use(name, self._reading.wait(name) if own else way.open(rank, handle, sizes[name]))
            if number >= len(mine):
                return None
            view = self._reading.wait(mine[number])
            return way.offer(view) if len(rounds.ranks) > 1 else 0

        for number in range(rounds.count + 1):
            # Past this point everybody has read its file of this round and is done with those of the last one.
            offers = self._coordinator.agree(f"restore: round {number} of {rounds.count}", partial(go, number))
            if 0 < number <= len(mine):
                self._reading.done(mine[number - 1])

    def _share(self, stack: ExitStack, needs: Sequence[Need]) -> tuple[Rounds, Way | None]:
        """The plan, and the way to share by it; None where each rank reads for itself."""
        wants = [(need.node, need.sizes) for need in needs]
        begun = [need.begun for need in needs]
        rounds = schedule(self._rank, wants, begun)
        if not rounds.shared:
            return rounds, None
        others = [rank for rank in rounds.ranks if rank != self._rank]
        if all(self._coordinator.gather("restore: memory", all(can_read(needs[rank].probe) for rank in others))):
            return rounds, ByReading({rank: needs[rank].probe.pid for rank in others})
        if (way := self._map(stack, rounds, needs)) is not None:
            return rounds, way
        alone = [(f"rank {rank}", need.sizes) for rank, need in enumerate(needs)]
        return schedule(self._rank, alone, begun), None

    def _map(self, stack: ExitStack, rounds: Rounds, needs: Sequence[Need]) -> ByMapping | None:
        """Collective; None when any rank cannot map another's buffers."""
        largest = max((size for need in needs for size in need.sizes.values()), default=0)
        own: list[SharedBuffer] = []

        def make() -> list[str]:
            for _ in range(SHARED_BUFFERS if len(rounds.ranks) > 1 else 0):
                own.append(SharedBuffer(max(largest, 1)))
                stack.callback(own[-1].close)
            return [str(buffer.path) for buffer in own]

        files = self._coordinator.agree("restore: buffers", make)
        way = ByMapping(own)
        try:
            for rank in rounds.ranks:
                if rank != self._rank:
                    way.map(rank, files[rank])
            mapped = True
        except OSError:
            mapped = False
        return way if all(self._coordinator.gather("restore: shared", mapped)) else None


__all__ = ["Need", "Relay", "Rounds", "Use", "schedule"]
