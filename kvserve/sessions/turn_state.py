"""What the turn store keeps of a node, of a chain and of a request, and the order in which leaves are evicted, the
least recently used first. The store changes these values under its lock; of what is in a request's record this file
knows only the size.
"""

import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from kvserve.sessions.digest_lru import UnambiguousLru
from kvserve.sessions.message_rows import Row, digest_of, flag
from kvserve.sessions.seen import Conflicts, PathNode, PathStep, TurnRecord
from kvserve.sessions.written_messages import (
    VALUE_BYTES,
    message_bytes,
    said_digest,
    same_words,
    same_writing,
    written_bytes,
)

MAX_UNRECORDED = 8_192

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

    @property
    def conflicts(self) -> Conflicts:
        return Conflicts(self.is_doubtful, self.is_contested)

    def add(self, conflicts: Conflicts) -> None:
        """Add what is unknown of this place elsewhere."""
        self.is_doubtful |= conflicts.is_doubtful
        self.is_contested |= conflicts.is_contested

    def recall(self, row: Row) -> None:
        """Restore what a row says. Raises ValueError for another row."""
        self.said, self.meaning = (
            None if row.get(name) is None else digest_of(row[name]) for name in ("said", "meaning")
        )
        self.is_doubtful, self.is_contested = flag(row.get("is_doubtful")), flag(row.get("is_contested"))
        self.has_row = True


class UnrecordedReadings:
    """What requests without a record read and were given, in digests of at most `MAX_UNRECORDED` places."""

    def __init__(self) -> None:
        self._meanings: UnambiguousLru[bytes] = UnambiguousLru(MAX_UNRECORDED)
        self._answers: UnambiguousLru[bytes] = UnambiguousLru(MAX_UNRECORDED)

    def note(self, step: PathStep, said: bytes | None) -> None:
        """Such a request read this; `said` is the digest of what it was given here."""
        self._meanings.put(step.chain, step.meaning)
        if said is not None:
            self._answers.put(step.chain, said)

    def add_conflicts(self, state: ChainState, node: PathNode) -> None:
        """Add the conflicts between a new node and these."""
        state.is_contested |= self._meanings.is_other(node.chain, node.meaning)
        state.is_doubtful |= state.said is not None and self._answers.is_other(node.chain, state.said)

    def clear(self) -> None:
        """Drop all digests."""
        self._meanings.clear()
        self._answers.clear()


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


POINTER_BYTES = 8
OFFSET_BYTES = 36


class RecordStore:
    """The newest request through every kept message: what a next request is compared with. Records are kept by their
    leaf, at most `max_bytes`, the oldest request evicted first. A record is dropped once a newer request has passed its
    leaf, as the newer one answers whatever could be asked of it."""

    def __init__(self, max_bytes: int, gone: Callable[[PathNode], None]) -> None:
        """`gone` is called with the leaf of every record that is dropped."""
        self._max_bytes = max_bytes
        self._gone = gone
        self._by_leaf: OrderedDict[PathNode, tuple[TurnRecord, int]] = OrderedDict()
        self._newest_through: dict[PathNode, TurnRecord] = {}
        self._newest_of: dict[str, TurnRecord] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_leaf)

    def __iter__(self) -> Iterator[TurnRecord]:
        """The records, the oldest request first."""
        return iter([record for record, _ in self._by_leaf.values()])

    def put(self, record: TurnRecord) -> bool:
        """Add the newest request; its path must be kept as long as the record is. False: there is no room for it."""
        for node in record.leaf.ancestry():
            self.drop(node)
            self._newest_through[node] = record
        if record.session is not None:
            self._newest_of[record.session] = record
        size = record_bytes(record)
        self._by_leaf[record.leaf] = record, size
        self.num_bytes += size
        self.shrink(self._max_bytes)
        return record.leaf in self._by_leaf

    def shrink(self, max_bytes: int) -> None:
        """Evict the oldest records until at most `max_bytes` are left."""
        while self.num_bytes > max_bytes:
            self.drop(next(iter(self._by_leaf)))

    def drop(self, leaf: PathNode) -> None:
        """Drop the record that ends here, if there is one."""
        if leaf not in self._by_leaf:
            return
        record, size = self._by_leaf.pop(leaf)
        self.num_bytes -= size
        self._gone(leaf)
        for node in leaf.ancestry():
            if self._newest_through.get(node) is record:
                del self._newest_through[node]
        if record.session is not None and self._newest_of.get(record.session) is record:
            del self._newest_of[record.session]

    def at(self, leaf: PathNode) -> TurnRecord | None:
        """The request that ended with this message."""
        found = self._by_leaf.get(leaf)
        return found[0] if found is not None else None

    def newest(self, node: PathNode | None, session: str | None) -> TurnRecord | None:
        """The newest request that passed here, else the newest that shares the most with it, else the session's."""
        if node is not None:
            for passed in node.ancestry():
                if (record := self._newest_through.get(passed)) is not None:
                    return record
        return None if session is None else self._newest_of.get(session)

    def clear(self) -> None:
        """Drop all records."""
        self._by_leaf.clear()
        self._newest_through.clear()
        self._newest_of.clear()
        self.num_bytes = 0


def record_bytes(record: TurnRecord) -> int:
    """Bytes that a record takes beside the path of its leaf."""
    on_path = {id(node.message) for node in record.leaf.ancestry()}
    own = sum(message_bytes(message) for message in record.messages if id(message) not in on_path)
    pointers = len(record.messages) + 2 * len(record.tools) + record.leaf.index + 1
    return (
        VALUE_BYTES
        + sys.getsizeof(record.packed_ids)
        + OFFSET_BYTES * len(record.starts)
        + POINTER_BYTES * pointers
        + own
    )
