"""What is about to be evicted from RAM, for the other tier: the copies that it has of these nodes, and the whole path
only where it must write it. It knows nodes and their copies, no policy and no disk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.kept_path import KeptPath
from kvserve.cache.node import Node
from kvserve.cache.records import Copy


@dataclass(frozen=True, slots=True)
class EvictedNodes:
    """A leaf and the ancestors evicted with it or, with `is_state_only`, one node's state. `num_bytes` is the size of
    the record at its end; `kept` builds the stored path to a node, which takes time in the path's length."""

    nodes: Sequence[Node]
    is_state_only: bool
    num_bytes: int
    kept: Callable[[Node], KeptPath]

    def path(self) -> KeptPath:
        """All that is stored up to the end of these nodes."""
        return self.kept(self.nodes[0])

    @property
    def is_copied(self) -> bool:
        """Whether the other tier has all of it, or will have it: then also its ancestors."""
        return all(copy is not None and not copy.is_forgotten for copy in self._copies())

    def unwritten(self) -> list[Copy]:
        """The copies that wait to be written."""
        copies = [copy for copy in self._copies() if copy is not None]
        return [copy for copy in copies if not (copy.is_written or copy.is_forgotten)]

    def _copies(self) -> Iterator[Copy | None]:
        """The copies of each evicted record; None for a record without one."""
        for node in self.nodes:
            if not self.is_state_only:
                yield from node.copies.rows or (None,)
            if node.checkpoint is not None:
                yield node.copies.state
