"""What may leave, in its order, kept up to date with the tree: whose rank may have fallen its changes tell, whose has
risen is seen when its turn comes. It lets nothing leave.
"""

from kvserve.cache.eviction import Score
from kvserve.cache.eviction_queue import EvictionQueue
from kvserve.cache.node import Node, SequenceEnd
from kvserve.cache.trie import Trie
from kvserve.cache.worth import PLAIN, Worth, fallen_by_anchor, fallen_by_parting, fallen_by_state


class EvictionOrder:
    """Two queues: of all that may leave for bytes, leaves and plain states inside a branch, and of all states.
    `over_number` are the entries that are more than there may be, which its owner counts."""

    def __init__(self, trie: Trie, score: Score, *, needs_checkpoints: bool) -> None:
        self.worth = Worth(score, needs_checkpoints=needs_checkpoints)
        self.over_number: set[SequenceEnd] = set()
        self._trie = trie
        self._all, self._states = EvictionQueue(), EvictionQueue()

    def forget_gone(self) -> None:
        """Keep nothing of what has left the tree."""
        for node in self._trie.changes.gone:
            self._all.discard(node)
            self._states.discard(node)
        self._trie.changes.gone.clear()

    def update(self) -> None:
        """Rank what has changed since this was asked, or since anything left."""
        changes = self._trie.changes
        again = dict.fromkeys((*changes.nodes, *self._all.lapsed(self.worth.now)))
        for node in changes.states:
            again |= dict.fromkeys(fallen_by_state(node))
        for node in changes.parted:
            again |= dict.fromkeys(fallen_by_parting(node))
        for node in changes.anchors:
            again |= dict.fromkeys(fallen_by_anchor(node))
        changes.clear()
        self.forget_gone()
        for node in again:
            self._rank(node)

    def next_of_all(self) -> Node | None:
        """The leaf, or the node inside a branch whose state, leaves next for bytes."""
        return self._next_of(self._all)

    def next_state(self) -> Node | None:
        """The node whose state leaves next."""
        return self._next_of(self._states)

    def level(self, node: Node) -> int | None:
        """That of a node in the order of all."""
        rank = self._all.rank(node)
        return rank.level if rank is not None else None

    def _next_of(self, queue: EvictionQueue) -> Node | None:
        self.update()
        while (node := queue.first(self.worth.now)) is not None:
            before = queue.rank(node)
            self._rank(node)
            if queue.rank(node) == before:
                break
        return node

    def _rank(self, node: Node) -> None:
        """Let a node have the places that it has now, if any."""
        may_leave = node.parent is not None and not node.leases and self._trie.is_held(node)
        state = self.worth.of_state(node) if may_leave and node.checkpoint is not None else None
        if state is None:
            self._states.discard(node)
        else:
            self._states.put(node, state)
        if may_leave and not node.children:
            is_surplus = node.sequence_end in self.over_number
            self._all.put(node, self.worth.of_leaf(node, is_surplus=is_surplus))
        elif state is not None and state.level <= PLAIN:
            self._all.put(node, state)
        else:
            self._all.discard(node)
