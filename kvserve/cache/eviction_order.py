"""What may be evicted, in its order, kept up to date with the tree: the tree notes whose rank may have fallen; a rank
that has risen is seen when the node's turn comes. It evicts nothing.

A queue holds candidates by level, then urgency, then the node's number:

    level -> slope, in steps -> a heap of (since, number, start)          the most urgent of the heaps' first is next

Urgency is a line over time, so nodes of one slope keep their order: the least recently used is first. A node that is
ranked anew or discarded leaves a stale item in its heap, which is skipped; stale items never outnumber others by much.
"""

import heapq
import math

from kvserve.cache.branches import LastUsers
from kvserve.cache.eviction import Score
from kvserve.cache.eviction_rank import PLAIN, EvictionRank, Rank, fallen_by_anchor, fallen_by_parting, fallen_by_state
from kvserve.cache.node import Node, SequenceEnd
from kvserve.cache.trie import Trie

STEPS_PER_OCTAVE = 64
"""Slopes are rounded to so many steps: a value up to a twentieth higher than another one counts as the same."""

MIN_STALE_ITEMS = 64
"""With fewer stale items the heaps are not rebuilt."""


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


class EvictionOrder:
    """Two queues: of all that may be evicted for bytes, leaves and plain states inside a branch, and of all states. The
    sweep sets `over_number`, the entries over their number."""

    def __init__(self, trie: Trie, score: Score, *, needs_checkpoints: bool) -> None:
        self._last_users = LastUsers(trie.is_held)
        self.ranks = EvictionRank(score, self._last_users.is_last, needs_checkpoints=needs_checkpoints)
        self.over_number: set[SequenceEnd] = set()
        self._trie = trie
        self._all, self._states = EvictionQueue(), EvictionQueue()
        self._again: dict[Node, None] = {}

    def forget_gone(self) -> None:
        """Drop the nodes that were removed from the tree."""
        gone = self._trie.changes.gone
        self._again |= dict.fromkeys(self._last_users.known_by(gone))
        for node in gone:
            self._again.pop(node, None)
            self._last_users.forget(node)
            self._all.discard(node)
            self._states.discard(node)
        gone.clear()

    def update(self, max_nodes: float = math.inf) -> int:
        """Rank the nodes that have changed since the last call, at most so many: the next call ranks the rest. Returns
        how many were ranked."""
        self.forget_gone()
        changes, again = self._trie.changes, self._again
        again |= dict.fromkeys((*changes.nodes, *self._all.lapsed(self.ranks.now)))
        again |= dict.fromkeys(self._last_users.known_by((*changes.nodes, *changes.parted)))
        for node in changes.states:
            fallen = dict.fromkeys(fallen_by_state(node))
            for each in fallen:
                self._last_users.forget(each)
            again |= fallen
        for node in changes.parted:
            again |= dict.fromkeys(fallen_by_parting(node))
        for node in changes.anchors:
            again |= dict.fromkeys(fallen_by_anchor(node))
        changes.clear()
        num_ranked = 0
        while again and num_ranked < max_nodes:
            self._rank(again.popitem()[0])
            num_ranked += 1
        return num_ranked

    @property
    def is_up_to_date(self) -> bool:
        """Whether the last update ranked all that had changed."""
        return not self._again

    def next_of_all(self) -> Node | None:
        """The leaf to evict next for bytes, or the node inside a branch whose state is."""
        return self._next_of(self._all)

    def next_state(self) -> Node | None:
        """The node whose state is evicted next."""
        return self._next_of(self._states)

    def level(self, node: Node) -> int | None:
        """A node's level in the order of all."""
        rank = self._all.rank(node)
        return rank.level if rank is not None else None

    def _next_of(self, queue: EvictionQueue) -> Node | None:
        self.update()
        while (node := queue.first(self.ranks.now)) is not None:
            before = queue.rank(node)
            self._rank(node)
            if queue.rank(node) == before:
                break
        return node

    def _rank(self, node: Node) -> None:
        """Give a node its present places in both queues, if any."""
        is_evictable = node.parent is not None and not node.leases and self._trie.is_held(node)
        state = self.ranks.of_state(node) if is_evictable and node.checkpoint is not None else None
        if state is None:
            self._last_users.forget(node)
            self._states.discard(node)
        else:
            self._states.put(node, state)
        if is_evictable and not node.children:
            is_surplus = node.sequence_end in self.over_number
            self._all.put(node, self.ranks.of_leaf(node, is_surplus=is_surplus))
        elif state is not None and state.level <= PLAIN:
            self._all.put(node, state)
        else:
            self._all.discard(node)
