"""Between the prefix tree and the disk: writes what is new in RAM behind, reads back what only the disk has.

    writing   after each extension: parts of a path that the disk does not have, as bytes, into the writer's queue
    advance   for a row that waits: read what the disk has beyond RAM, and let the row's lease grow over it

It belongs to the engine thread. A fault of the disk makes a row start from less, never fail.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_blob import Blob, BlobName
from kvserve.cache.disk_records import Entry, Found, Load, Removal
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.forget_users import IsForgotten
from kvserve.cache.kept_path import KeptPath
from kvserve.cache.match import PrefixMatch
from kvserve.cache.node import NamedPrompt
from kvserve.cache.records import Copy
from kvserve.cache.remote_tier import RemoteTier
from kvserve.cache.token_run import pack
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence, Unshared
from kvserve.engine.blobs import NotReadable, decode_kv, decode_state, joined
from kvserve.engine.borders import costs_the_disk_only
from kvserve.engine.disk_goals import Goal, goals
from kvserve.engine.disk_writing import DiskWriting, Flush
from kvserve.engine.pinned import DiskReport, PinnedPrefix, patience_for
from kvserve.engine.remote_reading import END_SECONDS, awaits, begin_fetch
from kvserve.engine.snapshot import KvSlice, StateSnapshot, merged
from kvserve.engine.warming import ANY_TOKEN

MIN_GAIN_TOKENS = 16
"""Below this a prefill step is as good as a file."""

ANSWER_STRIDE_TOKENS = 512
"""A long answer is kept every so many tokens: to read a row out of its batch copies all of it."""

CHECKPOINT_STRIDE_TOKENS = 2048
"""The same where a whole state goes with it."""

MAX_INSERT_BYTES = 64 * 2**20
"""So much is taken in at once; then running streams get their step."""

UNKNOWN_RATE = 100 * 2**20
"""Bytes per second of a disk that was never measured: a slow one."""


RESCUE_SECONDS = 5.0
RESCUE_WAIT_SECONDS = 0.02
"""So long rows wait while what others have is read before an owner is forgotten; the rest is computed again."""


class RowsGone(Exception):
    """The rows that a blob continues were evicted from RAM meanwhile."""


class DiskCache:
    """The disk side of one model's prefix cache. `make_room` evicts from RAM until so many bytes fit, `make_some_room`
    for a slice of time."""

    def __init__(
        self,
        tier: DiskTier,
        tree: PrefixTree,
        *,
        needs_checkpoints: bool,
        is_ram_lent: bool,
        make_room: Callable[[float], None],
        make_some_room: Callable[[float], bool],
        remote: RemoteTier | None = None,
    ) -> None:
        self.tier = tier
        self.remote = remote
        self._tree = tree
        self._needs_checkpoints = needs_checkpoints
        self._make_room = make_room
        self.writing = DiskWriting(tier, tree, is_ram_lent=is_ram_lent, make_some_room=make_some_room)
        self._loading: set[BlobName] = set()
        self.num_turns = 0
        self.num_restores = 0
        self.num_restored_tokens = 0
        self.num_declined = 0

    def report(self) -> DiskReport:
        stats, remote = self.tier.stats(), self.remote.stats() if self.remote is not None else None
        return DiskReport(stats, self.num_turns, self.num_restores, self.num_restored_tokens, self.num_declined, remote)

    @property
    def read_ahead_bytes(self) -> int:
        """Bytes that were read, from the disk or the shared cache, and not taken yet. From any thread."""
        return self.tier.moving_bytes()[1] + (self.remote.num_hand_bytes if self.remote is not None else 0)

    def known_depth(self, prompt: NamedPrompt) -> int:
        """Tokens of a prompt that its partition has on disk, up to a state where one is needed."""
        found = self.tier.index.find(prompt.run, prompt.chain).written()
        ends = [step.end for step in found.steps if step.checkpoint is not None] if self._needs_checkpoints else []
        return max(ends, default=0) if self._needs_checkpoints else found.depth

    def discard(self, tokens: TokenSequence, paths: Sequence[KeptPath], hasher: BlockHasher) -> None:
        """Forget what serves only these paths and the conversation of `tokens`, in whichever partition."""
        run, index = pack(tokens), self.tier.index
        for path in paths:
            self.tier.discard(index.exclusive(path.run, path.chain))
        for partition in index.partitions():
            self.tier.discard(index.exclusive(run, hasher.start(partition).extended(run)))

    def forget(self, is_forgotten: IsForgotten, max_bytes: int) -> Removal:
        """Forget what only these users are known to have used, and what has no known user; the tree has done so before.
        What others have behind it goes through RAM, within `max_bytes` there, and is written anew."""
        all_pinned = list(self._rescued(is_forgotten, max_bytes))
        removal = self.tier.forget(is_forgotten)
        self.writing.save_kept()
        for pinned in all_pinned:
            self.let_go(pinned)
        return removal

    def _rescued(self, is_forgotten: IsForgotten, max_bytes: int) -> Iterator[PinnedPrefix]:
        """What others would lose, in RAM: as much of it as can be read in a moment."""
        until = time.monotonic() + RESCUE_SECONDS
        for each in self.tier.index.shared_prefixes(is_forgotten):
            if time.monotonic() >= until or self._tree.num_ram_bytes >= max_bytes:
                return
            pinned = self.pin(TokenSequence((*each.tokens.ids, ANY_TOKEN), each.tokens.images), each.partition)
            while self.advance(pinned) and time.monotonic() < until:
                self.tier.wait(RESCUE_WAIT_SECONDS)
            self._tree.note_users(pinned.lease, each.users)
            yield pinned

    def retract(self, path: KeptPath, start: int) -> None:
        """Forget what serves only this path, from `start` on."""
        self.tier.discard(self.tier.index.exclusive(path.run, path.chain, start))

    @property
    def answer_stride_tokens(self) -> int:
        """After so many tokens of an answer the row is kept while it continues."""
        return CHECKPOINT_STRIDE_TOKENS if self._needs_checkpoints else ANSWER_STRIDE_TOKENS

    def do_idle_work(self, num_bytes: int) -> bool:
        """Write what could not be written before and, where RAM is only lent, free so many bytes. Whether to ask again
        at once."""
        return self.writing.save_lost() or self.writing.await_ram(num_bytes)

    def begin_flush(self) -> Flush:
        """How much the end will have to write, and a look at how far it is."""
        tier = self.tier
        before = tier.stats().num_written_bytes
        return Flush(self.writing.num_unwritten_bytes(), lambda: tier.stats().num_written_bytes - before)

    def close(self, timeout_seconds: float) -> bool:
        """Write what RAM has and the disk has not, and end the disk's thread. Whether all of it is there."""
        until = time.monotonic() + timeout_seconds
        self.writing.save_kept(until, is_end=True)
        is_written = self.tier.close(max(0.0, until - time.monotonic())) and not self.tier.has_lost
        if self.remote is not None:
            self.remote.end(END_SECONDS)
        return is_written

    # --- coming back --------------------------------------------------------------------------------------------------

    def pin(
        self,
        tokens: TokenSequence,
        partition: str = "",
        owner: str = "",
        room_bytes: float = math.inf,
        *,
        is_guess: bool = False,
    ) -> PinnedPrefix:
        """Pin what RAM has of a row's tokens, and begin to read what the disk has beyond it."""
        match = self._tree.lookup(tokens, partition=partition)
        lease = self._tree.acquire(match, user=owner, is_guess=is_guess)
        pinned, has_begun = PinnedPrefix(tokens, lease, partition=partition, owner=owner, room_bytes=room_bytes), False
        with costs_the_disk_only(partial(self.tier.faults.add, "unreadable")):
            if is_guess or not self._begin_fetch(pinned, match):
                self._begin(pinned, match)
            has_begun = True
        pinned.is_settled |= not has_begun
        return pinned

    def _begin_fetch(self, pinned: PinnedPrefix, match: PrefixMatch) -> bool:
        """Whether the row waits for the shared cache before the disk is read: what comes from there comes to it."""
        if self.remote is not None:
            room, wants = pinned.room_bytes, self._needs_checkpoints
            on_disk = self.known_depth(match.prompt)
            begun = begin_fetch(self.remote, match, on_disk, room, needs_checkpoints=wants)
            if isinstance(begun, Unshared):
                pinned.unshared = begun
            else:
                pinned.fetch = begun
        return pinned.fetch is not None

    def let_go(self, pinned: PinnedPrefix) -> None:
        """Let go of a pinned prefix: its row has begun, or left. Idempotent."""
        if pinned.fetch is not None:
            pinned.fetch.leave()
        self._end_load(pinned)
        pinned.is_settled = True
        self._tree.release(pinned.lease)

    def advance(self, pinned: PinnedPrefix) -> bool:
        """Take in what has been read for a row. True as long as there is something to wait for."""
        if pinned.is_settled:
            return False
        if (fetch := pinned.fetch) is not None:
            if awaits(fetch):
                pinned.last_news_at = max(pinned.last_news_at, fetch.news_at)
                return True
            pinned.num_shared_tokens, pinned.unshared, pinned.fetch = fetch.taken(), fetch.unshared, None
            pinned.last_news_at = time.monotonic()
            self._plan_again(pinned)
            return not pinned.is_settled
        if pinned.load is None:  # another row reads the same blobs
            self._plan_again(pinned)
            pinned.is_settled |= pinned.is_stalled
            return not pinned.is_settled
        is_sound = self._insert_arrived(pinned, pinned.load)
        if not is_sound:
            self._end_load(pinned)
            self._plan_again(pinned)
        elif (is_over := self.tier.is_over(pinned.load)) or pinned.is_stalled:
            if not is_over:
                self.tier.faults.add("unreadable", f"nothing was read for {pinned.patience_seconds:.0f} s")
            self._end_load(pinned)
            pinned.is_settled = True
        return not pinned.is_settled

    def abandon(self) -> None:
        """Give up every load that was begun: no row waits for one."""
        self._loading.clear()

    def _plan_again(self, pinned: PinnedPrefix) -> None:
        """Look again at what is there: the tree may have grown, and blobs may be gone."""
        match = self._tree.lookup(pinned.tokens, partition=pinned.partition)
        lease = self._tree.acquire(match, user=pinned.owner, is_guess=pinned.lease.is_guess)
        self._tree.release(pinned.lease)
        pinned.lease = lease
        self._begin(pinned, match)

    def _begin(self, pinned: PinnedPrefix, match: PrefixMatch) -> None:
        rows, found = self._beyond(match)
        goal = self._goal(found, match, pinned)
        self.tier.note_restored(rows, max(match.num_usable_tokens, goal.end if goal is not None else 0))
        pinned.goal, pinned.load, pinned.base, pinned.is_settled = goal, None, None, goal is None
        if match.num_matched_tokens > pinned.num_matched_tokens:  # by what another row reads, if not by ours
            pinned.num_matched_tokens, pinned.last_news_at = match.num_matched_tokens, time.monotonic()
        if goal is None:
            return
        largest = max(entry.num_bytes for entry in goal.entries)
        pinned.patience_seconds = patience_for(largest, self.tier.read_rate or UNKNOWN_RATE)
        if any(entry.name in self._loading for entry in goal.entries):
            return
        self._loading.update(entry.name for entry in goal.entries)
        pinned.load, pinned.num_taken = self.tier.load(goal.entries), 0
        pinned.last_news_at = time.monotonic()

    def _beyond(self, match: PrefixMatch) -> tuple[Sequence[Copy], Found]:
        """What the disk has beyond what RAM can use, and the blobs that have what a row would start from."""
        rows, depth = _on_disk(match)
        index, run = self.tier.index, match.run
        found = index.find(run.part(depth, run.end) if depth else run, match.chain, rows)
        if found.depth < depth:  # it was forgotten meanwhile
            rows, found = (), index.find(run, match.chain)
        found = found.written()
        return (*rows, *(step.segment for step in found.steps)), found

    def _end_load(self, pinned: PinnedPrefix) -> None:
        if pinned.load is not None:
            self._loading -= pinned.load.names
            self.tier.cancel(pinned.load)
        pinned.load = None

    def _insert_arrived(self, pinned: PinnedPrefix, load: Load) -> bool:
        """Let the lease grow over blobs that have arrived, some at a time; what is not taken yet is not read beyond, so
        a row that takes slowly is read for slowly. False: one of them is of no use."""
        goal, num_bytes = pinned.goal, 0
        while goal is not None and num_bytes < MAX_INSERT_BYTES and (taken := self.tier.take(load)):
            [blob], entry = taken, goal.entries[pinned.num_taken]
            pinned.num_taken += 1
            pinned.last_news_at = time.monotonic()
            num_bytes += entry.num_bytes
            if blob is None or not self._insert(pinned, goal, entry, blob):
                return False
        return True

    def _insert(self, pinned: PinnedPrefix, goal: Goal, entry: Entry, blob: Blob) -> bool:
        self._make_room(entry.num_bytes)
        pinned.room_bytes -= entry.num_bytes
        before = pinned.lease.num_tokens
        try:
            if blob.head.kind == "checkpoint":
                self._insert_state(pinned, goal, entry, blob)
            else:
                kv = decode_kv(blob.note, blob.tensors)
                if kv.num_tokens != len(blob.head.tokens):
                    raise NotReadable(f"{kv.num_tokens} rows for {len(blob.head.tokens)} tokens")
                self._extend(pinned, min(goal.ends[goal.segments.index(entry)], goal.end), kv, None, entry)
                self.num_restores += not self._needs_checkpoints and entry is goal.segments[-1]
        except RowsGone:
            return False
        except NotReadable as error:
            self.tier.faults.add("damaged", f"{entry.name}: {error}")
            self.tier.index.forget_entry(entry)
            return False
        self.num_restored_tokens += (num_tokens := pinned.lease.num_tokens - before)
        pinned.num_restored_tokens += max(num_tokens, blob.head.kind == "checkpoint")
        return True

    def _insert_state(self, pinned: PinnedPrefix, goal: Goal, entry: Entry, blob: Blob) -> None:
        """Raises NotReadable or RowsGone."""
        state = decode_state(blob.note, blob.tensors)
        if blob.head.base:
            if pinned.base is None:
                raise NotReadable("the state that it goes on from was not read")
            state = joined(pinned.base, state)
        pinned.base = state
        if entry is goal.states[-1]:
            pinned.base = None
            self._extend(pinned, goal.end, None, state, entry)
            self.num_restores += 1

    def _extend(
        self, pinned: PinnedPrefix, end: int, kv: KvSlice | None, state: StateSnapshot | None, entry: Entry
    ) -> None:
        """The lease grows to `end` over rows that RAM has, and over those that were read."""
        first = entry.head.tokens.start

        def take_rows(start: int, stop: int) -> KvSlice:
            if kv is None or start < first:
                raise RowsGone
            is_whole = (start - first, stop - first) == (0, kv.num_tokens)
            return kv if is_whole else merged([(kv, start - first, stop - first)])

        is_border = state is not None or end == entry.head.tokens.end
        kind = entry.head.boundary if is_border else "stride"
        take_state = None if state is None else (lambda: state)
        end = max(end, pinned.lease.num_tokens)
        extension = self._tree.extend(pinned.lease, pinned.tokens, end, take_rows, take_state, kind)
        copies = pinned.lease.node.copies
        if extension.num_new_tokens:
            copies.rows = (entry,)
        if extension.has_new_checkpoint:
            copies.state = entry

    # --- what is worth reading ----------------------------------------------------------------------------------------

    def _goal(self, found: Found, match: PrefixMatch, pinned: PinnedPrefix) -> Goal | None:
        """What to read so that the row starts soonest; None where computing is as fast, or RAM has as much."""
        best, best_saved, declined = None, 0.0, None
        for goal in goals(found, match, pinned.tokens, needs_checkpoints=self._needs_checkpoints):
            num_tokens = goal.end - match.num_usable_tokens
            if num_tokens < MIN_GAIN_TOKENS or goal.num_bytes > pinned.room_bytes:
                continue
            declined = goal
            if (saved := self._saved_seconds(num_tokens, goal.num_bytes)) > best_saved:
                best, best_saved = goal, saved
        if best is None and declined is not None and declined.entries:
            self.num_declined += 1
            self.tier.measure(max(declined.entries, key=lambda entry: entry.num_bytes))
        return best

    def _saved_seconds(self, num_tokens: int, num_bytes: int) -> float:
        """Prefill time less reading time. What was never measured is taken for the usual: reading is faster."""
        prefill_rate, read_rate = self.tier.worker.prefill_rate, self.tier.read_rate
        if prefill_rate is None or read_rate is None:
            return float(num_tokens)
        return num_tokens / prefill_rate - num_bytes / read_rate


def _on_disk(match: PrefixMatch) -> tuple[Sequence[Copy], int]:
    """The deepest place that a row can start from in RAM of which the disk has all tokens too, and the blobs that have
    the last of them."""
    node, offset = match.node, match.num_usable_tokens
    while node.parent is not None and not node.copies.has_rows:
        node = node.parent
        offset = node.end
    return node.copies.rows, offset
