"""What is about to leave RAM, as another tier needs to see it: which copies it has of that, told at the nodes that
leave, and the whole path only for whoever must write it. It knows nodes and their copies, no policy and no disk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.kept_path import KeptPath
from kvserve.cache.node import Node
from kvserve.cache.records import Copy


@dataclass(frozen=True, slots=True)
class EvictedNodes:
    """A leaf and the ancestors that go with it or, with `is_state_only`, one node's state. `num_bytes` is the size of
    the record at its end; `kept` builds all that is kept up to a node, which costs the path's length."""

    nodes: Sequence[Node]
    is_state_only: bool
    num_bytes: int
    kept: Callable[[Node], KeptPath]

    def path(self) -> KeptPath:
        """All that is kept up to where this ends."""
        return self.kept(self.nodes[0])

    @property
    def is_copied(self) -> bool:
        """Whether all of it is in the other tier, or on its way there: what it stands on is too."""
        return all(copy is not None and not copy.is_forgotten for copy in self._copies())

    def unwritten(self) -> list[Copy]:
        """The copies that are still on their way."""
        copies = [copy for copy in self._copies() if copy is not None]
        return [copy for copy in copies if not (copy.is_written or copy.is_forgotten)]

    def _copies(self) -> Iterator[Copy | None]:
        """One of each record that leaves; None where none is known."""
        for node in self.nodes:
            if not self.is_state_only:
                yield from node.copies.rows or (None,)
            if node.checkpoint is not None:
                yield node.copies.state
