"""What may be evicted, in its order, kept up to date with the tree: the tree notes whose rank may have fallen; a rank
that has risen is seen when the node's turn comes. It evicts nothing.
"""

import math

from kvserve.cache.eviction import Score
from kvserve.cache.eviction_queue import EvictionQueue
from kvserve.cache.eviction_rank import PLAIN, EvictionRank, fallen_by_anchor, fallen_by_parting, fallen_by_state
from kvserve.cache.last_users import LastUsers
from kvserve.cache.node import Node, SequenceEnd
from kvserve.cache.trie import Trie


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
