"""What leaves, in which order, until the limits hold. It decides; `store.py` carries out.

    expired -> entries over their limits -> checkpoints over their budget -> bytes over the budget

Leaves go first, so what others share stays; nodes that a live row stands on never go. Entries with a lifetime of their
own that is not over are pinned: they go after all others.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvserve.cache.eviction import Candidate, Score
from kvserve.cache.kept_path import KeptPath
from kvserve.cache.leaving import Leaving
from kvserve.cache.records import Limits, Room
from kvserve.cache.store import Store
from kvserve.cache.trie import Node

PLAIN, BRANCH_POINT, NEWEST = 0, 1, 2
"""Levels of a checkpoint; a lower one leaves first whatever it is worth. NEWEST: the newest two of a branch, its last
user message, and the end of system and tools."""

PINNED = 1
"""The level of a leaf that was asked to be kept; other leaves are PLAIN."""

SHORT_CLASS_SECONDS = 300.0
"""The shortest lifetime that clients ask for by a cache mark: an agent's user thinks longer than that now and then."""

NUM_NEWEST_KEPT = 2

KEEP_ALIVE_LOOK = 1 / 8
"""What is to be kept alive is looked for this often, in units of the interval itself."""


@dataclass(order=True, slots=True)
class _Ranked:
    """A place in the queue of what may leave."""

    rank: tuple[int, float, int]
    node: Node = field(compare=False)
    is_leaf: bool = field(compare=False)


