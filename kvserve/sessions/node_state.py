"""What the turn store keeps of a node and of a chain. The store changes these values under its lock."""

from dataclasses import dataclass, field

from kvserve.sessions.journal import Rows
from kvserve.sessions.seen import PathNode, PathStep
from kvserve.sessions.turn_rows import Conflicts, last_read_of, node_of
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

    @property
    def conflicts(self) -> Conflicts | None:
        """What the kept nodes do not say; None where they say all."""
        is_told = self.said is None or any(node.written is not None for node in self.nodes)
        if is_told and not self.is_doubtful and not self.is_contested:
            return None
        return Conflicts(self.said, self.is_doubtful, self.meaning, self.is_contested)

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

    def recall(self, conflicts: Conflicts) -> None:
        """Restore what a row says."""
        self.said, self.is_doubtful = conflicts.said, conflicts.is_doubtful
        self.meaning, self.is_contested = conflicts.meaning, conflicts.is_contested
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


def nodes_of_rows(rows: Rows) -> dict[PathNode, NodeState]:
    """The nodes of these rows, each after its parent; their order of use is not set.

    Raises ValueError or KeyError where the rows do not fit together.
    """
    nodes: dict[int, PathNode] = {}
    for key, body in sorted(rows.get("node", ())):
        nodes[int.from_bytes(key)] = node_of(body, nodes)
    found = {node: NodeState(number, node_bytes(node), 0, until=0.0) for number, node in nodes.items()}
    for key, body in rows.get("read", ()):
        kept, reading = found[nodes[int.from_bytes(key)]], last_read_of(body)
        kept.last_read = reading.serial
        kept.extend_life(reading.until)
    for node, kept in reversed(found.items()):
        if node.parent is not None:
            parent = found[node.parent]
            parent.num_children += 1
            parent.last_read = max(parent.last_read, kept.last_read)
            parent.extend_life(kept.until or 0.0)
    return found


def node_bytes(node: PathNode) -> int:
    """Bytes of one node without its parents; a message that is also its output's is counted once."""
    if node.written is None:
        return NODE_BYTES + message_bytes(node.message)
    own = 0 if node.message is node.written.message else message_bytes(node.message)
    return NODE_BYTES + own + written_bytes(node.written)
