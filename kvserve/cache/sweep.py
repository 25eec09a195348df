"""What leaves, in which order, until the limits hold. It decides; `store.py` carries out.

    expired -> checkpoints over their budget -> bytes over the budget

Leaves go first, so what others share stays; nodes that a live row stands on never go. How many entries there are counts
only where bytes are short: then those over their number go before all others, and entries with a lifetime of their own
that is not over go last. What may leave is ranked once after a row has ended, not once per stop of the rows that run.
All nodes are looked at when the first of them is due, at least once an interval; in between those that a row has left.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvserve.cache.eviction import Score
from kvserve.cache.kept_path import KeptPath
from kvserve.cache.leaving import Leaving
from kvserve.cache.node import Node
from kvserve.cache.records import Limits, Room
from kvserve.cache.store import Store
from kvserve.cache.tails import exclusive_tail
from kvserve.cache.worth import PLAIN, SURPLUS, Ranked, Worth, newest_above

SHORT_CLASS_SECONDS = 300.0
"""The shortest lifetime that clients ask for by a cache mark: an agent's user thinks longer than that now and then."""

KEEP_ALIVE_LOOK = 1 / 8
"""What is to be kept alive is looked for this often, in units of the interval itself."""


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
        self._kept = kept
        self._needs_checkpoints = needs_checkpoints
        self._worth = Worth(score, needs_checkpoints=needs_checkpoints)
        self._leaving: list[Ranked] | None = None
        self._over_number: set[Node] = set()
        self._thinning: list[Ranked] | None = None
        self._now = 0.0
        self._check_at = -math.inf
        self._due_at = math.inf
        self._keep_alive_at = -math.inf
        self.before_leaving: Callable[[Leaving], None] | None = None

    def expect_change(self) -> None:
        """Something may be too old, or may leave, that could not before: the next run looks at every node."""
        self._check_at = -math.inf

    def room(self, reserved_bytes: int) -> Room:
        """What may be added and nothing leaves for it."""
        num_bytes = self._limits.max_bytes - self._store.ram.num_bytes - reserved_bytes
        return Room(num_bytes, self._limits.max_checkpoint_bytes - self._store.checkpoint_bytes)

    def run(self, now: float, reserved_bytes: int, owners_seen_at: dict[str, float]) -> None:
        """Let leave what must. `reserved_bytes` are held by others; owners without entries are forgotten."""
        self._now = self._worth.now = now
        self._keep_alive(owners_seen_at)
        if now >= self._check_at or now > self._due_at:
            self._check_at, self._due_at = now + self._limits.check_seconds, math.inf
            self._expire(self._free_leaves(), owners_seen_at)
            self._forget_owners(owners_seen_at)
            self._store.trie.prune()
            self._rank_anew()
        elif self._store.trie.changed:
            self._look_at_changed(owners_seen_at)
            self._rank_anew()
        self._rank_new_states()
        self._thin_checkpoints()
        self._make_room(reserved_bytes)

    def _rank_anew(self) -> None:
        """The queues are made again where they are needed."""
        self._leaving = self._thinning = None
        self._store.new_states.clear()
        self._store.trie.changed.clear()

    def _look_at_changed(self, owners_seen_at: dict[str, float]) -> None:
        """What rows have left since may be too old, or nothing at all."""
        for changed in self._store.trie.changed:
            node = changed
            while node.parent is not None and not self._store.trie.is_held(node):
                node = node.parent
            if node.parent is None:
                self._store.trie.prune_root(node)
            elif not (node.children or node.leases):
                self._expire([node], owners_seen_at)

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

    # --- time ---------------------------------------------------------------------------------------------------------

    def _expire(self, leaves: Sequence[Node], owners_seen_at: dict[str, float]) -> None:
        """Leaves that nobody used for too long, and all entries of an owner who was not seen for too long."""
        for leaf in leaves:
            own = leaf.sequence_end.ttl_seconds if leaf.sequence_end else None
            if own is None and self._is_owner_idle(leaf, owners_seen_at):
                self._remove(exclusive_tail(leaf))
                continue
            node = leaf
            self._note_due(leaf, own, owners_seen_at)
            while node.parent is not None and not (node.children or node.leases) and self._is_expired(node, own):
                parent = node.parent
                self._remove([node])
                node = parent
                self._note_due(node, own, owners_seen_at)

    def _note_due(self, leaf: Node, own: float | None, owners_seen_at: dict[str, float]) -> None:
        """All are looked at again when the first of them is due: it may have been used by then."""
        dues = [leaf.last_used_at + self._lifetime(leaf, own)]
        if leaf.sequence_end is not None and leaf.sequence_end.owner is not None and own is None:
            seen_at = owners_seen_at.get(leaf.sequence_end.owner, self._now)
            dues.append(seen_at + (self._limits.owner_idle_seconds or math.inf))
        self._due_at = min([self._due_at, *(due for due in dues if due >= self._now)])

    def _is_owner_idle(self, leaf: Node, owners_seen_at: dict[str, float]) -> bool:
        owner = leaf.sequence_end.owner if leaf.sequence_end else None
        idle_seconds = self._now - owners_seen_at.get(owner, self._now) if owner is not None else 0.0
        return 0 < self._limits.owner_idle_seconds < idle_seconds

    def _is_expired(self, node: Node, own: float | None) -> bool:
        return self._lifetime(node, own) < self._now - node.last_used_at

    def _lifetime(self, node: Node, own: float | None) -> float:
        """`own` is that of the entry that the node serves, if it has one; a system's end serves others too."""
        ttl_seconds = self._limits.ttl_seconds if own is None or node.kind == "system" else own
        return ttl_seconds if ttl_seconds > 0 else math.inf

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
            is_due = own is not None and seconds < own <= SHORT_CLASS_SECONDS and self._worth.is_pinned(leaf)
            is_due = is_due and self._now - leaf.last_used_at >= seconds
            if is_due and not (self._is_owner_idle(leaf, owners_seen_at) or self._is_forsaken(leaf)):
                for node in leaf.path():
                    node.last_used_at = self._now

    def _is_forsaken(self, leaf: Node) -> bool:
        """Whether an entry that is nobody's was not asked for within the time that an owner has."""
        end = leaf.sequence_end
        return end is not None and end.owner is None and 0 < self._limits.owner_idle_seconds < self._now - end.ended_at

    def _forget_owners(self, owners_seen_at: dict[str, float]) -> None:
        """Only owners with entries or live rows are remembered."""
        known = {node.sequence_end.owner for node in self._entries() if node.sequence_end is not None}
        known |= {lease.owner for root in self._store.trie.roots() for lease in root.leases}
        known |= {lease.owner for node in self._store.trie.nodes() for lease in node.leases}
        for owner in owners_seen_at.keys() - known:
            del owners_seen_at[owner]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _thin_checkpoints(self) -> None:
        """Until checkpoints fit their budget: entries over their number go with theirs, then others by their rank."""

        def is_over() -> bool:
            return self._store.checkpoint_bytes > self._limits.max_checkpoint_bytes

        if is_over() and self._leaving is None:
            self._leaving = self._rank_all()
        while is_over() and self._leaving and self._leaving[0].level <= SURPLUS:
            self._leave(heapq.heappop(self._leaving), self._leaving)
        for node in self._worst_states(is_over):
            self._drop_state(node)
            self._cull_dead_tail(node)

    def _worst_states(self, is_over: Callable[[], bool]) -> Iterator[Node]:
        """Nodes whose checkpoint may go, as long as there is too much. Dropping one makes the next one on its branch
        worth more."""
        is_fresh = False
        while is_over():
            if not self._thinning:
                if is_fresh:
                    return
                self._thinning, is_fresh = self._rank_states(), True
                continue
            ranked = heapq.heappop(self._thinning)
            node = ranked.node
            if node.checkpoint is None or node.leases or not self._store.trie.is_held(node):
                continue
            fresh = self._worth.of_state(node, ranked.level)
            if fresh.rank[:2] > ranked.rank[:2] and self._thinning and fresh > self._thinning[0]:
                heapq.heappush(self._thinning, fresh)
            else:
                yield node

    def _rank_states(self) -> list[Ranked]:
        nodes = self._store.trie.nodes()
        queue = [self._worth.of_state(node) for node in nodes if node.checkpoint is not None and not node.leases]
        heapq.heapify(queue)
        return queue

    def _rank_new_states(self) -> None:
        """The queues hear of states that were added since, and of those above them that are not the newest any more."""
        added, self._store.new_states = self._store.new_states, []
        for node in {above: None for each in added for above in newest_above(each)}:
            if node.checkpoint is None or node.leases:
                continue
            ranked = self._worth.of_state(node)
            if self._thinning is not None:
                heapq.heappush(self._thinning, ranked)
            if self._leaving is not None and ranked.level <= PLAIN and node.children:
                heapq.heappush(self._leaving, ranked)

    def _cull_dead_tail(self, node: Node) -> None:
        """Where layers cannot be cut, rows behind the last checkpoint of a branch serve nobody."""
        while (
            self._needs_checkpoints
            and node.parent is not None
            and not (node.children or node.leases)
            and node.checkpoint is None
        ):
            parent, was_guess = node.parent, node.is_guess
            self._remove([node])
            self._rejoin(parent, was_guess=was_guess)
            node = parent

    def _rejoin(self, node: Node, *, was_guess: bool) -> None:
        """A guess that leaves takes the branch with it that it made: the rows around it leave in no smaller pieces than
        they would have without it."""
        if not was_guess or node.parent is None or len(node.children) != 1 or node.leases:
            return
        (lower,) = node.children.values()
        is_one = node.segment is lower.segment and node.is_guess == lower.is_guess
        if is_one and not (node.checkpoint or node.kind or node.sequence_end):
            self._store.trie.merge(node)
            self._rank_joined(node, is_surplus=lower in self._over_number)

    def _rank_joined(self, node: Node, *, is_surplus: bool) -> None:
        """The queues hear of a node that took another one's place in them."""
        if is_surplus:
            self._over_number.add(node)
        if self._leaving is not None and not node.children:
            heapq.heappush(self._leaving, self._worth.of_leaf(node, is_surplus=is_surplus))
        if node.checkpoint is None:
            return
        ranked = self._worth.of_state(node)
        if self._leaving is not None and node.children and ranked.level <= PLAIN:
            heapq.heappush(self._leaving, ranked)
        if self._thinning is not None:
            heapq.heappush(self._thinning, ranked)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _make_room(self, reserved_bytes: int) -> None:
        """Leaves and plain checkpoints leave by score; then, where only live rows' paths are left, all checkpoints."""
        budget = self._limits.max_bytes - reserved_bytes
        self._store.fit()
        is_fresh = False
        while self._store.ram.num_bytes > budget:
            if not self._leaving:
                if is_fresh:
                    break
                self._leaving, is_fresh = self._rank_all(), True
                continue
            while self._leaving and self._store.num_bytes_once_fit > budget:
                self._leave(heapq.heappop(self._leaving), self._leaving)
            self._store.fit()
        for node in self._worst_states(lambda: self._store.ram.num_bytes > budget):
            self._drop_state(node)

    def _rank_all(self) -> list[Ranked]:
        """What may leave now, as a queue."""
        nodes = [node for node in self._store.trie.nodes() if not node.leases]
        self._over_number = surplus = self._surplus()
        queue = [self._worth.of_leaf(node, is_surplus=node in surplus) for node in nodes if not node.children]
        inner = (node for node in nodes if node.children and node.checkpoint is not None)
        queue += [ranked for ranked in map(self._worth.of_state, inner) if ranked.level <= PLAIN]
        heapq.heapify(queue)
        return queue

    def _surplus(self) -> set[Node]:
        """Entries over their number that may leave: of each owner those that were used longest ago, over all owners the
        least valuable ones. What was asked to be kept counts and is not among them."""
        entries = list(self._entries())
        by_owner: dict[str, list[Node]] = {}
        for node in entries:
            if node.sequence_end is not None and node.sequence_end.owner is not None:
                by_owner.setdefault(node.sequence_end.owner, []).append(node)
        surplus: set[Node] = set()
        for owned in by_owner.values():
            if (num_over := len(owned) - self._limits.max_entries_per_owner) > 0:
                free = sorted(filter(self._may_be_surplus, owned), key=lambda node: node.last_used_at)
                surplus.update(free[:num_over])
        if (num_over := len(entries) - len(surplus) - self._limits.max_entries) > 0:
            rest = (node for node in entries if node not in surplus and self._may_be_surplus(node))
            worst = heapq.nsmallest(num_over, rest, key=lambda node: self._worth.of_entry(node, exclusive_tail(node)))
            surplus.update(worst)
        return surplus

    def _may_be_surplus(self, leaf: Node) -> bool:
        return not (leaf.leases or self._worth.is_pinned(leaf))

    def _leave(self, ranked: Ranked, queue: list[Ranked]) -> None:
        """Let a leaf or an inner checkpoint go, or put it back where its worth has grown meanwhile."""
        node = ranked.node
        if node.parent is None or node.leases or not self._store.trie.is_held(node):
            return
        if node.children and node.checkpoint is None:
            return
        # A state keeps its level: what becomes the newest of a branch because its end has left goes with that.
        is_surplus, worth = ranked.level == SURPLUS, self._worth
        fresh = worth.of_state(node, PLAIN) if node.children else worth.of_leaf(node, is_surplus=is_surplus)
        if fresh.rank[:2] > ranked.rank[:2] and queue and fresh > queue[0]:
            heapq.heappush(queue, fresh)
        elif node.children:
            self._drop_state(node)
        else:
            self._let_go(node, node.parent, queue, is_surplus=is_surplus)

    def _let_go(self, leaf: Node, parent: Node, queue: list[Ranked], *, is_surplus: bool) -> None:
        """A leaf leaves; `parent`, its own, may be a leaf then. What is left of an entry over its number, up to what
        others need too, is still that entry: the next bytes are taken from it."""
        was_guess = leaf.is_guess
        self._remove([leaf])
        self._rejoin(parent, was_guess=was_guess)
        self._cull_dead_tail(parent)
        is_rest = is_surplus and parent.kind != "system"
        while parent.parent is not None and not self._store.trie.is_held(parent):
            parent = parent.parent
            is_rest = is_rest and parent.kind != "system"
        if parent.parent is None or parent.children or parent.leases:
            return
        if is_rest:
            parent.sequence_end = leaf.sequence_end
        heapq.heappush(queue, self._worth.of_leaf(parent, is_surplus=is_rest))

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _free_leaves(self) -> list[Node]:
        return [node for node in self._store.trie.nodes() if not (node.children or node.leases)]

    def _entries(self) -> Iterable[Node]:
        return (node for node in self._store.trie.nodes() if node.sequence_end is not None)
