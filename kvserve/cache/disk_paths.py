"""The trie of blobs and the ways on it: where a prefix leads, what serves it only, the last state on it. No files."""

from collections.abc import Callable, Collection, Iterator, Sequence

from kvserve.cache.block_hash import HashChain
from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_entries import Entry, Step
from kvserve.cache.node import Node, Position
from kvserve.cache.records import Copy, RecordId
from kvserve.cache.token_run import TokenRun
from kvserve.cache.trie import Trie

MAX_NODES_BEHIND_STATE = 4
"""Nobody looks further up for the last state before a place; there it is known from when the blob was made known."""


class Ways:
    """The blobs that are known, on a trie and by name. Whoever calls holds the index's lock, and owns what is in it."""

    def __init__(self) -> None:
        self.trie = Trie(use_index=True)
        self.entries: dict[RecordId, Entry] = {}
        self.by_name: dict[BlobName, Entry] = {}

    def find(self, run: TokenRun, chain: HashChain, above: Sequence[Copy] = ()) -> Position:
        root = self.trie.root(chain.partition)
        if run.start == 0:
            return self.trie.find(root, run, chain.truncated(run.end))
        start = self.inside(above, run.start)
        return self.trie.walk(start, run, run.end) if start is not None else Position(root, 0)

    def inside(self, rows: Sequence[Copy], offset: int) -> Position | None:
        """The place behind `offset` tokens of a prefix: in the last one of its blobs that begins before it."""
        entry = next((each for each in reversed(rows) if isinstance(each, Entry) and each.start < offset), None)
        if entry is None or self.by_name.get(entry.name) is not entry:
            return None
        holders = self.trie.holders.get(entry.record_id, ())
        return next((Position(node, offset) for node in holders if node.start < offset <= node.end), None)

    def steps(self, position: Position, start: int = 0) -> Iterator[Step]:
        """What the path to a place consists of, from the first step that ends behind `start`."""
        nodes, above = list[Node](), position.node
        while above.parent is not None and above.end > start:
            nodes.append(above)
            above = above.parent
        for node in reversed(nodes):
            end = min(node.end, position.depth)
            is_whole = node.checkpoint is not None and end == node.end
            state = self.entries[node.checkpoint.record_id] if node.checkpoint is not None and is_whole else None
            yield Step(self.entry_of(node), node.start, end, state)

    def entry_of(self, node: Node) -> Entry:
        if node.segment is None:
            raise ValueError("The root is no blob.")
        return self.entries[node.segment.record_id]

    def last_state(self, position: Position, limit: int) -> tuple[Entry | None, int]:
        """The last state on the way to a place that ends before `limit`, and where; None and 0 where there is none.

        Further up than some nodes it is not looked for: it is where it was when the last of these was made known.
        """
        node = below = position.node
        for _ in range(MAX_NODES_BEHIND_STATE):
            if node.parent is None:
                return None, 0
            if node.checkpoint is not None and node.end < limit:
                return self.entries[node.checkpoint.record_id], node.end
            below, node = node, node.parent
        return None, self.entry_of(below).state_end


def tops(nodes: Collection[Node]) -> list[Node]:
    """Of the nodes that have tokens of one segment those that do not follow on another one of it."""
    return [node for node in nodes if node.parent not in nodes]


def serving_only(trie: Trie, entry_of: Callable[[Node], Entry], position: Position, start: int) -> list[RecordId]:
    """What serves only the path to a place, from its end up to a branch or to the end of system and tools, and begins
    at `start` or behind it: states, and segments that no other node has. Nothing where what is known goes on with other
    tokens."""
    node, tail = position.node, list[Node]()
    while node.parent is not None and len(node.children) == bool(tail) and node.start >= start:
        entry = entry_of(node)
        if position.depth < node.end or (node.end == entry.head.tokens.end and entry.is_anchor):
            break
        tail.append(node)
        node = node.parent
    states = [node.checkpoint.record_id for node in tail if node.checkpoint is not None]
    rows = dict.fromkeys(entry_of(node).record_id for node in tail)
    return [*states, *(each for each in rows if set(trie.holders[each]) <= set(tail))]
