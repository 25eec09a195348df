"""Which nodes are entries, and whose: noted where an end is set, so that no walk over the tree has to find them."""

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
        """Over a copy: the caller may change entries meanwhile."""
        return iter(list(self._nodes))

    def owners(self) -> set[str]:
        """The owners that have entries."""
        return set(self._owned)

    def by_owner(self) -> Iterator[list[Node]]:
        """The entries of one owner, then of the next."""
        return (list(nodes) for nodes in self._owned.values())

    def set(self, node: Node, end: SequenceEnd | None) -> None:
        """Make a node an entry, or no entry any more."""
        if node.sequence_end is not None:
            self._drop(node, node.sequence_end.owner)
        node.sequence_end = end
        if end is not None:
            self._nodes[node] = None
            if end.owner is not None:
                self._owned.setdefault(end.owner, {})[node] = None

    def move(self, node: Node, other: Node) -> None:
        """Give a node's entry to another node, in place of what that had."""
        end = node.sequence_end
        self.set(node, None)
        self.set(other, end)

    def clear(self) -> None:
        """Forget all."""
        self._nodes.clear()
        self._owned.clear()

    def _drop(self, node: Node, owner: str | None) -> None:
        del self._nodes[node]
        if owner is not None:
            owned = self._owned[owner]
            del owned[node]
            if not owned:
                del self._owned[owner]
