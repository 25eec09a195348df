"""A queue of eviction candidates: by level, then urgency, then the node's number. It knows ranks, not their reasons.

    level -> slope, in steps -> a heap of (since, number, start)          the most urgent of the heaps' first is next

Urgency is a line over time, so nodes of one slope keep their order: the least recently used is first. A node that is
ranked anew or discarded leaves a stale item in its heap, which is skipped; stale items never outnumber others by much.
"""

import heapq
import math
from dataclasses import dataclass

from kvserve.cache.eviction import Ageing
from kvserve.cache.node import Node

STEPS_PER_OCTAVE = 64
"""Slopes are rounded to so many steps: a value up to a twentieth higher than another one counts as the same."""

MIN_STALE_ITEMS = 64
"""With fewer stale items the heaps are not rebuilt."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A lower level is evicted first, whatever its urgency. The rank holds until `until`."""

    level: int
    ageing: Ageing
    until: float = math.inf


type _Item = tuple[float, int, int, int]
"""Since, the node's number and start, and a ticket."""


class EvictionQueue:
    """Each node at most once. The order of two depends on them and on the time, not on when they were put."""

    def __init__(self) -> None:
        self._ranks: dict[Node, Rank] = {}
        self._tickets: dict[Node, int] = {}
        self._nodes: dict[int, Node] = {}
        self._levels: dict[int, dict[float, list[_Item]]] = {}
        self._ends: list[tuple[float, int]] = []
        self._num_items = 0
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, node: Node) -> Rank | None:
        """A node's rank; None where it is not in the queue."""
        return self._ranks.get(node)

    def put(self, node: Node, rank: Rank) -> None:
        """Put a node at the place of this rank, instead of its old one."""
        if self._ranks.get(node) == rank:
            return
        self.discard(node)
        if max(self._num_items, len(self._ends)) > 2 * len(self._ranks) + MIN_STALE_ITEMS:
            self._tidy_up()
        self._num_tickets += 1
        self._ranks[node], self._tickets[node], self._nodes[self._num_tickets] = rank, self._num_tickets, node
        self._push(node)

    def discard(self, node: Node) -> None:
        """Take a node out, if it is in the queue."""
        if self._ranks.pop(node, None) is not None:
            del self._nodes[self._tickets.pop(node)]

    def first(self, now: float) -> Node | None:
        """The node to evict now."""
        for level in sorted(self._levels):
            buckets, found, highest = self._levels[level], None, -math.inf
            for slope, heap in list(buckets.items()):
                if not self._pass_over_stale(heap):
                    del buckets[slope]
                    continue
                item = heap[0]
                urgency = slope * (now - item[0])
                if found is None or urgency > highest or (urgency == highest and item[1:] < found[1:]):
                    found, highest = item, urgency
            if found is not None:
                return self._nodes[found[-1]]
            del self._levels[level]
        return None

    def lapsed(self, now: float) -> list[Node]:
        """Nodes whose ranks have lapsed, each once."""
        nodes = []
        while self._ends and self._ends[0][0] < now:
            node = self._nodes.get(heapq.heappop(self._ends)[1])
            if node is not None:
                nodes.append(node)
        return nodes

    def _push(self, node: Node) -> None:
        rank, ticket = self._ranks[node], self._tickets[node]
        item = (rank.ageing.since, node.number, node.start, ticket)
        heapq.heappush(self._levels.setdefault(rank.level, {}).setdefault(_rounded(rank.ageing.slope), []), item)
        if rank.until < math.inf:
            heapq.heappush(self._ends, (rank.until, ticket))
        self._num_items += 1

    def _pass_over_stale(self, heap: list[_Item]) -> bool:
        """Whether anything is left."""
        while heap and heap[0][-1] not in self._nodes:
            heapq.heappop(heap)
            self._num_items -= 1
        return bool(heap)

    def _tidy_up(self) -> None:
        self._levels, self._ends, self._num_items = {}, [], 0
        for node in self._ranks:
            self._push(node)


def _rounded(slope: float) -> float:
    return slope if math.isinf(slope) else 2 ** (round(STEPS_PER_OCTAVE * math.log2(slope)) / STEPS_PER_OCTAVE)