class Sweep:
    """Brings a store within its limits."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        score: Score,
        kept: Callable[[Node], KeptPath],
        *,
        needs_checkpoints: bool,
    ) -> None:
        self._store = store
        self._limits = limits
        self._score = score
        self._kept = kept
        self._needs_checkpoints = needs_checkpoints
        self._now = 0.0
        self._check_at = -math.inf
        self._keep_alive_at = -math.inf
        self._order = count()
        self.before_leaving: Callable[[Leaving], None] | None = None

    def expect_change(self) -> None:
        """Something may be too many, or may leave, that could not before: the next run looks at every node."""
        self._check_at = -math.inf

    def room(self, reserved_bytes: int) -> Room:
        """What may be added and nothing leaves for it."""
        num_bytes = self._limits.max_bytes - self._store.ram.num_bytes - reserved_bytes
        return Room(num_bytes, self._limits.max_checkpoint_bytes - self._store.checkpoint_bytes)

    def run(self, now: float, reserved_bytes: int, owners_seen_at: dict[str, float]) -> None:
        """Let leave what must. `reserved_bytes` are held by others; owners without entries are forgotten."""
        self._now = now
        self._keep_alive(owners_seen_at)
        if now >= self._check_at:
            self._check_at = now + self._limits.check_seconds
            self._expire(owners_seen_at)
            self._limit_entries()
            self._forget_owners(owners_seen_at)
            self._store.trie.prune()
        self._thin_checkpoints()
        self._make_room(reserved_bytes)

    def _remove(self, nodes: Sequence[Node]) -> None:
        """A leaf leaves, then its ancestors in this order."""
        self._tell(nodes, is_state_only=False)
        self._store.loosen_leaves(nodes)

    def _drop_state(self, node: Node) -> None:
        self._tell([node], is_state_only=True)
        self._store.drop_checkpoint(node)

    def _tell(self, nodes: Sequence[Node], *, is_state_only: bool) -> None:
        if self.before_leaving is not None:
            num_bytes = self._store.last_bytes(nodes[0])
            self.before_leaving(Leaving(nodes, is_state_only, num_bytes, self._kept))

    # --- time and number ----------------------------------------------------------------------------------------------

    def _expire(self, owners_seen_at: dict[str, float]) -> None:
        """Leaves that nobody used for too long, and all entries of an owner who was not seen for too long."""
        for leaf in self._free_leaves():
            own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
            if own is None and self._is_owner_idle(leaf, owners_seen_at):
                self._remove(exclusive_tail(leaf))
                continue
            node = leaf
            while node.parent is not None and not (node.children or node.leases) and self._is_expired(node, own):
                parent = node.parent
                self._remove([node])
                node = parent

    def _is_owner_idle(self, leaf: Node, owners_seen_at: dict[str, float]) -> bool:
        owner = leaf.sequence_end.owner if leaf.sequence_end else None
        idle_seconds = self._now - owners_seen_at.get(owner, self._now) if owner is not None else 0.0
        return 0 < self._limits.owner_idle_seconds < idle_seconds

    def _is_expired(self, node: Node, own: float | None) -> bool:
        """`own` is the lifetime of the entry that the node serves, if it has one; a system's end serves others too."""
        ttl_seconds = self._limits.ttl_seconds if own is None or node.kind == "system" else own
        return 0 < ttl_seconds < self._now - node.last_used_at

    def _keep_alive(self, owners_seen_at: dict[str, float]) -> None:
        """Entries of the short class count as used before they end, while their owner is not idle: no arrays move.

        Of one that has no owner the last row that ended there tells how long nobody came.
        """
        seconds = self._limits.keep_alive_seconds
        if not seconds or self._now < self._keep_alive_at:
            return
        self._keep_alive_at = self._now + seconds * KEEP_ALIVE_LOOK
        for leaf in self._entries():
            own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
            is_due = own is not None and seconds < own <= SHORT_CLASS_SECONDS and self._is_pinned(leaf)
            is_due = is_due and self._now - leaf.last_used_at >= seconds
            if is_due and not (self._is_owner_idle(leaf, owners_seen_at) or self._is_forsaken(leaf)):
                for node in leaf.path():
                    node.last_used_at = self._now

    def _is_forsaken(self, leaf: Node) -> bool:
        """Whether an entry that is nobody's was not asked for within the time that an owner has."""
        end = leaf.sequence_end
        return end is not None and end.owner is None and 0 < self._limits.owner_idle_seconds < self._now - end.ended_at

    def _is_pinned(self, leaf: Node) -> bool:
        """Whether an entry was asked to be kept for a time that is not over."""
        own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
        return own is not None and self._now - leaf.last_used_at <= own

    def _limit_entries(self) -> None:
        """Per owner the least recently used entry leaves, over all owners the least valuable one."""
        by_owner: dict[str, list[Node]] = {}
        for node in self._entries():
            if node.sequence_end is not None and node.sequence_end.owner is not None:
                by_owner.setdefault(node.sequence_end.owner, []).append(node)
        for entries in by_owner.values():
            free = [node for node in entries if not node.leases]
            free.sort(key=lambda node: (self._is_pinned(node), node.last_used_at))
            for node in free[: max(len(entries) - self._limits.max_entries_per_owner, 0)]:
                self._remove(exclusive_tail(node))
        entries = list(self._entries())
        for _ in range(len(entries) - self._limits.max_entries):
            free = [node for node in entries if not node.leases]
            if not free:
                return
            worst = min(free, key=lambda node: (self._is_pinned(node), self._score(self._entry_candidate(node))))
            entries.remove(worst)
            self._remove(exclusive_tail(worst))

    def _entry_candidate(self, leaf: Node) -> Candidate:
        tail = exclusive_tail(leaf)
        num_bytes = sum(self._node_bytes(node) for node in tail)
        return Candidate(tail[-1].start, leaf.end, num_bytes, leaf.num_uses, self._now - leaf.last_used_at)

    def _forget_owners(self, owners_seen_at: dict[str, float]) -> None:
        """Only owners with entries or live rows are remembered."""
        known = {node.sequence_end.owner for node in self._entries() if node.sequence_end is not None}
        known |= {lease.owner for root in self._store.trie.roots() for lease in root.leases}
        known |= {lease.owner for node in self._store.trie.nodes() for lease in node.leases}
        for owner in owners_seen_at.keys() - known:
            del owners_seen_at[owner]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _thin_checkpoints(self) -> None:
        """Drop checkpoints by level and value until they fit their own budget."""
        if self._store.checkpoint_bytes <= self._limits.max_checkpoint_bytes:
            return
        levels = self._levels()
        queue = [self._ranked(node, is_leaf=False, level=level) for node, level in levels.items() if not node.leases]
        for node in self._worst_first(queue, levels):
            if self._store.checkpoint_bytes <= self._limits.max_checkpoint_bytes:
                return
            self._drop_state(node)
            self._cull_dead_tail(node)

    def _levels(self) -> dict[Node, int]:
        """Every node with a checkpoint and how well that is protected."""
        levels: dict[Node, int] = {}
        for node in self._store.trie.nodes():
            if node.checkpoint is not None:
                is_system = node.checkpoint.kind == "system" or node.kind == "system"
                levels[node] = NEWEST if is_system else BRANCH_POINT if len(node.children) > 1 else PLAIN
        for leaf in self._store.trie.nodes():
            if not leaf.children:
                levels.update(dict.fromkeys(_newest(leaf), NEWEST))
        return levels

    def _cull_dead_tail(self, node: Node) -> None:
        """Where layers cannot be cut, rows behind the last checkpoint of a branch serve nobody."""
        while (
            self._needs_checkpoints
            and node.parent is not None
            and not (node.children or node.leases)
            and node.checkpoint is None
        ):
            parent = node.parent
            self._remove([node])
            node = parent

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _make_room(self, reserved_bytes: int) -> None:
        """Leaves and plain checkpoints leave by score; then, where only live rows' paths are left, all checkpoints."""
        budget = self._limits.max_bytes - reserved_bytes
        self._store.fit()
        if self._store.ram.num_bytes <= budget:
            return
        levels = self._levels()
        queue = [self._ranked(leaf, is_leaf=True) for leaf in self._free_leaves()]
        queue += [
            self._ranked(node, is_leaf=False)
            for node, level in levels.items()
            if level == PLAIN and node.children and not node.leases
        ]
        heapq.heapify(queue)
        while queue and self._store.ram.num_bytes > budget:
            while queue and self._store.num_bytes_once_fit > budget:
                self._leave(heapq.heappop(queue), queue)
            self._store.fit()
        if self._store.ram.num_bytes > budget:
            rest = [
                self._ranked(node, is_leaf=False, level=level)
                for node, level in self._levels().items()
                if not node.leases
            ]
            for node in self._worst_first(rest, self._levels()):
                if self._store.ram.num_bytes <= budget:
                    return
                self._drop_state(node)

    def _leave(self, ranked: _Ranked, queue: list[_Ranked]) -> None:
        """Let a leaf or an inner checkpoint go, or put it back where its worth has grown meanwhile."""
        node, parent = ranked.node, ranked.node.parent
        if parent is None or not self._store.trie.is_held(node) or (not ranked.is_leaf and node.checkpoint is None):
            return
        fresh = self._ranked(node, is_leaf=not node.children)
        if fresh.rank[:2] > ranked.rank[:2] and queue and fresh > queue[0]:
            heapq.heappush(queue, fresh)
        elif node.children:
            self._drop_state(node)
        else:
            self._remove([node])
            self._cull_dead_tail(parent)
            while parent is not None and parent.parent is not None and not self._store.trie.is_held(parent):
                parent = parent.parent
            if parent is not None and parent.parent is not None and not (parent.children or parent.leases):
                heapq.heappush(queue, self._ranked(parent, is_leaf=True))

    # --- what things are worth ----------------------------------------------------------------------------------------

    def _worst_first(self, queue: list[_Ranked], levels: dict[Node, int]) -> Iterator[Node]:
        """Nodes whose checkpoint may go. Dropping one makes the next one on its branch worth more."""
        heapq.heapify(queue)
        while queue:
            ranked = heapq.heappop(queue)
            if ranked.node.checkpoint is None:
                continue
            fresh = self._ranked(ranked.node, is_leaf=False, level=levels[ranked.node])
            if fresh.rank[:2] > ranked.rank[:2] and queue and fresh > queue[0]:
                heapq.heappush(queue, fresh)
            else:
                yield ranked.node

    def _ranked(self, node: Node, *, is_leaf: bool, level: int = PLAIN) -> _Ranked:
        candidate = self._leaf_candidate(node) if is_leaf else self._checkpoint_candidate(node)
        level = PINNED if is_leaf and self._is_pinned(node) else level
        return _Ranked((level, self._score(candidate), next(self._order)), node, is_leaf)

    def _leaf_candidate(self, node: Node) -> Candidate:
        start, end = node.start, node.end
        if self._needs_checkpoints:
            start = _previous_checkpoint(node) if node.checkpoint is not None else end
        return Candidate(start, end, self._node_bytes(node), node.num_uses, self._now - node.last_used_at)

    def _checkpoint_candidate(self, node: Node) -> Candidate:
        num_bytes = node.checkpoint.num_bytes if node.checkpoint is not None else 0
        return Candidate(
            start=_previous_checkpoint(node),
            end=node.end,
            num_bytes=num_bytes,
            num_uses=node.num_restores,
            age_seconds=self._now - node.restored_at,
            is_end=not node.children,
        )

    def _node_bytes(self, node: Node) -> int:
        num_bytes = node.checkpoint.num_bytes if node.checkpoint is not None else 0
        if node.segment is not None:
            num_bytes += node.segment.num_bytes * (node.end - node.start) // len(node.segment.tokens)
        return num_bytes

    def _free_leaves(self) -> list[Node]:
        return [node for node in self._store.trie.nodes() if not (node.children or node.leases)]

    def _entries(self) -> Iterable[Node]:
        return (node for node in self._store.trie.nodes() if node.sequence_end is not None)


