"""The prefix tree: what is stored of a prompt, which live rows use it, and how a row's KV is added.

It knows tokens, records and limits; payloads are opaque. The engine thread owns it; any thread may read `stats()`.

    match = tree.lookup(prompt)                    how much is known, and from what it is restored; changes counters
    lease = tree.acquire(match, owner=session)     pins [0, match.num_usable_tokens) for a request
    tree.extend(lease, tokens, end, take_rows, take_state, kind)     adds what is new of [lease.num_tokens, end)
    tree.mark_end(lease)                           the request ended here: an entry of its owner
    tree.release(lease)                            unpins it
    tree.mover.extract(match, lease, nodes)        moves out of the tree what no other request needs
    tree.account_live(num_bytes); tree.evict()     brings RAM back within the limits
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.branches import added_suffix, exclusive_nodes
from kvserve.cache.coalesce import MAX_RECORD_TOKENS, CoalesceRun, plan_run, replace_run
from kvserve.cache.eviction import Score, value_score
from kvserve.cache.forget_users import IsForgotten, forget_users
from kvserve.cache.kept_path import EvictedNodes, KeptPath, kept_end, kept_path
from kvserve.cache.match import PrefixMatch, RecentNames
from kvserve.cache.move_nodes import Mover
from kvserve.cache.node import Lease, NamedPrompt, Node, Position, SequenceEnd, note_use
from kvserve.cache.records import BoundaryKind, CacheStats, Eviction, Extension, Limits, MatchCause, Payload, Room
from kvserve.cache.store import CutPayload, RamTier, Store
from kvserve.cache.sweep import Sweep
from kvserve.cache.token_run import TokenRun, image_around, pack
from kvserve.cache.trie import Trie
from kvserve.core import TokenSequence


class PrefixTree:
    """All KV of one model, by prefix. `needs_checkpoints`: the model has layers that cannot be cut."""

    def __init__(
        self,
        hasher: BlockHasher,
        limits: Limits,
        *,
        needs_checkpoints: bool,
        cut_payload: CutPayload,
        use_index: bool = True,
        score: Score = value_score,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hasher = hasher
        self._limits = limits
        self._needs_checkpoints = needs_checkpoints
        self._clock = clock
        self._names = RecentNames(hasher)
        self._trie = Trie(use_index=use_index, is_ranked=True)
        self._ram = RamTier()
        self._store = Store(self._trie, self._ram, cut_payload)
        self._leases: set[Lease] = set()
        self._sweep = Sweep(self._store, limits, score, self._kept, self._leases, needs_checkpoints=needs_checkpoints)
        self.mover = Mover(self._store, self._sweep, self._kept)
        self._live_bytes = 0

    # --- finding ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: TokenSequence, *, partition: str = "") -> PrefixMatch:
        """How much of a prompt is known and from what it can be restored."""
        match = self.peek(tokens, partition=partition)
        self._store.counters.num_image_retreats += match.cause == "inside_image"
        return match

    def peek(self, tokens: TokenSequence, *, partition: str = "") -> PrefixMatch:
        """The same for a caller that computes nothing now: it is no use, and not counted."""
        named = self._names.name(tokens, partition)
        position = self._find(named)
        usable, cause = self._usable(position, tokens)
        state = self._store.state_of(usable.node) if self._needs_checkpoints else None
        return PrefixMatch(
            num_prompt_tokens=len(tokens),
            num_matched_tokens=position.depth,
            num_usable_tokens=usable.depth,
            state=state,
            cause=cause,
            prompt=named,
            node=usable.node,
            store=self._store,
            version=self._trie.version,
        )

    def _find(self, named: NamedPrompt) -> Position:
        """The deepest position of a prompt, searched from where it was found before."""
        root = self._trie.root(named.partition)
        position = self._trie.find(root, named.run, named.chain, known=named.place)
        named.place = position if position.node is not root else None
        return position

    def _usable(self, position: Position, tokens: TokenSequence) -> tuple[Position, MatchCause]:
        """The deepest position at or before this one that a request can start from, and why it cannot start later."""
        # The last token is always computed again: its logits, which nothing stores, give the first answer token.
        limit = min(position.depth, max(len(tokens) - 1, 0))
        cause: MatchCause = "whole"
        if position.depth == 0:
            cause = "nothing"
        elif position.depth <= limit:
            is_end = position.depth == position.node.end and not position.node.children
            cause = "ended" if is_end else "diverged"
        if (image := image_around(tokens.images, limit)) is not None:
            limit, cause = image.start, "inside_image"
        node = position.node
        while node.parent is not None and (node.start >= limit or not self._can_start(node, limit, tokens)):
            node = node.parent
        depth = min(limit, node.end)
        return Position(node, depth), "no_checkpoint" if depth < limit else cause

    def _can_start(self, node: Node, limit: int, tokens: TokenSequence) -> bool:
        if not self._needs_checkpoints:
            return True
        is_there = node.checkpoint is not None and node.end <= limit
        return is_there and image_around(tokens.images, node.end) is None

    def partitions(self) -> list[str]:
        """The partitions that hold something, or did a moment ago."""
        return [root.partition for root in self._trie.roots()]

    def name(self, tokens: TokenSequence, partition: str) -> NamedPrompt:
        """A prompt packed, and the hashes of its blocks; remembered where it was looked up a moment ago."""
        return self._names.name(tokens, partition)

    def known_depth(self, tokens: TokenSequence, *, partition: str = "") -> int:
        """Tokens of a prompt that a request could start from. It is no use of them, and not counted."""
        return self._usable(self._find(self._names.name(tokens, partition)), tokens)[0].depth

    # --- rows ---------------------------------------------------------------------------------------------------------

    def acquire(
        self,
        match: PrefixMatch,
        *,
        owner: str | None = None,
        ttl_seconds: float | None = None,
        user: str = "",
        is_guess: bool = False,
    ) -> Lease:
        """Pin what a match can use, and mark the path as used.

        `owner` gets the entry where the request ends (a session's branch), `ttl_seconds` is the owner's own time limit,
        `user` the user of the request. `is_guess`: computed ahead of any request, so it is no use of the path. Raises
        ValueError if the tree has changed since the lookup.
        """
        if match.version != self._trie.version:
            raise ValueError("The tree has changed since this lookup: look up again.")
        now = self._clock()
        is_parting = match.num_matched_tokens < min(match.num_prompt_tokens, match.node.end)
        if is_parting and match.num_usable_tokens > match.node.start:
            # The prompt parts from what is stored inside this node: the rest of the node was not used.
            self._trie.split(match.node, match.num_usable_tokens, self._hasher.block_size)
        chain = match.chain.truncated(match.num_usable_tokens)
        lease = Lease(match.node, match.num_usable_tokens, chain, match.prompt, owner, ttl_seconds, user, is_guess)
        self._trie.use(lease, now)
        if not is_guess:
            match.node.restored_at = now
            match.node.num_restores += 1
        match.node.leases.add(lease)
        self._leases.add(lease)
        if owner is not None:
            self._sweep.owners_seen_at[owner] = now
        return lease

    def follow(self, lease: Lease, tokens: TokenSequence) -> None:
        """Pin what other requests have added of the lease's prompt since the lookup. It is no use yet."""
        if lease.is_detached:
            return
        usable = self._usable(self._find(lease.prompt), tokens)[0]
        if usable.depth > lease.num_tokens:
            self._trie.move(lease, usable)
            lease.chain = lease.prompt.chain.truncated(usable.depth)

    def extend(
        self,
        lease: Lease,
        tokens: TokenSequence,
        end: int,
        take_rows: Callable[[int, int], Payload | None],
        take_state: Callable[[], Payload] | None = None,
        kind: BoundaryKind = "stride",
    ) -> Extension:
        """Add the request's KV up to `end` and, with `take_state`, its state there; the lease moves to `end`.

        `tokens` are the request's tokens, at least up to `end`; the first `lease.num_tokens` are pinned already.
        `take_rows(start, end)` is called at most once, with the part that is not stored yet (offsets in `tokens`);
        `take_state()` only if there is no checkpoint at `end` yet. A detached lease adds nothing. Raises ValueError for
        an `end` before the lease or behind the tokens.
        """
        start = lease.num_tokens
        if not start <= end <= len(tokens):
            raise ValueError(f"A request of {len(tokens)} tokens cannot be extended from {start} to {end}.")
        if lease.is_detached:
            return Extension(start, end, end, False)
        run = pack(tokens, lease.chain.num_tokens, end)
        known = self._trie.walk(Position(lease.node, start), run, end)
        first_new = known.depth
        # Before the lease moves: if this raises, the tree is as it was, and the request's next stop tries again.
        rows = take_rows(first_new, end) if first_new < end else None
        self._trie.move(lease, known)
        lease.chain = lease.chain.extended(run)
        if first_new < end:
            self._grow(lease, run, rows)
        has_new_checkpoint = self._finish_at(lease, take_state, kind)
        lease.prompt.follow(Position(lease.node, lease.num_tokens), run, start)
        self._trie.use(lease, self._clock(), num_uses=0)
        return Extension(start, first_new, end, has_new_checkpoint)

    def _grow(self, lease: Lease, run: TokenRun, payload: Payload | None) -> None:
        """Add the tokens behind the lease as a new leaf, and move the lease to its end."""
        start, end = lease.num_tokens, run.end
        if start < lease.node.end:
            self._trie.split(lease.node, start, self._hasher.block_size)
        hashes = lease.chain.between(start, end)
        leaf = self._store.add_segment(lease.node, run.part(start, end), hashes, payload)
        leaf.is_guess, leaf.last_used_at = lease.is_guess, self._clock()
        self._trie.move(lease, Position(leaf, end))

    def _finish_at(self, lease: Lease, take_state: Callable[[], Payload] | None, kind: BoundaryKind) -> bool:
        """Note why the request stopped where the lease ends, with its state if that is wanted and new."""
        node = lease.node
        wants_state = take_state is not None and self._needs_checkpoints
        if node.parent is None or (lease.num_tokens < node.end and not wants_state and kind != "system"):
            return False
        if lease.num_tokens < node.end:
            self._trie.split(node, lease.num_tokens, self._hasher.block_size)
        self._trie.mark(node, kind)
        if take_state is None or not wants_state or node.checkpoint is not None:
            return False
        self._store.add_checkpoint(node, take_state(), kind, self._clock())
        return True

    def mark_end(self, lease: Lease) -> None:
        """Note an entry of the owner where the request ends, unless stored tokens follow there."""
        node, now = lease.node, self._clock()
        if lease.owner is not None:
            self._sweep.owners_seen_at[lease.owner] = now
        if lease.is_detached or node.parent is None or node.children or lease.num_tokens < node.end:
            return
        self._trie.entries.set(node, SequenceEnd(lease.owner, lease.ttl_seconds, now))
        self._trie.changed[node] = None

    def note_users(self, lease: Lease, users: Mapping[str, int]) -> None:
        """Note further users of a lease's path, each up to an offset."""
        for node in lease.node.path():
            for user, depth in users.items():
                if (end := min(depth, lease.num_tokens, node.end)) > node.start:
                    note_use(node.users, user, end)

    def release(self, lease: Lease) -> None:
        """Unpin the path: the request is over. Idempotent."""
        self._leases.discard(lease)
        self._trie.drop_lease(lease)
        lease.is_detached = True
        self._trie.changed[lease.node] = None

    # --- what is kept, for another tier ------------------------------------------------------------------------------

    def kept(self, lease: Lease) -> KeptPath | None:
        """All that is stored of a lease's path; None where it is empty."""
        return self._kept(lease.node) if lease.node.parent is not None and not lease.is_detached else None

    def kept_end(self, lease: Lease, behind: int) -> KeptPath | None:
        """The end of that path that the other tier lacks or was not told of, at least all that ends `behind` so many
        tokens. The caller tells that tier."""
        if lease.node.parent is None or lease.is_detached:
            return None
        path = kept_end(self._store, self._hasher, lease, behind)
        lease.num_told_tokens = lease.num_tokens
        return path

    def kept_paths(self) -> Iterator[KeptPath]:
        """The stored path to each leaf. The tree must not change in between."""
        return (self._kept(node) for node in self._trie.nodes() if not node.children)

    def _kept(self, last: Node) -> KeptPath:
        return kept_path(self._store, self._hasher, last)

    def before_eviction(self, tell: Callable[[EvictedNodes], None]) -> None:
        """Call `tell` before each eviction from now on, and forget which copies the other tier had."""
        self._trie.forget_copies()
        for lease in self._leases:
            lease.num_told_tokens = 0
        self._sweep.before_eviction = tell

    # --- limits -------------------------------------------------------------------------------------------------------

    def discard(self, tokens: TokenSequence, is_owner: Callable[[str], bool]) -> list[KeptPath]:
        """Remove what serves only the conversation of `tokens`, in any partition, and the entries of these owners: each
        up to a branch of others, a live request, or the end of system and tools. Returns the removed paths, which hold
        their payloads: drop them soon."""
        positions = [self._find(self._names.name(tokens, partition)) for partition in self.partitions()]
        last = {position.node for position in positions if position.depth == position.node.end}

        def is_owned(node: Node) -> bool:
            end = node.sequence_end
            return node in last or (end is not None and end.owner is not None and is_owner(end.owner))

        gone = exclusive_nodes(self._trie.nodes(), is_owned)
        paths = [self._kept(node) for node in gone if not node.children]
        self._store.remove_leaves(gone)
        return paths

    def forget(self, is_forgotten: IsForgotten) -> int:
        """Remove what only these users, or no known user, have used; their live requests go on, and what those compute
        is not stored. Returns the number of removed tokens."""
        for lease in [lease for lease in self._leases if lease.user and is_forgotten(lease.user)]:
            self.release(lease)
        num_tokens = forget_users(self._store, is_forgotten, self._hasher.block_size)
        self._names.clear()
        self._sweep.expect_change()  # owners without entries are forgotten too
        return num_tokens

    def forget_names(self) -> None:
        """Forget the prompts that were looked up last."""
        self._names.clear()

    def retract(self, lease: Lease, start: int) -> KeptPath | None:
        """Release a lease and remove what its request added from `start` on, up to what others share, pin or ended at.
        Returns the path as it was: drop it soon."""
        path = self.kept(lease)
        self.release(lease)
        if path is not None and lease.num_tokens == lease.node.end:
            self._store.remove_leaves(added_suffix(lease.node, start))
        return path

    def account_live(self, num_bytes: int) -> None:
        """Set the bytes of the live requests' own caches: they count in the limit."""
        self._live_bytes = num_bytes

    def room(self) -> Room:
        """What may be added, beside the live requests' own caches, before anything is evicted for it."""
        return self._sweep.room(self._live_bytes)

    def evict(self, num_needed_bytes: int = 0, max_pieces: float = math.inf) -> Eviction:
        """Evict until RAM is within its limits with room for `num_needed_bytes` more, about `max_pieces` leaves and
        states at a time. Leased paths stay."""
        held = self._ram.num_bytes
        reserved = self._live_bytes + num_needed_bytes
        is_over = self._sweep.run(self._clock(), reserved, max_pieces)
        return Eviction(
            num_freed_bytes=held - self._ram.num_bytes,
            is_within_limits=self._ram.num_bytes + reserved <= self._limits.max_bytes,
            is_over=is_over,
        )

    def rename(self, hasher: BlockHasher) -> None:
        """Hash all prefixes, stored ones too, with this hasher from now on; its block size is the same."""
        self._trie.rename(self._leases, hasher)
        self._hasher, self._names = hasher, RecentNames(hasher)

    def clear(self) -> None:
        """Remove everything; live requests go on, and what they compute is not stored."""
        for lease in list(self._leases):
            self.release(lease)
        self._store.clear()
        self._names.clear()
        self._sweep.owners_seen_at.clear()

    # --- idle work ----------------------------------------------------------------------------------------------------

    def plan_coalesce(self, max_tokens: int = MAX_RECORD_TOKENS) -> CoalesceRun | None:
        """An unbranched run of small records to join into one of at most `max_tokens`; changes nothing."""
        return plan_run(self._store, max_tokens)

    def replace(self, run: CoalesceRun, payload: Payload) -> None:
        """Replace `run.pieces` by `payload`, their rows joined. Raises ValueError for a plan that is out of date."""
        replace_run(self._store, run, payload)

    # --- reports ------------------------------------------------------------------------------------------------------

    @property
    def num_ram_bytes(self) -> int:
        """Bytes in RAM, leased ones too."""
        return self._ram.num_bytes

    def stats(self) -> CacheStats:
        """A snapshot of what is held and was done."""
        return self._store.stats(live_bytes=self._live_bytes, num_leases=len(self._leases))

    def sequences(self) -> list[Sequence[Node]]:
        """Every path from below a root to a leaf: for tests and dumps."""
        return [node.path() for node in self._trie.nodes() if not node.children]
