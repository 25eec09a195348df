"""Stored rows that are moved out of the tree to the one live request that needs them. It knows nodes and records; the
engine holds their arrays meanwhile.

root -- [0, 3000) system -- [3000, 20000) -- [20000, 20400)      a request that continues from 20400 takes what is
                       `--- [3000, 9000) another request's       behind the branch; its lease ends at 3000 then
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvserve.cache.kept_path import EvictedNodes, KeptPath
from kvserve.cache.match import PrefixMatch
from kvserve.cache.node import Lease, Node, Position
from kvserve.cache.records import BoundaryKind, KvPiece, Payload
from kvserve.cache.store import Store
from kvserve.cache.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place where a request stopped, at `offset`, with the state that was there."""

    offset: int
    kind: BoundaryKind
    state: Payload | None


@dataclass(frozen=True, slots=True)
class Requester:
    """The request that KV is moved to: the owner of its entry, and its user."""

    owner: str | None
    user: str


@dataclass(slots=True)
class Extracted:
    """What was moved out of the tree, in order: rows from `start` on, to which `pieces` holds the last references, and
    the places that had states."""

    start: int
    pieces: list[KvPiece]
    boundaries: list[Boundary]


class Mover:
    """Extracts rows from a store, which makes every change itself. The other tier is told as of an eviction."""

    def __init__(self, store: Store, sweep: Sweep, kept: Callable[[Node], KeptPath]) -> None:
        self._store = store
        self._sweep = sweep
        self._kept = kept

    def nodes(
        self, match: PrefixMatch, requester: Requester, may_stay: Callable[[int], bool], own: Lease | None = None
    ) -> list[Node]:
        """The nodes that can be moved to a request that begins with this match, deepest first. What others need stays,
        and the end of system and tools too if `may_stay` allows its length; no node moves where more would have to
        stay than that allows. What follows the match, an answer that its own client dropped, goes with them where it is
        shorter than what moves."""
        found, end = match.node, match.num_usable_tokens
        behind = list(found.descendants())[::-1]
        is_ours = all(_is_only(node, requester, own) and _is_entry_of(node, requester) for node in behind)
        if match.num_matched_tokens < found.end:  # the request does not continue what ends here
            is_ours &= _is_entry_of(found, requester)
        num_moving, node = 0, found
        moving: list[Node] = []
        while is_ours and node.parent is not None and _is_only(node, requester, own):
            is_shared = len(node.children) > 1 or (node.kind == "system" and num_moving > 0)
            if moving and is_shared:
                break
            moving.append(node)
            parent = node.parent
            if parent.segment is not node.segment and (parent.parent is None or may_stay(parent.end)):
                num_moving = len(moving)
            node = parent
        num_behind = sum(each.end - each.start for each in behind) + found.end - end
        if not num_moving or num_behind > end - moving[num_moving - 1].start:
            return []
        return [*behind, *moving[:num_moving]]

    def unwritten(self, nodes: Sequence[Node]) -> bool:
        """Whether the other tier still reads some of these from RAM."""
        return bool(nodes) and bool(self._evicted(nodes).unwritten())

    def extract(self, match: PrefixMatch, lease: Lease, nodes: Sequence[Node]) -> Extracted:
        """Move `nodes` to the request with this lease, which ends at what stays from then on."""
        pieces, boundaries = list(match.pieces), []
        first = nodes[-1]
        for node in match.node.path():
            if (state := self._store.state_of(node)) is not None and first.start < node.end <= match.num_usable_tokens:
                boundaries.append(Boundary(node.end, state.checkpoint.kind, state.payload))
        self._move_lease(lease, first)
        if self._sweep.before_eviction is not None:
            self._sweep.before_eviction(self._evicted(nodes))
        counters = replace(self._store.counters)
        self._store.remove_leaves(nodes)
        self._store.counters = counters  # nothing was evicted
        return Extracted(first.start, pieces, boundaries)

    def _move_lease(self, lease: Lease, first: Node) -> None:
        if first.parent is None:
            raise ValueError("The root stays.")
        self._store.trie.move(lease, Position(first.parent, first.start))
        lease.chain = lease.chain.truncated(first.start)
        lease.num_told_tokens = min(lease.num_told_tokens, first.start)

    def _evicted(self, nodes: Sequence[Node]) -> EvictedNodes:
        return EvictedNodes(nodes, False, self._kept)


def _is_only(node: Node, requester: Requester, own: Lease | None) -> bool:
    """Whether no other lease ends here and no other user is known."""
    return all(lease is own for lease in node.leases) and node.users.keys() <= {requester.user}


def _is_entry_of(node: Node, requester: Requester) -> bool:
    """Whether a node is not another owner's entry."""
    return node.sequence_end is None or node.sequence_end.owner in (None, requester.owner)
