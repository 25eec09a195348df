"""What changed in the tree since its nodes were ranked: the tree notes it, the eviction order reads and clears it.

New nodes are noted, and what may lower a node's rank. What raises a rank is seen when the node's turn comes.
"""

from dataclasses import dataclass, field

from kvserve.cache.node import Node


@dataclass(slots=True)
class Changes:
    """Nodes, each once. `nodes`: new ones, and those whose children, rows, record size or leases changed. `states`:
    those that got one. `parted`: those that lost a descendant, or of which one was first used. `anchors`: those that
    became the end of system and tools. `gone`: removed ones, which are in no other list.

    `is_noted` False: no order reads this, so nothing is noted.
    """

    is_noted: bool = True
    nodes: dict[Node, None] = field(default_factory=dict)
    states: dict[Node, None] = field(default_factory=dict)
    parted: dict[Node, None] = field(default_factory=dict)
    anchors: dict[Node, None] = field(default_factory=dict)
    gone: list[Node] = field(default_factory=list)

    def note(self, node: Node) -> None:
        """Its rank may have fallen."""
        self._add(self.nodes, node)

    def note_state(self, node: Node) -> None:
        """It has a state now: states above may not be among the newest any more, those below save fewer tokens."""
        self._add(self.states, node)

    def note_parted(self, node: Node) -> None:
        """A descendant was removed, or was a guess and was used."""
        self._add(self.parted, node)

    def note_anchor(self, node: Node) -> None:
        """System and tools end here: what follows within a few tokens may be brief."""
        self._add(self.anchors, node)

    def note_gone(self, node: Node, heir: Node | None = None) -> None:
        """It was removed; `heir` took over what belonged to it."""
        if not self.is_noted:
            return
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            if node in noted:
                del noted[node]
                if heir is not None:
                    self._add(noted, heir)
        self.gone.append(node)

    def note_cut(self, node: Node, lower: Node) -> None:
        """It was split: what belongs to its end is `lower`'s now."""
        for noted in (self.states, self.parted, self.anchors):
            if node in noted:
                self._add(noted, lower)
        self._add(self.nodes, node)
        self._add(self.nodes, lower)

    def clear(self) -> None:
        """Drop all but `gone`: they were read."""
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            noted.clear()

    def _add(self, noted: dict[Node, None], node: Node) -> None:
        if self.is_noted and node.parent is not None:
            noted[node] = None
