"""The order in which a turn store evicts its leaves, the least recently used first. The store holds the lock."""

import heapq
from collections.abc import Mapping
from itertools import count

from kvserve.sessions.node_state import NodeState
from kvserve.sessions.seen import PathNode


class LeafOrder:
    """A heap of (last use, serial, leaf). An entry is stale, and skipped, once its node was used again, has children or
    was dropped; every leaf has one entry that is not. Reads the store's map of nodes and sets when a node was used."""

    def __init__(self, kept: Mapping[PathNode, NodeState]) -> None:
        self._kept = kept
        self._heap: list[tuple[int, int, PathNode]] = []
        self._serials = count()
        self._clock = 0

    def next_use(self) -> int:
        """A number that is higher at every use."""
        self._clock += 1
        return self._clock

    def touch(self, node: PathNode) -> None:
        """The node is used now."""
        self._kept[node].used = self.next_use()
        self.add(node)

    def add(self, node: PathNode) -> None:
        """Add an entry for the node, if it is a leaf."""
        kept = self._kept[node]
        if kept.num_children:
            return
        if len(self._heap) > 2 * len(self._kept) + 64:
            self.drop_stale()
        heapq.heappush(self._heap, (kept.used, next(self._serials), node))

    def pop(self) -> PathNode:
        """The least recently used leaf, which the caller drops."""
        while True:
            used, _, node = heapq.heappop(self._heap)
            if self._is_current(used, node):
                return node

    def drop_stale(self) -> None:
        """Drop stale entries, which would keep messages alive."""
        self._heap = [entry for entry in self._heap if self._is_current(entry[0], entry[2])]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        """Drop all entries."""
        self._heap.clear()

    def leaves(self) -> set[PathNode]:
        """The leaves that have an entry."""
        return {node for used, _, node in self._heap if self._is_current(used, node)}

    def _is_current(self, used: int, node: PathNode) -> bool:
        kept = self._kept.get(node)
        return kept is not None and kept.used == used and not kept.num_children
