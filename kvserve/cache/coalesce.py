"""Which small records become one, and how one replaces them. It joins no arrays: the engine brings the payload."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from kvserve.cache.node import Node
from kvserve.cache.records import KvPiece, Payload
from kvserve.cache.store import Store
from kvserve.cache.trie import Trie

MAX_RECORD_TOKENS = 4096
"""500 turns of 64 tokens restore in 1.12 times the time of one record; with 2048 in 1.21, never joined in 4."""

MIN_PIECES = 8
"""This many records are joined even if they are short together: their number is what a restore pays for."""


STUB_SHARE = 8
"""A dead end of at most this part of a record is no branch: it is the end of an answer that a client did not send back.
Agents make one at every turn, and a conversation would restore from as many records as it has turns."""


@dataclass(frozen=True, slots=True)
class CoalesceRun:
    """Consecutive nodes of a chain whose branches are stubs; `pieces[i]` are the rows of `nodes[i]`."""

    nodes: tuple[Node, ...]
    pieces: tuple[KvPiece, ...]

    @property
    def num_tokens(self) -> int:
        return self.pieces[-1].end - self.pieces[0].start


def plan_run(store: Store, max_tokens: int) -> CoalesceRun | None:
    """The first run of records that are worth joining, or None."""
    for chain in _chains(store.trie, max_tokens // STUB_SHARE):
        for nodes in _groups(chain, max_tokens):
            pieces = tuple(store.piece_of(node, node.end) for node in nodes)
            if all(piece.payload is not None for piece in pieces):
                return CoalesceRun(tuple(nodes), pieces)
    return None


def replace_run(store: Store, run: CoalesceRun, payload: Payload) -> None:
    """Put `payload` in the place of the records of `run`. Raises ValueError for a plan that is old."""
    if any(node.segment is not piece.segment for node, piece in zip(run.nodes, run.pieces, strict=True)):
        raise ValueError("The tree has changed since this plan: plan again.")
    store.replace_rows(run.nodes, payload)
    _merge(store.trie, run.nodes)


def _merge(trie: Trie, nodes: tuple[Node, ...]) -> None:
    """Join neighbours that hold one record and between which nothing ends and no state is kept."""
    upper = nodes[0]
    for node in nodes[1:]:
        has_meaning = upper.checkpoint or upper.kind == "system" or upper.sequence_end
        is_one = upper.segment is node.segment and upper.is_guess == node.is_guess
        if is_one and len(upper.children) == 1 and not has_meaning:
            trie.merge(upper)
        else:
            upper = node


def _chains(trie: Trie, stub_tokens: int) -> Iterator[list[Node]]:
    """Maximal runs of nodes of which each but the last has one child that is no stub."""
    for node in trie.nodes():
        if node.parent is None or (node.parent.parent is not None and _next(node.parent, stub_tokens) is node):
            continue
        chain = [node]
        while (following := _next(chain[-1], stub_tokens)) is not None:
            chain.append(following)
        yield chain


def _next(node: Node, stub_tokens: int) -> Node | None:
    """The next node of a chain; None where it ends or branches."""
    if len(node.children) == 1:
        return next(iter(node.children.values()))
    going_on = [each for each in node.children.values() if each.children or each.end - each.start > stub_tokens]
    return going_on[0] if len(going_on) == 1 else None


def _groups(chain: list[Node], max_tokens: int) -> Iterator[list[Node]]:
    """Neighbours that hold several small records and fit into `max_tokens` together."""
    group: list[Node] = []
    for unit in _units(chain):
        size = unit[-1].end - unit[0].start
        if group and group[-1].end - group[0].start + size > max_tokens:
            if _is_worth_it(group, max_tokens):
                yield group
            group = []
        if 2 * size >= max_tokens:
            if _is_worth_it(group, max_tokens):
                yield group
            group = []
        else:
            group = [*group, *unit]
    if _is_worth_it(group, max_tokens):
        yield group


def _units(chain: list[Node]) -> Iterator[list[Node]]:
    """Neighbours that hold one record already."""
    return (list(unit) for _, unit in groupby(chain, key=lambda node: node.segment))


def _is_worth_it(group: list[Node], max_tokens: int) -> bool:
    num_records = len({node.segment for node in group})
    is_long = bool(group) and 2 * (group[-1].end - group[0].start) >= max_tokens
    return num_records >= MIN_PIECES or (num_records > 1 and is_long)
