"""The way to a place on the trie of blobs: what serves it only, and the last state on it. It touches no file."""

from collections.abc import Callable, Collection

from kvserve.cache.disk_entries import Entry
from kvserve.cache.node import Node, Position
from kvserve.cache.records import RecordId
from kvserve.cache.trie import Trie

MAX_NODES_BEHIND_STATE = 4
"""Nobody looks further up for the last state before a place; there it is known from when the blob was made known."""


def last_state(position: Position, limit: int, entry_of: Callable[[Node], Entry]) -> int:
    """Where the last state is on the way to a place that ends before `limit`; 0 where there is none."""
    node = below = position.node
    for _ in range(MAX_NODES_BEHIND_STATE):
        if node.parent is None or (node.checkpoint is not None and node.end < limit):
            return node.end
        below, node = node, node.parent
    return entry_of(below).state_end


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
