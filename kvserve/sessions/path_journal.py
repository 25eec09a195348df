"""Which rows a turn store's nodes and chains have, and when the journal is told. The store holds the lock."""

from collections.abc import Iterable, Mapping
from functools import partial

from kvserve.sessions.journal import Journal, number_key
from kvserve.sessions.node_state import ChainState, NodeState
from kvserve.sessions.seen import PathNode, TurnRecord
from kvserve.sessions.turn_rows import LastRead, conflicts_body, last_read_body, node_body, record_body


class PathJournal:
    """Reads the store's maps; of a chain it sets whether it has a row."""

    def __init__(
        self, journal: Journal, kept: Mapping[PathNode, NodeState], states: Mapping[bytes, ChainState]
    ) -> None:
        self._journal = journal
        self._kept = kept
        self._states = states

    def read(self, leaf: PathNode, until: float) -> None:
        """A request has read this path: all of it is written down from now on, until `until` at least."""
        new: list[PathNode] = []
        for node in leaf.ancestry():
            kept = self._kept[node]
            if kept.until is None:
                new.append(node)
            kept.extend_life(until)
        for node in reversed(new):
            self.put_node(node)
        self.put_reading(leaf)

    def put_node(self, node: PathNode) -> None:
        """Write the node, without when it was read."""
        parent = None if node.parent is None else self._kept[node.parent].number
        self._journal.put("node", number_key(self._kept[node].number), partial(node_body, parent, node))
        self.put_conflicts(node.chain)

    def put_reading(self, node: PathNode) -> None:
        """Write when the node was read; its parents were read then too and need no row for it."""
        kept = self._kept[node]
        reading = LastRead(kept.last_read, kept.until or 0.0)
        self._journal.put("read", number_key(kept.number), partial(last_read_body, reading))

    def node_gone(self, node: PathNode, kept: NodeState) -> None:
        """Drop the rows of a node. Its parent was read when the node was."""
        if kept.until is None:
            return
        self._journal.drop("read", number_key(kept.number))
        self._journal.drop("node", number_key(kept.number))
        if node.parent is not None:
            self.put_reading(node.parent)

    def put_conflicts(self, chain: bytes) -> None:
        """Write what the nodes of a chain do not say, as long as one of them has a row."""
        state = self._states[chain]
        conflicts = state.conflicts if any(self._kept[node].until is not None for node in state.nodes) else None
        if conflicts is not None:
            self._journal.put("place", chain, partial(conflicts_body, conflicts))
        elif state.has_row:
            self._journal.drop("place", chain)
        state.has_row = conflicts is not None

    def is_lasting(self, chain: bytes) -> bool:
        """Whether a node of this chain has a row."""
        return chain in self._states and any(self._kept[node].until is not None for node in self._states[chain].nodes)

    def put_record(self, serial: int, record: TurnRecord) -> None:
        """Write the record of a request, if its path is written down."""
        kept = self._kept[record.leaf]
        if kept.until is not None:
            self._journal.put("record", number_key(kept.number), partial(record_body, serial, record))

    def record_gone(self, leaf: PathNode) -> None:
        """Drop the row of the record that ended here."""
        kept = self._kept.get(leaf)
        if kept is not None and kept.until is not None:
            self._journal.drop("record", number_key(kept.number))

    def all_gone(self) -> None:
        """Drop all rows."""
        for kept in self._kept.values():
            if kept.until is not None:
                self._journal.drop("record", number_key(kept.number))
                self._journal.drop("read", number_key(kept.number))
                self._journal.drop("node", number_key(kept.number))
        for chain, state in self._states.items():
            if state.has_row:
                self._journal.drop("place", chain)

    def put_all(self, records: Iterable[tuple[int, TurnRecord]]) -> None:
        """Write everything that has a row."""
        lasting = [(kept.number, node) for node, kept in self._kept.items() if kept.until is not None]
        for _, node in sorted(lasting, key=lambda pair: pair[0]):
            self.put_node(node)
            self.put_reading(node)
        for serial, record in records:
            self.put_record(serial, record)
