"""What is evicted, in which order, until the limits hold. It decides; `store.py` carries out.

    expired -> checkpoints over their budget -> bytes over the budget

Leaves are evicted first, so what others share stays; leased paths are never evicted. The numbers of entries bind only
where bytes are short: then entries over their number are evicted before all others, and entries whose own lifetime is
not over are evicted last. The next node is found without a look at all others (`eviction_order.py`). Expiry looks at
all nodes when the first is due, at least once an interval; in between at the nodes that requests released.

A run may be bounded: it stops after so many pieces, and the next one continues where it stopped (0049).
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvserve.cache.branches import exclusive_suffix
from kvserve.cache.eviction import Score
from kvserve.cache.eviction_order import EvictionOrder
from kvserve.cache.eviction_rank import SURPLUS
from kvserve.cache.kept_path import EvictedNodes, KeptPath
from kvserve.cache.node import Lease, Node, SequenceEnd
from kvserve.cache.records import Limits, Room
from kvserve.cache.store import Store

SHORT_CLASS_SECONDS = 300.0
"""The shortest lifetime that clients ask for by a cache mark: an agent's user thinks longer than that now and then."""

RANKED_PER_PIECE = 8
"""Ranking this many nodes takes about as long as evicting one."""

BYTES_PER_PIECE = 4 * 2**20
"""Each time this many bytes are freed or copied counts as one piece more."""

KEEP_ALIVE_LOOK = 1 / 8
"""How often entries to keep alive are looked for, in units of the interval itself."""