def exclusive_tail(leaf: Node) -> list[Node]:
    """A leaf and the ancestors that serve only it, upwards to a branch, a live row or the end of system and tools."""
    tail = [leaf]
    node = leaf.parent
    while (
        node is not None
        and node.parent is not None
        and len(node.children) == 1
        and not node.leases
        and node.kind != "system"
    ):
        tail.append(node)
        node = node.parent
    return tail


def added_tail(last: Node, start: int) -> list[Node]:
    """A place and its ancestors that begin at `start` or behind it, upwards to one that somebody else needs."""
    tail: list[Node] = []
    node = last
    while node.parent is not None and node.start >= start and len(node.children) == bool(tail):
        if node.leases or node.sequence_end is not None:
            break
        tail.append(node)
        node = node.parent
    return tail


def exclusive_nodes(nodes: Iterable[Node], is_owned: Callable[[Node], bool]) -> list[Node]:
    """The nodes that lead to owned leaves and to nobody else's, deepest first: no live row is behind them, nor the end
    of system and tools. A leaf that is nobody's entry stays or goes with what it stands on."""
    ours: set[Node] = set()
    others: set[Node] = set()
    ordered = sorted((node for node in nodes if node.parent is not None), key=lambda node: -node.start)
    for node in ordered:
        children = node.children.values()
        is_theirs = bool(node.leases) or node.kind == "system" or any(child in others for child in children)
        is_ours = is_owned(node) or any(child in ours for child in children)
        is_entry = node.sequence_end is not None and node.sequence_end.owner is not None
        if is_theirs or (is_entry and not is_owned(node)):
            others.add(node)
        elif is_ours:
            ours.add(node)
    gone: set[Node] = set()
    for node in reversed(ordered):  # what is nobody's goes with its parent
        if node in ours or node.parent in gone:
            gone.add(node)
    return [node for node in ordered if node in gone]


def _previous_checkpoint(node: Node) -> int:
    """The offset of the last checkpoint above a node."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above.end if above is not None else 0


def _newest(leaf: Node) -> Iterator[Node]:
    """On the path to a leaf: its deepest two checkpoints and the deepest one behind a user message."""
    num_found, has_user = 0, False
    node: Node | None = leaf
    while node is not None and not (num_found >= NUM_NEWEST_KEPT and has_user):
        if node.checkpoint is not None:
            is_user = node.checkpoint.kind == "user" and not has_user
            if num_found < NUM_NEWEST_KEPT or is_user:
                yield node
            num_found += 1
            has_user = has_user or is_user
        node = node.parent
