"""What the model has read and written in every conversation, found by chain digests of what a client sends.

    a chain names a whole canonical history          so a branch or a sub-agent has nodes of its own and cannot
    a node says how the model saw its last message   change another's; nodes are added, never changed

A chain can have several nodes: the same conversation read twice, with another clock in it. A lookup finds the newest
one; older paths keep theirs. This file knows neither rules nor rendering.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice

from kvserve.core import ToolSpec
from kvserve.sessions.first_values import ToolOrders
from kvserve.sessions.journal import UNWRITTEN, Journal, Rows, number_key
from kvserve.sessions.message_rows import parse
from kvserve.sessions.seen import Conflicts, PathNode, PathStep, PlaceReadings, TurnRecord, TurnTotals
from kvserve.sessions.tool_layouts import ToolLayout, ToolLayouts
from kvserve.sessions.turn_rows import PathJournal, nodes_of_rows, record_of
from kvserve.sessions.turn_state import ChainState, LeafOrder, NodeState, RecordStore, UnrecordedReadings, node_bytes
from kvserve.sessions.written_messages import said_digest

NUM_COMPARED = 8
"""How many readings of one message are compared with a new one: a clock may have left hundreds."""


class TurnStore:
    """Paths of messages, bounded in nodes and bytes. The least recently used leaf is evicted first; a message before it
    stays as long as another path needs it. Thread-safe.

    The store tells the journal what is to last as it changes: a node, with all nodes before it, when a request reads it
    that may be written down.
    """

    def __init__(
        self,
        *,
        max_nodes: int = 100_000,
        max_bytes: int = 256 << 20,
        max_record_bytes: int = 128 << 20,
        max_tool_sets: int = 64,
        max_tool_bytes: int = 16 << 20,
        journal: Journal = UNWRITTEN,
    ) -> None:
        self._max_nodes = max_nodes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._states: dict[bytes, ChainState] = {}
        self._kept: dict[PathNode, NodeState] = {}
        self._roots: dict[bytes, dict[PathNode, None]] = {}
        self._leaves = LeafOrder(self._kept)
        self._numbers = count()
        self._num_bytes = 0
        self._num_reads = 0
        self._rows = PathJournal(journal, self._kept, self._states)
        self._records = RecordStore(max_record_bytes, self._rows.record_gone)
        self._tools = ToolOrders(max_tool_sets, max_tool_bytes, journal)
        self._layouts = ToolLayouts(journal=journal)
        self._unrecorded = UnrecordedReadings()

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, chains: Sequence[bytes]) -> PathNode | None:
        """The deepest message of the conversation that the model has read; `chains[i]` names it up to message i.

        Where the model wrote different things at one place, a path through it may be another client's: a shallower one
        is returned, unless the place was read there as a client sent it.
        """
        with self._lock:
            is_sure: dict[PathNode, bool] = {}
            for chain in reversed(chains):
                state = self._states.get(chain)
                if state is not None and self._is_sure(state.newest, is_sure):
                    self._leaves.touch(state.newest)
                    return state.newest
            return None

    def is_contested(self, node: PathNode) -> bool:
        """Whether this message was also read with another meaning: then what a client left out of it is unknown."""
        with self._lock:
            state = self._states.get(node.chain)
            return state is not None and state.is_contested

    def conflicts(self, chains: Iterable[bytes]) -> list[Conflicts]:
        """What is unknown of each of these places."""
        with self._lock:
            return [state.conflicts if (state := self._states.get(chain)) else Conflicts() for chain in chains]

    def note_unrecorded(self, steps: Iterable[PathStep]) -> None:
        """Note what a request without a record read and was given. Where a message or an answer with another meaning is
        kept, now or later, it is unknown from then on which of them a client leaves out."""
        passed = [(step, said_digest(step.written) if step.written is not None else None) for step in steps]
        with self._lock:
            for step, said in passed:
                self._unrecorded.note(step, said)
                state = self._states.get(step.chain)
                if state is not None and state.note_unrecorded(step.meaning, said):
                    self._rows.put_conflicts(step.chain)

    def record_for(self, node: PathNode | None, session: str | None = None) -> TurnRecord | None:
        """The newest request that passed through this message, else the newest one that shares the most of its path,
        else the newest one of the session."""
        with self._lock:
            return self._records.newest(node, session)

    def records(self) -> tuple[TurnRecord, ...]:
        """All records, the oldest request first."""
        with self._lock:
            return tuple(self._records)

    def record_at(self, leaf: PathNode) -> TurnRecord | None:
        """The request that ended with this message; None where there is no record, or a newer request has gone on."""
        with self._lock:
            return self._records.at(leaf)

    def totals(self) -> TurnTotals:
        """What is kept now."""
        with self._lock:
            return TurnTotals(len(self._kept), self._num_bytes, len(self._records), self._records.num_bytes)

    # --- adding -------------------------------------------------------------------------------------------------------

    def extend(
        self, parent: PathNode | None, steps: Iterable[PathStep], until: float | None = None, *, owner: str = ""
    ) -> PathNode:
        """Add what the model read after `parent` (None: from the beginning, in a conversation of `owner`); returns its
        last message. The rows are kept until `until` at least, in seconds since the epoch; None: nothing is written
        down.

        A step that the model has read in this form at this place adds no node, nor does one that leaves the chain as it
        is (a message without identity). Raises ValueError where no message is left.
        """
        added = tuple(steps)  # a caller's generator must not run under the lock
        with self._lock:
            if parent is not None:
                self._read_path(parent)
            node = parent
            for step in added:
                if node is None or step.chain != node.chain:
                    node = self._step(node, step, owner)
            if node is None:
                raise ValueError("A path has at least one message.")
            self._note_read(node, until)
            self._shrink(self._max_bytes)
            return node

    def take_in(
        self,
        parent: PathNode | None,
        places: Sequence[PlaceReadings],
        until: float,
        *,
        owner: str,
    ) -> None:
        """Add what another server read and wrote in a conversation of `owner` after `parent`, as if it had been here:
        of each place all readings, the path goes on from the last; and what is unknown there."""
        with self._lock:
            node = parent
            if parent is not None:
                self._read_path(parent)
            for place in places:
                before = node
                self._states.setdefault(place.chain, ChainState()).add(place.conflicts)  # before they are compared
                for step in place.readings:
                    node = self._step(before, step, owner)
            if node is None:
                return
            self._note_read(node, until)
            for place in places:
                self._rows.put_conflicts(place.chain)
                for layout in reversed(place.layouts):
                    self._layouts.put(place.chain, layout, is_lasting=self._rows.is_lasting(place.chain))
            self._shrink(self._max_bytes)

    def remember(self, record: TurnRecord, *, is_lasting: bool = False) -> None:
        """Keep the record of the newest request. Does nothing where its leaf was evicted meanwhile."""
        with self._lock:
            if record.leaf not in self._kept:
                return
            self._num_reads += 1
            if self._records.put(record) and is_lasting:
                self._rows.put_record(self._num_reads, record)
            if record.tool_layout.front:
                path = record.leaf.path()
                answer = next((node.chain for node in path if node.written is not None), None)
                self._layouts.put_along(
                    [node.chain for node in path],
                    answer,
                    record.tool_layout,
                    lambda chain: is_lasting and self._rows.is_lasting(chain),
                )

    def tools_as_seen(
        self, digest: bytes, tools: Sequence[ToolSpec], until: float | None = None
    ) -> tuple[ToolSpec, ...]:
        """The tools in the order in which this set first came. `digest` is the set's, whatever its order."""
        with self._lock:
            return self._tools.as_seen(digest, tools, until)

    def tool_layouts(self, chains: Sequence[bytes]) -> list[tuple[int, ToolLayout]]:
        """The layouts of the tools in requests that read these messages: each with the index of the message from which
        on it holds, the last message first. None holds before the first answer."""
        with self._lock:
            return [(index, each) for index in reversed(range(len(chains))) for each in self._layouts.at(chains[index])]

    def forget(self, is_gone: Callable[[str], bool]) -> int:
        """Delete the conversations of these owners, and all first orders of tools; returns the number of messages."""
        with self._lock:
            gone = [node for node in self._kept if is_gone(node.owner)]
            for node in sorted(gone, key=lambda node: node.index, reverse=True):
                self._forget(node)
            self._leaves.drop_stale()
            self._tools.clear()
            return len(gone)

    def clear(self) -> None:
        """Delete everything. Paths that a caller holds stay whole."""
        with self._lock:
            self._rows.all_gone()
            self._states.clear()
            self._kept.clear()
            self._roots.clear()
            self._leaves.clear()
            self._num_bytes = 0
            self._records.clear()
            self._tools.clear()
            self._layouts.clear()
            self._unrecorded.clear()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _is_sure(self, node: PathNode, known: dict[PathNode, bool]) -> bool:
        """Whether the path holds no answer that is one of several at its place; each node is looked at once."""
        passed: list[PathNode] = []
        verdict = True
        for each in node.ancestry():
            if each in known:
                verdict = known[each]
                break
            passed.append(each)
        for each in reversed(passed):
            verdict = verdict and (each.written is None or not self._states[each.chain].is_doubtful)
            known[each] = verdict
        return verdict

    def _step(self, parent: PathNode | None, step: PathStep, owner: str) -> PathNode:
        readings = self._children(parent).get(step.chain, {})
        for known in islice(reversed(readings), NUM_COMPARED):
            if self._states[known.chain].is_as_seen(known, step):
                self._read_again(known)
                return known
        index = 0 if parent is None else parent.index + 1
        owner = owner if parent is None else parent.owner
        node = PathNode(parent, step.chain, step.message, step.written, index, step.meaning, owner)
        self._keep(node)
        return node

    def _note_read(self, leaf: PathNode, until: float | None) -> None:
        """A request has read this path just now."""
        self._leaves.touch(leaf)
        self._num_reads += 1
        for read in leaf.ancestry():
            self._kept[read].last_read = self._num_reads
        if until is not None:
            self._rows.read(leaf, until)

    def _read_path(self, leaf: PathNode) -> None:
        """A request continues this path, so it has read all of it; nodes that were evicted are added again."""
        for node in leaf.path():
            if node in self._kept:
                self._read_again(node)
            else:
                self._keep(node)

    def _children(self, parent: PathNode | None) -> dict[bytes, dict[PathNode, None]]:
        return self._roots if parent is None else self._kept[parent].children

    def _keep(self, node: PathNode) -> None:
        self._children(node.parent).setdefault(node.chain, {})
        if node.parent is not None:
            self._kept[node.parent].num_children += 1
        self._kept[node] = NodeState(next(self._numbers), node_bytes(node), self._leaves.next_use())
        self._num_bytes += self._kept[node].num_bytes
        state = self._states.setdefault(node.chain, ChainState())
        state.take(node)
        self._unrecorded.add_conflicts(state, node)
        self._read_again(node)
        self._rows.put_conflicts(node.chain)

    def _read_again(self, node: PathNode) -> None:
        """Make it the newest reading of its chain; the one before it is dropped unless another path needs it."""
        nodes = self._states[node.chain].nodes
        before = next(reversed(nodes), None)
        for readings in (nodes, self._children(node.parent)[node.chain]):
            readings.pop(node, None)
            readings[node] = None
        if before is not None and before is not node:
            self._drop_unneeded(before)

    def _drop_unneeded(self, node: PathNode | None) -> None:
        """Drop a node that no longer path and no lookup needs, and then the nodes that only it needed."""
        while node is not None and not self._kept[node].num_children and self._states[node.chain].newest is not node:
            self._forget(node)
            node = node.parent
        if node is not None:
            self._leaves.add(node)

    def _forget(self, node: PathNode) -> None:
        self._records.drop(node)
        kept = self._kept.pop(node)
        self._rows.node_gone(node, kept)
        self._num_bytes -= kept.num_bytes
        siblings = self._children(node.parent)
        del siblings[node.chain][node]
        if not siblings[node.chain]:
            del siblings[node.chain]
        if node.parent is not None:
            self._kept[node.parent].num_children -= 1
        state = self._states[node.chain]
        del state.nodes[node]
        self._rows.put_conflicts(node.chain)
        if not state.nodes:
            del self._states[node.chain]
            self._layouts.drop(node.chain)
        elif not self._rows.is_lasting(node.chain):
            self._layouts.drop_row(node.chain)

    def _shrink(self, max_bytes: int) -> None:
        while self._kept and (len(self._kept) > self._max_nodes or self._num_bytes > max_bytes):
            node = self._leaves.pop()
            self._forget(node)
            self._drop_unneeded(node.parent)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def load(self, rows: Rows) -> None:
        """Take in what an earlier store wrote down; this one must be empty. Raises ValueError or LookupError where the
        rows do not fit together."""
        with self._lock:
            self._take_nodes(nodes_of_rows(rows))
            for chain, body in rows.get("place", ()):
                self._states[chain].recall(parse(body))
            leaves = {number_key(kept.number): node for node, kept in self._kept.items()}
            records = [record_of(body, leaves[key]) for key, body in rows.get("record", ())]
            for serial, record in sorted(records, key=lambda pair: pair[0]):
                self._num_reads = max(self._num_reads, serial)
                self._records.put(record)
            self._tools.load(rows)
            self._layouts.load(rows, self._rows.is_lasting)
            self._shrink(self._max_bytes)

    def put_all(self) -> None:
        """Tell the journal everything that has a row."""
        with self._lock:
            self._rows.put_all((self._num_reads + index, record) for index, record in enumerate(self._records))
            self._num_reads += len(self._records)
            self._tools.put_all()
            self._layouts.put_all()

    def expire(self, now: float) -> None:
        """Drop the paths whose rows have expired."""
        with self._lock:
            leaves = [node for node, kept in self._kept.items() if not kept.num_children]
            while leaves:
                node = leaves.pop()
                kept = self._kept.get(node)
                if kept is None or kept.num_children or kept.until is None or kept.until >= now:
                    continue
                self._forget(node)
                if node.parent is not None:
                    self._drop_unneeded(node.parent)
                    leaves.append(node.parent)
            self._tools.expire(now)

    def shrink(self, share: float) -> None:
        """Evict until this share of the bytes is left, of paths and of records."""
        with self._lock:
            self._shrink(int(self._num_bytes * share))
            self._records.shrink(int(self._records.num_bytes * share))

    def _take_nodes(self, found: dict[PathNode, NodeState]) -> None:
        self._kept.update(found)
        for node, kept in found.items():
            self._num_bytes += kept.num_bytes
            self._states.setdefault(node.chain, ChainState()).take(node)
        for node in sorted(found, key=lambda node: found[node].last_read):
            self._children(node.parent).setdefault(node.chain, {})[node] = None
            self._states[node.chain].nodes[node] = None
            self._leaves.touch(node)
        self._numbers = count(max((kept.number for kept in found.values()), default=-1) + 1)
        self._num_reads = max((kept.last_read for kept in found.values()), default=0)
