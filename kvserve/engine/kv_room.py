"""Room for KV: what live rows take of the memory that all KV shares, what may be kept beside them, and how far a row
may be restored. It reads the ledger and has the tree evict; it touches no array.
"""

import math
import time
from collections.abc import Callable

import mlx.core as mx

from kvserve.cache.node import leased_bytes
from kvserve.cache.records import Room
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine.kv_size import KvSize
from kvserve.engine.memory import MemoryLedger

CLEAR_AFTER_BYTES = 64 * 2**20
"""MLX keeps freed buffers for reuse; when so much was evicted they are given back."""

PIECES = 16
"""So many leaves and states are evicted before it is checked whether that is enough, and how long it took."""

NO_ROOM = "Room could not be made in the prefix cache"
SLICE_SECONDS = 0.008
"""So long eviction may hold up running streams between two steps, and for one piece more."""

FULL_DISK = "KV is kept in RAM only, and is computed again once it has left it."
BEHIND = "some KV is not on disk yet, and is written when the disk has caught up."

NOT_KEPT = (
    "KV of some requests is not kept, so their next turns are computed again. More than half of this memory is not "
    "kept where KV is quantised, or requests end at the same step"
)
NOT_RESTORED = "some requests start from a part of what is kept of them, and compute the rest again."


class KvRoom:
    """The memory for KV of one model. Belongs to the engine thread.

    Room that is needed now is made at once; room that a row waits for before it begins, and the eviction of what is too
    old or too much, is made in slices between steps (0049). `has_more`: a run has stopped before it was through.
    """

    def __init__(
        self, tree: PrefixTree, memory: MemoryLedger, sizes: KvSize, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory = memory
        self.has_more = False
        self._tree = tree
        self._sizes = sizes
        self._clock = clock
        self._awaited_bytes = 0.0
        self._freed_bytes = 0
        self.deferred_bytes: Callable[[], int] = lambda: 0
        memory.open("kept", lambda: tree.num_ram_bytes)

    def account(self, live_bytes: float, copy_bytes: float, awaited_bytes: float = 0) -> None:
        """Account what live rows hold, and what of them is there twice at the most: what is kept has the rest. Of both
        `awaited_bytes` are of rows that wait for room and hold nothing yet."""
        self.memory.say(live_bytes=live_bytes, copy_bytes=copy_bytes)
        self._tree.account_live(self.memory.reserved_bytes)
        self._awaited_bytes = awaited_bytes

    def left(self) -> Room:
        """What may be kept beside live rows before anything is evicted for it."""
        return self._tree.room()

    def make(self, num_needed_bytes: float = 0) -> None:
        """Evict until what live rows hold, what is kept and `num_needed_bytes` fit into the budget together."""
        while not self._evict(num_needed_bytes - self._awaited_bytes):
            pass

    def make_some(self, num_needed_bytes: float = 0) -> bool:
        """The same for a slice of time, also for rows that wait for room. Whether it is done."""
        until = self._clock() + SLICE_SECONDS
        while not (is_made := self._evict(num_needed_bytes)) and self._clock() < until:
            pass
        return is_made

    def evict_rest(self, *, to_its_end: bool = False) -> None:
        """Continue to evict what no row waits for, for a slice of time or to its end."""
        until = self._clock() + SLICE_SECONDS
        while self.has_more and (to_its_end or self._clock() < until):
            self._evict(-self._awaited_bytes)

    def _evict(self, num_needed_bytes: float) -> bool:
        """Evict a piece. Whether so much fits now, or nothing more can be evicted."""
        self.has_more = False  # where this raises the next run tries again
        eviction = self._tree.evict(int(num_needed_bytes), PIECES)
        self.has_more = not eviction.is_over
        is_made = eviction.is_over or eviction.is_within_limits
        self._freed_bytes += eviction.num_freed_bytes
        if self._freed_bytes >= CLEAR_AFTER_BYTES:
            self._freed_bytes = 0
            mx.clear_cache()
        return is_made

    def takes(self, num_bytes: float, *, has_disk: bool, num_moved_bytes: float = 0) -> bool:
        """Whether so much may be kept now that everything was evicted that could be, or `num_moved_bytes` in the place
        of a row that goes. With a disk what one row needs may pass the bound of what is kept, never that of all KV.
        What rows wait for may be used until they begin, where enough can be evicted by then."""
        if self._awaited_bytes and not self.could_take(num_bytes, has_disk=has_disk, num_moved_bytes=num_moved_bytes):
            return False
        kept_bytes = self.memory.held("kept")
        return self._fits(num_bytes, kept_bytes, num_moved_bytes, has_disk=has_disk, unused_bytes=self._awaited_bytes)

    def could_take(self, num_bytes: float, *, has_disk: bool, num_moved_bytes: float = 0) -> bool:
        """The same if all KV that no row uses were evicted: if not, evicting would be wasted."""
        return self._fits(num_bytes, self.leased_bytes(), num_moved_bytes, has_disk=has_disk)

    def _fits(
        self, num_bytes: float, kept_bytes: int, num_moved_bytes: float, *, has_disk: bool, unused_bytes: float = 0
    ) -> bool:
        if not self.memory.has_room_for_kv(num_bytes - unused_bytes, kept_bytes):
            return False
        return has_disk or kept_bytes + max(num_bytes, num_moved_bytes) <= self.memory.plan.kv_bytes

    def note_not_kept(self) -> None:
        """Report that less of a row is kept than it computed."""
        self.memory.press("kv_pool", f"{NOT_KEPT} ({self.memory.plan.pool_bytes / 2**30:.2f} GiB).")

    def leased_bytes(self) -> int:
        """Bytes of all KV and states under a lease, each once: they cannot be evicted."""
        return leased_bytes(self._tree._leases)

    def can_restore(self, num_live_bytes: float, num_tokens: int, known: Callable[[], int]) -> bool:
        """Whether a row of so many prompt tokens could start from all that is kept of it, where all rows take
        `num_live_bytes` at their peak. `known` says how much that is, which costs a walk."""
        left = self.restorable_bytes(num_live_bytes)
        return self._sizes.kept(0, num_tokens) <= left or self._sizes.kept(0, known()) <= left

    def restorable_bytes(self, num_live_bytes: float) -> float:
        """How much of the kept KV a row may use, where all rows take so many bytes at their peak."""
        return self.memory.plan.pool_bytes - num_live_bytes - self.leased_bytes() - self.deferred_bytes()

    def within(self, tokens: TokenSequence, num_bytes: float) -> TokenSequence:
        """As many of a prompt's first tokens as may be restored: their KV takes at most so many bytes."""
        if math.isinf(num_bytes) or self._sizes.kept(0, len(tokens)) <= num_bytes:
            return tokens
        per_token = max(self._sizes.kept(0, 1) - self._sizes.fixed, 1e-9)
        num_tokens = max(0, min(len(tokens), int((num_bytes - self._sizes.fixed) / per_token)))
        return TokenSequence(tokens.ids[:num_tokens], tuple(each for each in tokens.images if each.end <= num_tokens))

    def note_cut(self, tokens: TokenSequence, within: TokenSequence, num_matched_tokens: int) -> None:
        """Report that a row is restored from less than is kept."""
        if len(within) < len(tokens) and num_matched_tokens and num_matched_tokens >= len(within) - 1:
            self.memory.press("kv_pool", NOT_RESTORED)
