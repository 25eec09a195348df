"""What has changed in the tree since somebody who ranks its nodes looked: noted by the tree, read and cleared by them.

Only what may make a node worth less is noted, with new nodes: what makes one worth more is seen when its turn comes.
"""

from dataclasses import dataclass, field

from kvserve.cache.node import Node


@dataclass(slots=True)
class Changes:
    """Nodes, each once. `nodes`: new ones, and those with other children, rows or rows' bytes, or that a row has left.
    `states`: those that got one. `parted`: those behind which something has left, or was used first. `anchors`: those
    that became the end of system and tools. `gone`: those that left the tree, which are nowhere else.

    `is_noted` False: nobody will look, so nothing is noted.
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
        """It has a state now: those above are not the newest any more, those below save fewer tokens."""
        self._add(self.states, node)

    def note_parted(self, node: Node) -> None:
        """Of what stands behind it some has left, or was a guess and is none."""
        self._add(self.parted, node)

    def note_anchor(self, node: Node) -> None:
        """System and tools end here: what stands shortly behind may be brief."""
        self._add(self.anchors, node)

    def note_gone(self, node: Node, heir: Node | None = None) -> None:
        """It left the tree; `heir` has all that was its."""
        if not self.is_noted:
            return
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            if node in noted:
                del noted[node]
                if heir is not None:
                    self._add(noted, heir)
        self.gone.append(node)

    def note_cut(self, node: Node, lower: Node) -> None:
        """What belongs to its end is `lower`'s now."""
        for noted in (self.states, self.parted, self.anchors):
            if node in noted:
                self._add(noted, lower)
        self._add(self.nodes, node)
        self._add(self.nodes, lower)

    def clear(self) -> None:
        """They were read."""
        for noted in (self.nodes, self.states, self.parted, self.anchors):
            noted.clear()

    def _add(self, noted: dict[Node, None], node: Node) -> None:
        if self.is_noted and node.parent is not None:
            noted[node] = None
