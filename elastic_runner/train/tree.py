"""One order of addition for the logical shards of a global batch, whoever runs them. Pure.

The shards are the leaves of a binary tree: each subtree is cut in the middle. A rank adds up the complete subtrees of
its own run of shards; what the ranks have, put together in the same tree, is the sum that one process would get, to the
last bit. Where the world size is a power of two, a run is one subtree (or two, where the shards do not divide by it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A subtree, by the run of shards below it."""

    first: int
    """First shard."""
    last: int
    """One past the last shard."""

    def halves(self) -> tuple[Node, Node]:
        """What it is cut into; for a subtree of two shards or more."""
        middle = (self.first + self.last) // 2
        return Node(self.first, middle), Node(middle, self.last)


def cover(run: range, *, shards: int) -> list[Node]:
    """The complete subtrees that make up a contiguous ``run`` of the tree's shards, from left to right.

    They are fewer than 2 log2(shards) + 1.
    """

    def within(node: Node) -> list[Node]:
        if run.start <= node.first and node.last <= run.stop:
            return [node]
        if node.last <= run.start or run.stop <= node.first:
            return []
        left, right = node.halves()
        return within(left) + within(right)

    return within(Node(0, shards))


def are_halves(left: Node, right: Node, *, shards: int) -> bool:
    """Whether the two make up one subtree."""
    node = Node(0, shards)
    while node.last - node.first > 1:
        first, second = node.halves()
        if (first, second) == (left, right):
            return True
        node = first if left.first < first.last else second
    return False


class TreeSum(Generic[T]):
    """Adds up neighbouring subtrees, given from left to right: two halves become one as soon as both are there.

    It holds one value for each subtree of ``cover``, and no more than log2(shards) others meanwhile.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._shards = shards
        self._add = add
        self._stack: list[tuple[Node, T]] = []

    def other_half(self, node: Node) -> T | None:
        """The sum that the one over ``node``, which comes next, will be added to at once, if there is one."""
        if not self._stack or not are_halves(self._stack[-1][0], node, shards=self._shards):
            return None
        return self._stack[-1][1]

    def push(self, node: Node, value: T) -> None:
        """Take the sum over the next subtree. ``add`` may change and return its first argument."""
        while (before := self.other_half(node)) is not None:
            left, _ = self._stack.pop()
            node, value = Node(left.first, node.last), self._add(before, value)
        self._stack.append((node, value))

    def take(self) -> list[tuple[Node, T]]:
        """The subtrees there are, each with its sum; none is left."""
        taken, self._stack = self._stack, []
        return taken
