"""The tree's records and their payloads in RAM: every change of what is stored is made here, so that bytes and
references always add up.

It knows nodes, records and sizes; not when something is added or which record is evicted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from kvserve.cache.node import Node
from kvserve.cache.records import (
    BoundaryKind,
    CacheStats,
    Checkpoint,
    KvPiece,
    Payload,
    RecordId,
    Segment,
    State,
)
from kvserve.cache.token_run import TokenRun, join
from kvserve.cache.trie import Trie


class RamTier:
    """Payloads by key. A payload never changes and keeps its key: what is trimmed or merged gets a new record."""

    def __init__(self) -> None:
        self._payloads: dict[RecordId, Payload] = {}
        self.num_bytes = 0

    def put(self, record_id: RecordId, payload: Payload) -> None:
        """Hold a payload. Raises ValueError for a key that is taken."""
        if record_id in self._payloads:
            raise ValueError(f"Record {record_id} is held already.")
        self._payloads[record_id] = payload
        self.num_bytes += payload.num_bytes

    def get(self, record_id: RecordId) -> Payload | None:
        return self._payloads.get(record_id)

    def drop(self, record_id: RecordId) -> None:
        payload = self._payloads.pop(record_id, None)
        if payload is not None:
            self.num_bytes -= payload.num_bytes


type CutPayload = Callable[[Payload, int, int], Payload]
"""(payload, first row, end row) -> a real copy of these rows that keeps nothing else alive."""


@dataclass(slots=True)
class Counters:
    """Running totals, named as in `CacheStats`."""

    num_image_retreats: int = 0
    num_evicted_tokens: int = 0
    num_evicted_checkpoints: int = 0


class Store:
    """Nodes with their records. One owner per payload: the tier; one count per byte: the tier's."""

    def __init__(self, trie: Trie, ram: RamTier, cut_payload: CutPayload) -> None:
        self.trie = trie
        self.ram = ram
        self.counters = Counters()
        self._cut_payload = cut_payload
        self._loose: dict[RecordId, Segment] = {}
        self._loose_bytes: Counter[RecordId] = Counter()
        self._next_id = 0
        self.checkpoint_bytes = 0

    def add_segment(self, parent: Node, tokens: TokenRun, hashes: tuple[bytes, ...], payload: Payload | None) -> Node:
        """Add a leaf below `parent`, which is no entry any more but a prefix of one."""
        if parent.sequence_end is not None:
            self.trie.entries.set(parent, None)
        return self.trie.attach(parent, self._new_segment(tokens, payload), hashes)

    def add_checkpoint(self, node: Node, payload: Payload, kind: BoundaryKind, now: float) -> None:
        """Add the state at a node's end, which has none yet."""
        if node.checkpoint is not None:
            raise ValueError(f"There is a checkpoint at {node.end} already.")
        record_id = self._new_id()
        self.ram.put(record_id, payload)
        node.checkpoint = Checkpoint(record_id, node.end, payload.num_bytes, kind)
        node.restored_at = now
        self.checkpoint_bytes += payload.num_bytes
        self.trie.changes.note_state(node)

    def drop_checkpoint(self, node: Node) -> None:
        """Remove a node's checkpoint, if it has one."""
        if (checkpoint := node.checkpoint) is None:
            return
        node.checkpoint = node.copies.state = None
        self.trie.changes.note(node)
        self.ram.drop(checkpoint.record_id)
        self.checkpoint_bytes -= checkpoint.num_bytes
        self.counters.num_evicted_checkpoints += 1

    def remove_leaves(self, nodes: Sequence[Node]) -> None:
        """Remove a leaf, then its ancestors in this order, each with its checkpoint; cut what remains to size."""
        self.loosen_leaves(nodes)
        self.fit()

    def loosen_leaves(self, nodes: Sequence[Node]) -> None:
        """Remove them; what remains of their records is cut by the next `fit`: a record that loses many nodes, one
        after the other, is copied once."""
        for node in nodes:
            self.drop_checkpoint(node)
            segment = self.trie.detach(node)
            self.counters.num_evicted_tokens += node.end - node.start
            if segment.record_id in self.trie.holders:
                self._loose[segment.record_id] = segment
                num_gone = node.end - node.start
                self._loose_bytes[segment.record_id] += segment.num_bytes * num_gone // len(segment.tokens)
            else:
                self._loose.pop(segment.record_id, None)
                del self._loose_bytes[segment.record_id]
                self.ram.drop(segment.record_id)

    @property
    def num_bytes_once_fit(self) -> int:
        """About the bytes in RAM after the next `fit`."""
        return self.ram.num_bytes - self._loose_bytes.total()

    @property
    def has_loose(self) -> bool:
        """Whether `fit` has anything to cut."""
        return bool(self._loose)

    def fit(self) -> None:
        """Cut all loose records to size. If an allocation fails, the next call cuts the rest."""
        while self._loose:
            self.fit_next()

    def fit_next(self) -> int:
        """Cut one loose record to size. Returns the number of copied bytes."""
        record_id, segment = next(reversed(self._loose.items()))
        num_bytes = self._fit(segment)
        del self._loose[record_id], self._loose_bytes[record_id]
        return num_bytes

    def replace_rows(self, nodes: Sequence[Node], payload: Payload) -> None:
        """Give consecutive nodes of one chain a new record together; their old ones are cut or dropped."""
        old = {node.segment.record_id: node.segment for node in nodes if node.segment is not None}
        segment = self._new_segment(join([node.tokens.part(node.start, node.end) for node in nodes]), payload)
        for node in nodes:
            self.trie.rehold(node, segment)
        for record in old.values():
            self._fit(record)

    def clear(self) -> None:
        """Remove everything."""
        for node in list(self.trie.nodes()):
            self.drop_checkpoint(node)
        for record_id in list(self.trie.holders):
            self.ram.drop(record_id)
        self.trie.clear()
        self._loose.clear()
        self._loose_bytes.clear()

    # --- reading ------------------------------------------------------------------------------------------------------

    def piece_of(self, node: Node, end: int) -> KvPiece:
        """A node's rows up to `end`."""
        return self._rows(node, node, end)

    def pieces_to(self, node: Node, end: int) -> tuple[KvPiece, ...]:
        """The rows `[0, end)` of the path to a node, `end` inside it. Neighbours in one record are one piece, as a
        restore pays for each piece: nodes end inside records where there are states."""
        runs = (list(run) for _, run in groupby(node.path(), key=lambda each: each.segment))
        return tuple(self._rows(run[0], run[-1], end) for run in runs)

    def _rows(self, first: Node, last: Node, end: int) -> KvPiece:
        """The rows up to `end` of nodes that follow one another in one record."""
        if first.segment is None:
            raise ValueError("The root has no rows.")
        begin = first.segment.tokens.start
        payload = self.ram.get(first.segment.record_id)
        return KvPiece(first.segment, payload, first.start - begin, min(last.end, end) - begin)

    def state_of(self, node: Node) -> State | None:
        """The checkpoint at a node's end with its payload."""
        if node.checkpoint is None or (payload := self.ram.get(node.checkpoint.record_id)) is None:
            return None
        return State(node.checkpoint, payload)

    def stats(self, *, live_bytes: int, num_leases: int) -> CacheStats:
        """What is held and was done; looks at every node. `live_bytes` are those of the live rows' own caches."""
        nodes = list(self.trie.nodes())
        return CacheStats(
            num_nodes=len(nodes),
            num_segments=len(self.trie.holders),
            num_checkpoints=sum(node.checkpoint is not None for node in nodes),
            num_entries=len(self.trie.entries),
            num_stored_tokens=sum(node.end - node.start for node in nodes),
            ram_bytes=self.ram.num_bytes,
            checkpoint_bytes=self.checkpoint_bytes,
            live_bytes=live_bytes,
            num_leases=num_leases,
            **asdict(self.counters),
        )

    # --- records ------------------------------------------------------------------------------------------------------

    def _new_id(self) -> RecordId:
        self._next_id += 1
        return RecordId(self._next_id)

    def _new_segment(self, tokens: TokenRun, payload: Payload | None) -> Segment:
        segment = Segment(self._new_id(), tokens, payload.num_bytes if payload is not None else 0)
        if payload is not None:
            self.ram.put(segment.record_id, payload)
        return segment

    def _fit(self, segment: Segment) -> int:
        """Drop a record that no node holds; cut one of which nodes hold parts, one record for each. Returns the number
        of copied bytes."""
        num_bytes = 0
        holders = sorted(self.trie.holders.get(segment.record_id, ()), key=lambda node: node.start)
        tokens, payload = segment.tokens, self.ram.get(segment.record_id)
        for part in _parts(holders):
            start, end = part[0].start, part[-1].end
            if (start, end) == (tokens.start, tokens.end):
                return 0
            rows = None if payload is None else self._cut_payload(payload, start - tokens.start, end - tokens.start)
            fitting = self._new_segment(tokens.part(start, end), rows)
            num_bytes += fitting.num_bytes
            for node in part:
                self.trie.rehold(node, fitting)
        self.ram.drop(segment.record_id)
        return num_bytes


def _parts(holders: Sequence[Node]) -> list[list[Node]]:
    """Nodes of one record, by offset, as runs without a gap: a node between two may have got another record."""
    parts: list[list[Node]] = []
    for node in holders:
        if parts and parts[-1][-1].end == node.start:
            parts[-1].append(node)
        else:
            parts.append([node])
    return parts
