"""What the turn store keeps of a node and of a chain, and the order in which leaves are evicted, the least recently
used first. The store changes these values under its lock."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from kvserve.sessions.message_rows import Row, digest_of, flag
from kvserve.sessions.seen import PathNode, PathStep
from kvserve.sessions.written_messages import (
    VALUE_BYTES,
    message_bytes,
    said_digest,
    same_words,
    same_writing,
    written_bytes,
)

NODE_BYTES = 10 * VALUE_BYTES
"""A node, its entries in the maps and its digest, roughly."""


@dataclass(slots=True)
class ChainState:
    """The nodes of one chain, the newest reading last. `said` is a digest of what the model wrote here last,
    `is_doubtful`: it also wrote something else; `meaning` is that of the last reading, `is_contested`: there was
    another one. `has_row`: a row says this, as the nodes alone do not."""

    nodes: dict[PathNode, None] = field(default_factory=dict)
    said: bytes | None = None
    is_doubtful: bool = False
    meaning: bytes | None = None
    is_contested: bool = False
    has_row: bool = False

    @property
    def newest(self) -> PathNode:
        return next(reversed(self.nodes))

    def row(self) -> Row | None:
        """What the kept nodes do not say; None where they say all."""
        is_told = self.said is None or any(node.written is not None for node in self.nodes)
        if is_told and not self.is_doubtful and not self.is_contested:
            return None
        return {
            "said": None if self.said is None else self.said.hex(),
            "is_doubtful": self.is_doubtful,
            "meaning": None if self.meaning is None else self.meaning.hex(),
            "is_contested": self.is_contested,
        }

    def take(self, node: PathNode) -> None:
        """Add the conflicts that a new node brings."""
        if node.written is not None:
            said = said_digest(node.written)
            self.is_doubtful |= self.said not in (None, said)
            self.said = said
        self.is_contested |= self.meaning not in (None, node.meaning)
        self.meaning = node.meaning

    def is_as_seen(self, known: PathNode, step: PathStep) -> bool:
        """Whether the step says nothing that this node does not say."""
        if not same_words(known.message, step.message):
            return False
        if known.written is None or step.written is None:
            return known.written is step.written or (step.written is None and not self.is_doubtful)
        return same_writing(known.written, step.written)

    def note_unrecorded(self, meaning: bytes, said: bytes | None) -> bool:
        """Note a reading, and an answer, that are not kept; returns whether they are a new conflict."""
        known = self.is_contested, self.is_doubtful
        self.is_contested |= self.meaning not in (None, meaning)
        self.is_doubtful |= said is not None and self.said not in (None, said)
        return known != (self.is_contested, self.is_doubtful)

    def recall(self, row: Row) -> None:
        """Restore what a row says. Raises ValueError for another row."""
        self.said, self.meaning = (
            None if row.get(name) is None else digest_of(row[name]) for name in ("said", "meaning")
        )
        self.is_doubtful, self.is_contested = flag(row.get("is_doubtful")), flag(row.get("is_contested"))
        self.has_row = True


@dataclass(slots=True)
class NodeState:
    """One kept node: its number and size, when it was last used, and the nodes below it by chain, the newest reading
    last. `last_read` counts requests; `until` is when its row may be dropped, None: it has no row."""

    number: int
    num_bytes: int
    used: int
    last_read: int = 0
    until: float | None = None
    num_children: int = 0
    children: dict[bytes, dict[PathNode, None]] = field(default_factory=dict)

    def extend_life(self, until: float) -> None:
        """Keep its row until then at least."""
        self.until = until if self.until is None else max(self.until, until)


def node_bytes(node: PathNode) -> int:
    """Bytes of one node without its parents; a message that is also its output's is counted once."""
    if node.written is None:
        return NODE_BYTES + message_bytes(node.message)
    own = 0 if node.message is node.written.message else message_bytes(node.message)
    return NODE_BYTES + own + written_bytes(node.written)


class LeafOrder:
    """A heap of (last use, serial, leaf). An entry is stale, and skipped, once its node was used again, has children or
    was dropped; every leaf has one entry that is not. Reads the store's map of nodes and sets when a node was used."""

    def __init__(self, kept: Mapping[PathNode, NodeState]) -> None:
        self._kept = kept
        self._heap: list[tuple[int, int, PathNode]] = []
        self._serials = count()
        self._clock = 0

    def next_use(self) -> int:
        """A number that is higher at every use."""
        self._clock += 1
        return self._clock

    def touch(self, node: PathNode) -> None:
        """The node is used now."""
        self._kept[node].used = self.next_use()
        self.add(node)

    def add(self, node: PathNode) -> None:
        """Add an entry for the node, if it is a leaf."""
        kept = self._kept[node]
        if kept.num_children:
            return
        if len(self._heap) > 2 * len(self._kept) + 64:
            self.drop_stale()
        heapq.heappush(self._heap, (kept.used, next(self._serials), node))

    def pop(self) -> PathNode:
        """The least recently used leaf, which the caller drops."""
        while True:
            used, _, node = heapq.heappop(self._heap)
            if self._is_current(used, node):
                return node

    def drop_stale(self) -> None:
        """Drop stale entries, which would keep messages alive."""
        self._heap = [entry for entry in self._heap if self._is_current(entry[0], entry[2])]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        """Drop all entries."""
        self._heap.clear()

    def _is_current(self, used: int, node: PathNode) -> bool:
        kept = self._kept.get(node)
        return kept is not None and kept.used == used and not kept.num_children