class Sweep:
    """Brings a store within its limits. The tree notes in `owners_seen_at` when each owner was seen last; owners
    without entries are forgotten."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        score: Score,
        kept: Callable[[Node], KeptPath],
        leases: Iterable[Lease],
        *,
        needs_checkpoints: bool,
    ) -> None:
        self._store = store
        self._limits = limits
        self._kept = kept
        self._leases = leases
        self._needs_checkpoints = needs_checkpoints
        self._order = EvictionOrder(store.trie, score, needs_checkpoints=needs_checkpoints)
        self._ranks = self._order.ranks
        self._is_number_known = False
        self._unlooked: deque[tuple[Node, float | None]] = deque()
        self._is_interval_look = False
        self._unfinished: tuple[Node, SequenceEnd | None] | None = None
        self._pieces_left = math.inf
        self._now = 0.0
        self._check_at = -math.inf
        self._due_at = math.inf
        self._keep_alive_at = -math.inf
        self.owners_seen_at: dict[str, float] = {}
        self.before_eviction: Callable[[EvictedNodes], None] | None = None

    def expect_change(self) -> None:
        """Have the next run look at every node: something else may have expired, or may be evicted now."""
        self._check_at = -math.inf

    def room(self, reserved_bytes: int) -> Room:
        """What may be added without an eviction."""
        num_bytes = self._limits.max_bytes - self._store.ram.num_bytes - reserved_bytes
        return Room(num_bytes, self._limits.max_checkpoint_bytes - self._store.checkpoint_bytes)

    def run(self, now: float, reserved_bytes: int, max_pieces: float = math.inf) -> bool:
        """Evict what must be, about `max_pieces` leaves and states at a time. `reserved_bytes` are held by others.
        Returns whether no work is left."""
        self._now = self._ranks.now = now
        self._pieces_left = max_pieces
        self._order.forget_gone()
        self._finish()
        self._keep_alive()
        if now >= self._check_at or now > self._due_at:
            self._check_at, self._due_at = now + self._limits.check_seconds, math.inf
            begun = [each for each in self._unlooked if each[1] is not None]  # the rest of an entry with a lifetime
            self._unlooked = deque((*begun, *((leaf, None) for leaf in self._free_leaves())))
            self._is_interval_look, self._is_number_known = True, False
        elif self._store.trie.changed:
            self._look_at_changed()
            self._is_number_known = False
        self._store.trie.changed.clear()
        self._expire()
        if self._is_interval_look and not self._unlooked:
            self._is_interval_look = False
            self._forget_owners()
            self._store.trie.prune()
            self._rank()  # so that only this interval's changes are left to rank when bytes are short
        budget = self._limits.max_bytes - reserved_bytes
        if self._store.ram.num_bytes > budget or self._has_too_many_states or not self._order.is_up_to_date:
            self._rank()
        self._thin_checkpoints()
        self._make_room(budget)
        return self._pieces_left > 0

    @property
    def _has_too_many_states(self) -> bool:
        return self._store.checkpoint_bytes > self._limits.max_checkpoint_bytes

    def _rank(self) -> None:
        if self._pieces_left > 0:
            num_ranked = self._order.update(self._pieces_left * RANKED_PER_PIECE)
            self._pieces_left -= num_ranked / RANKED_PER_PIECE

    def _look_at_changed(self) -> None:
        """Look at the nodes that requests released: they may have expired, or their partition may be empty."""
        for changed in self._store.trie.changed:
            node = changed
            while node.parent is not None and not self._store.trie.is_held(node):
                node = node.parent
            if node.parent is None:
                self._store.trie.prune_root(node)
            else:
                self._unlooked.append((node, None))

    def _evict(self, nodes: Sequence[Node]) -> None:
        """Evict a leaf, then its ancestors in this order."""
        self._pieces_left -= sum(map(_num_pieces, nodes))
        self._tell(nodes, is_state_only=False)
        self._store.loosen_leaves(nodes)

    def _drop_state(self, node: Node) -> None:
        self._pieces_left -= _num_pieces(node)
        self._tell([node], is_state_only=True)
        self._store.drop_checkpoint(node)

    def _tell(self, nodes: Sequence[Node], *, is_state_only: bool) -> None:
        if self.before_eviction is not None:
            self.before_eviction(EvictedNodes(nodes, is_state_only, self._kept))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Evict leaves that were not used for too long, and all entries of an owner who was not seen for too long."""
        while self._unlooked and self._pieces_left > 0:
            leaf, own = self._unlooked.popleft()
            if not self._store.trie.is_held(leaf) or leaf.children or leaf.leases:
                continue  # it is in use again
            own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else own
            if own is None and self._is_owner_idle(leaf):
                self._give_up(leaf)
            else:
                self._expire_leaf(leaf, own)

    def _give_up(self, leaf: Node) -> None:
        """Evict an entry whose owner has gone; what the bound leaves of it is still that entry."""
        tail, end = exclusive_suffix(leaf), leaf.sequence_end
        num_evicted, left = 0, self._pieces_left
        while num_evicted < len(tail) and left > 0:
            left -= _num_pieces(tail[num_evicted])
            num_evicted += 1
        self._evict(tail[:num_evicted])
        if num_evicted < len(tail):
            self._store.trie.entries.set(tail[num_evicted], end)
            self._unlooked.appendleft((tail[num_evicted], None))

    def _expire_leaf(self, leaf: Node, own: float | None) -> None:
        node = leaf
        self._note_due(leaf, own)
        while node.parent is not None and not (node.children or node.leases) and self._is_expired(node, own):
            if self._pieces_left <= 0:
                self._unlooked.appendleft((node, own))
                return
            parent = node.parent
            self._evict([node])
            node = parent
            self._note_due(node, own)

    def _note_due(self, leaf: Node, own: float | None) -> None:
        """Note when the first node is due: then all are looked at again, as it may have been used by then."""
        dues = [leaf.last_used_at + self._lifetime(leaf, own)]
        if leaf.sequence_end is not None and leaf.sequence_end.owner is not None and own is None:
            seen_at = self.owners_seen_at.get(leaf.sequence_end.owner, self._now)
            dues.append(seen_at + (self._limits.owner_idle_seconds or math.inf))
        self._due_at = min([self._due_at, *(due for due in dues if due >= self._now)])

    def _is_owner_idle(self, leaf: Node) -> bool:
        owner = leaf.sequence_end.owner if leaf.sequence_end else None
        idle_seconds = self._now - self.owners_seen_at.get(owner, self._now) if owner is not None else 0.0
        return 0 < self._limits.owner_idle_seconds < idle_seconds

    def _is_expired(self, node: Node, own: float | None) -> bool:
        return self._lifetime(node, own) < self._now - node.last_used_at

    def _lifetime(self, node: Node, own: float | None) -> float:
        """`own` is the lifetime of the entry that the node serves, if it has one; the end of system and tools serves
        other entries too."""
        ttl_seconds = self._limits.ttl_seconds if own is None or node.kind == "system" else own
        return ttl_seconds if ttl_seconds > 0 else math.inf

    def _keep_alive(self) -> None:
        """Mark entries of the short class as used before they expire, while their owner is not idle; no arrays move. An
        entry without an owner counts from the last request that ended there."""
        seconds = self._limits.keep_alive_seconds
        if not seconds or self._now < self._keep_alive_at:
            return
        self._keep_alive_at = self._now + seconds * KEEP_ALIVE_LOOK
        for leaf in self._store.trie.entries:
            own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
            is_due = own is not None and seconds < own <= SHORT_CLASS_SECONDS and self._ranks.is_pinned(leaf)
            is_due = is_due and self._now - leaf.last_used_at >= seconds
            if is_due and not (self._is_owner_idle(leaf) or self._is_forsaken(leaf)):
                for node in leaf.path():
                    node.last_used_at = self._now

    def _is_forsaken(self, leaf: Node) -> bool:
        """Whether no request ended at an entry without an owner within the time that an owner may be idle."""
        end = leaf.sequence_end
        return end is not None and end.owner is None and 0 < self._limits.owner_idle_seconds < self._now - end.ended_at

    def _forget_owners(self) -> None:
        """Forget owners without entries and live requests."""
        known = self._store.trie.entries.owners() | {lease.owner for lease in self._leases}
        for owner in self.owners_seen_at.keys() - known:
            del self.owners_seen_at[owner]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _thin_checkpoints(self) -> None:
        """Evict until checkpoints fit their budget: entries over their number first, then states by their rank."""
        is_first = True
        while self._pieces_left > 0 and self._has_too_many_states:
            is_first = is_first and self._evict_next(max_level=SURPLUS)
            if is_first:
                continue
            if (node := self._order.next_state()) is None:
                return
            self._drop_state(node)
            self._cull_dead_tail(node, None)

    def _cull_dead_tail(self, last: Node, end: SequenceEnd | None) -> None:
        """Evict the rows behind the last checkpoint of a branch: where layers cannot be cut, no request can use them.
        What is left of an entry over its number, up to what others need too, is still that entry (`end`): it is evicted
        next."""
        parent: Node | None = last
        while parent is not None and self._is_dead(parent):
            if self._pieces_left <= 0:
                self._unfinished = parent, end
                return
            node, parent = parent, parent.parent
            was_guess, end = node.is_guess, end if node.kind != "system" else None
            self._evict([node])
            if parent is not None:
                self._rejoin(parent, was_guess=was_guess)
        if end is None or parent is None or parent.parent is None or parent.kind == "system":
            return
        if not (parent.children or parent.leases or parent.sequence_end):  # another entry may be there since
            self._store.trie.entries.set(parent, end)

    def _is_dead(self, node: Node) -> bool:
        is_free = node.parent is not None and not (node.children or node.leases)
        return self._needs_checkpoints and is_free and node.checkpoint is None

    def _finish(self) -> None:
        """Continue where the last run stopped inside a branch."""
        if self._unfinished is not None:
            (node, end), self._unfinished = self._unfinished, None
            if self._store.trie.is_held(node):
                self._cull_dead_tail(node, end)

    def _rejoin(self, node: Node, *, was_guess: bool) -> None:
        """Join the two parts of the node that an evicted guess branched off: rows are evicted in no smaller pieces than
        if it had never been there."""
        if not was_guess or node.parent is None or len(node.children) != 1 or node.leases:
            return
        (lower,) = node.children.values()
        is_one = node.segment is lower.segment and node.is_guess == lower.is_guess
        if is_one and not (node.checkpoint or node.kind or node.sequence_end):
            self._store.trie.merge(node)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _make_room(self, budget: int) -> None:
        """Evict leaves and plain checkpoints by score; then, where only leased paths are left, all checkpoints. Cut
        what is left of records once enough was evicted, so that each is copied once."""
        ram, is_more = self._store.ram, True
        while self._pieces_left > 0 and (self._store.has_loose or (is_more and ram.num_bytes > budget)):
            if is_more and self._store.num_bytes_once_fit > budget:
                is_more = self._evict_next()
            else:
                self._pieces_left -= 1 + self._store.fit_next() / BYTES_PER_PIECE
        while self._pieces_left > 0 and ram.num_bytes > budget and (node := self._order.next_state()) is not None:
            self._drop_state(node)

    def _evict_next(self, max_level: float = math.inf) -> bool:
        """Evict the next leaf or inner checkpoint; False where there is none up to this level."""
        self._count_entries()
        node = self._order.next_of_all()
        level = self._order.level(node) if node is not None else None
        if node is None or node.parent is None or level is None or level > max_level:
            return False
        if node.children:
            self._drop_state(node)
        else:
            self._evict_leaf(node, node.parent, is_surplus=level == SURPLUS)
        return True

    def _evict_leaf(self, leaf: Node, parent: Node, *, is_surplus: bool) -> None:
        """Evict a leaf; `parent`, its own, may be a leaf then."""
        was_guess, end = leaf.is_guess, leaf.sequence_end if is_surplus else None
        self._evict([leaf])
        self._rejoin(parent, was_guess=was_guess)
        self._cull_dead_tail(parent, end)

    # --- entries ------------------------------------------------------------------------------------------------------

    def _count_entries(self) -> None:
        """Count entries again after requests have ended: some may be over their number."""
        if self._is_number_known:
            return
        self._is_number_known = True
        surplus = self._surplus()
        for node in surplus:
            if node.sequence_end not in self._order.over_number:
                self._store.trie.changes.note(node)
        self._order.over_number = {node.sequence_end for node in surplus if node.sequence_end is not None}

    def _surplus(self) -> set[Node]:
        """Entries over their number that may be evicted: of each owner the least recently used, over all owners the
        least valuable. Pinned entries are counted and are not among them."""
        entries, surplus = self._store.trie.entries, set[Node]()
        if len(entries) > self._limits.max_entries_per_owner:
            for owned in entries.by_owner():
                if (num_over := len(owned) - self._limits.max_entries_per_owner) > 0:
                    free = sorted(filter(self._may_be_surplus, owned), key=_last_use)
                    surplus.update(free[:num_over])
        if (num_over := len(entries) - len(surplus) - self._limits.max_entries) > 0:
            rest = (node for node in entries if node not in surplus and self._may_be_surplus(node))
            surplus.update(heapq.nlargest(num_over, rest, key=self._urgency))
        return surplus

    def _urgency(self, leaf: Node) -> tuple[float, int, int]:
        urgency = self._ranks.of_entry(leaf, exclusive_suffix(leaf)).urgency(self._now)
        return urgency, -leaf.number, -leaf.start

    def _may_be_surplus(self, leaf: Node) -> bool:
        return not (leaf.leases or self._ranks.is_pinned(leaf))

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _free_leaves(self) -> list[Node]:
        return [node for node in self._store.trie.nodes() if not (node.children or node.leases)]


def _num_pieces(node: Node) -> float:
    return 1 + node.num_bytes / BYTES_PER_PIECE


def _last_use(node: Node) -> tuple[float, int, int]:
    return node.last_used_at, node.number, node.start
