"""Which nodes are entries, and whose: kept where an end is set, so that nobody has to look for them."""

from collections.abc import Iterator

from kvserve.cache.node import Node, SequenceEnd


class Entries:
    """The one writer of `sequence_end`."""

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}
        self._owned: dict[str, dict[Node, None]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """A copy: who looks may change them."""
        return iter(list(self._nodes))

    def owners(self) -> set[str]:
        """Those who have entries."""
        return set(self._owned)

    def by_owner(self) -> Iterator[list[Node]]:
        """Those of one owner, then of the next."""
        return (list(nodes) for nodes in self._owned.values())

    def set(self, node: Node, end: SequenceEnd | None) -> None:
        """A row ends at this node, or none does any more."""
        if node.sequence_end is not None:
            self._drop(node, node.sequence_end.owner)
        node.sequence_end = end
        if end is not None:
            self._nodes[node] = None
            if end.owner is not None:
                self._owned.setdefault(end.owner, {})[node] = None

    def move(self, node: Node, other: Node) -> None:
        """What ended at this node ends at the other one, and nothing else does."""
        end = node.sequence_end
        self.set(node, None)
        self.set(other, end)

    def clear(self) -> None:
        """There are none."""
        self._nodes.clear()
        self._owned.clear()

    def _drop(self, node: Node, owner: str | None) -> None:
        del self._nodes[node]
        if owner is not None:
            owned = self._owned[owner]
            del owned[node]
            if not owned:
                del self._owned[owner]
