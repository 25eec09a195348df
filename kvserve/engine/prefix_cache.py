"""The prefix cache as the engine uses it: the tree of `cache/` with arrays in it, one lease per row.

    enter   look the prompt up, restore what is known, plan where the prefill will stop
    keep    at a stop: the KV since the last one and, where layers cannot be cut, their state
    finish  the answer's KV, up to the last whole token
    leave   the row is gone; what it used may be evicted

Everything here belongs to the engine thread. An array is copied on its way in and on its way out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.checkpoints import Stop, plan_stops
from kvserve.cache.disk_records import Removal
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.forget_users import IsForgotten
from kvserve.cache.match import PrefixMatch
from kvserve.cache.node import Lease
from kvserve.cache.records import Limits
from kvserve.cache.remote_tier import RemoteTier
from kvserve.cache.token_run import image_around, pack
from kvserve.cache.tree import PrefixTree
from kvserve.cache.warmed import WarmedTokens
from kvserve.core import Reuse, ReuseTier, TokenSequence
from kvserve.engine.cache_records import CacheLease, CacheReport, CacheSettings, ForgottenKv, Totals
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.disk_writing import NOTHING_TO_FLUSH, Flush
from kvserve.engine.kv_moves import KvMoves, slices_of
from kvserve.engine.kv_room import BEHIND, FULL_DISK, KvRoom
from kvserve.engine.memory import MemoryLedger
from kvserve.engine.model import LoadedModel
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.ranks.decisions import STOPS
from kvserve.engine.ranks.depth import agreed_match
from kvserve.engine.ranks.place import ALONE, Ranks
from kvserve.engine.rows import Row, expected_tokens, outline, owner_of, request_owner, tokens_of, user_of, with_stop
from kvserve.engine.snapshot import merged

DISK_WAIT_SECONDS = 0.02
"""How long the engine waits for the disk at once, while there is nothing else to do and no client is heard."""

TRIM_MISS_TOLERANCE_TOKENS = 64
"""A retreat of this many tokens or fewer is not counted as a missed checkpoint."""


class PrefixCache:
    """Owns the tree and every array in it."""

    def __init__(
        self, model: LoadedModel, settings: CacheSettings, memory: MemoryLedger, fingerprint: str, ranks: Ranks = ALONE
    ) -> None:
        """`memory` is the ledger that says how much may be kept."""
        self._ranks = ranks
        self._layout = model.layout
        self._model = model
        self._max_bytes = max_bytes = memory.plan.kv_bytes
        self.needs_checkpoints = not self._layout.is_cuttable
        self.cut_tokens = model.cache_support.cut_tokens
        self.hasher = BlockHasher(settings.block_size, fingerprint)
        self._disk: DiskCache | None = None
        self.has_lost_disk = False
        self.is_unnamed = False
        self.forget_on_disk: Callable[[IsForgotten], Removal] = lambda _: Removal(0, is_done=True)
        self._tree = PrefixTree(
            self.hasher,
            Limits(
                max_bytes=max_bytes,
                max_checkpoint_bytes=max(1, max_bytes // 2),
                max_entries=settings.max_entries,
                max_entries_per_owner=settings.max_entries_per_owner,
                ttl_seconds=settings.ttl_seconds,
                owner_idle_seconds=settings.owner_idle_seconds,
                keep_alive_seconds=settings.keep_alive_seconds,
                check_seconds=settings.check_seconds,
            ),
            needs_checkpoints=self.needs_checkpoints,
            cut_payload=lambda payload, start, end: merged([(payload, start, end)]),  # type: ignore[list-item]
            use_index=settings.use_index,
        )
        self.kv_room = KvRoom(self._tree, memory, model.sizes)
        self.kv_moves = KvMoves(self._tree, self._layout, model, self.kv_room, lambda: self._disk)
        memory.open("write_queue", lambda: disk.tier.moving_bytes()[0] if (disk := self._disk) is not None else 0)
        memory.open("read_ahead", lambda: disk.read_ahead_bytes if (disk := self._disk) is not None else 0)
        memory.watch("disk", lambda: FULL_DISK if (disk := self._disk) and disk.tier.is_full else None)
        memory.watch("write_queue", lambda: BEHIND if (disk := self._disk) and disk.tier.is_behind else None)
        self._num_hybrid_trim_misses = 0
        self.totals = Totals()
        self.warmed = WarmedTokens(lambda tokens, partition: self.kept_tokens(tokens, [partition])[1])

    # --- a row's life -------------------------------------------------------------------------------------------------

    def usable_tokens(self, tokens: TokenSequence, partition: str) -> int:
        """How many of a prompt's tokens a row could start behind now."""
        return self._tree.lookup(tokens, partition=partition).num_usable_tokens

    def enter(self, row: Row, *, is_ahead: bool = False, is_guess: bool = False) -> tuple[CacheLease, list[Any], int]:
        """Restore what is kept of a row's tokens: its lease, live caches, and how many tokens they hold.

        `is_ahead`: it has no answer, counts nowhere and becomes no owner's entry. `is_guess`: no client asked for it.
        """
        tokens = tokens_of(row)
        match = agreed_match(self._ranks, self._tree, row, tokens, self._found(row, tokens))
        if not is_ahead:
            self._note_reuse(row, match)
        owner, user, request = None if is_ahead else owner_of(row), user_of(row), row.request
        lease = self._tree.acquire(match, owner=owner, ttl_seconds=request.ttl_seconds, user=user, is_guess=is_guess)
        if not self._model.cache_support.can_keep or request.ttl_seconds == 0 or row.is_forgotten:
            self._tree.release(lease)  # a row without a lease leaves nothing behind, and no row waits for it
        try:
            return self._ranks.together(lambda: self._restored(row, tokens, match, lease))
        except Exception:
            self.kv_moves.let_go(lease)
            self._tree.release(lease)
            raise

    def _found(self, row: Row, tokens: TokenSequence) -> PrefixMatch:
        """The kept KV that a row begins with: all of it, or as much as fits beside the row."""
        partition = row.request.partition
        if row.moved_bytes and self.kv_moves.nodes(row, self._tree.peek(tokens, partition=partition)):
            return self._tree.lookup(tokens, partition=partition)
        within = self.kv_room.within(tokens, row.restorable_bytes)
        match = self._tree.lookup(within, partition=partition)
        self.kv_room.note_cut(tokens, within, match.num_matched_tokens)
        return match

    def _restored(
        self, row: Row, tokens: TokenSequence, match: PrefixMatch, lease: Lease
    ) -> tuple[CacheLease, list[Any], int]:
        num_next = expected_tokens(row) - match.num_usable_tokens
        if moving := self.kv_moves.nodes(row, match, lease):
            caches = self.kv_moves.restore(row, match, lease, moving, num_next)
        else:
            pieces = slices_of(match.pieces)
            state: Any = match.state.payload if match.state is not None else None
            caches = self._layout.restore(pieces, state, num_next)
        stops = self._ranks.decided(STOPS, lambda: self._stops(tokens, row, match))
        run = match.run if len(match.run) == len(tokens) else pack(tokens)
        return CacheLease(row, lease, run, list(stops)), caches, match.num_usable_tokens

    def _stops(self, tokens: TokenSequence, row: Row, match: PrefixMatch) -> tuple[Stop, ...]:
        """Where a row's prefill stops, to keep what it has."""
        stops = plan_stops(
            outline(tokens, row.request.message_starts, needs_checkpoints=self.needs_checkpoints),
            num_usable_tokens=match.num_usable_tokens,
            num_matched_tokens=match.num_matched_tokens,
            needs_checkpoints=self.needs_checkpoints,
            cut_tokens=self.cut_tokens,
        )
        if not self.needs_checkpoints:  # rows alone serve others: the whole prompt is kept before the answer begins
            stops = (*stops, Stop(len(tokens) - 1, "stride"))
        packed_from = self._model.packed_from(tokens.images)
        return with_stop(stops, packed_from, match.num_usable_tokens, len(tokens) - 1)

    def pin(self, row: Row, room_bytes: float = math.inf, *, is_guess: bool = False) -> PinnedPrefix:
        """Pin what a row will start from until it enters, for room is made for it before. Reading what only the disk
        has of it begins, up to so many bytes."""
        partition, user = row.request.partition, user_of(row)
        tokens = tokens_of(row)
        if not row.moved_bytes:
            tokens = self.kv_room.within(tokens, row.restorable_bytes)
        if self._disk is not None:
            return self._disk.pin(tokens, partition, user, room_bytes, is_guess=is_guess)
        match = self._tree.lookup(tokens, partition=partition)
        return PinnedPrefix(tokens, self._tree.acquire(match, user=user, is_guess=is_guess), is_settled=True)

    def pin_more(self, pinned: PinnedPrefix) -> None:
        """Pin for a row what others have added of its prompt since, too."""
        if pinned.is_settled:  # what comes from the disk is put where the lease stands
            self._tree.follow(pinned.lease, pinned.tokens)

    def is_restoring(self, pinned: PinnedPrefix) -> bool:
        """Take in what the disk has given for a row so far; True while more is to come."""
        return self._disk is not None and self._disk.advance(pinned)

    def answer_stride_tokens(self) -> int | None:
        """After so many tokens of an answer the row is kept while it continues; None: only at its end."""
        return self._disk.answer_stride_tokens if self._disk is not None else None

    def await_disk(self) -> None:
        """Wait a moment for the disk, where nothing else is to be done."""
        if self._disk is not None:
            self._disk.tier.wait(DISK_WAIT_SECONDS)

    def let_go(self, pinned: PinnedPrefix) -> None:
        """Let go of a pinned prefix."""
        if self._disk is not None:
            self._disk.let_go(pinned)
        else:
            self._tree.release(pinned.lease)

    def keep(self, cache_lease: CacheLease, caches: Sequence[Any], num_done: int) -> None:
        """Keep what a prefill has computed up to the planned stop `num_done`; nothing where it does not stop."""
        if (stop := cache_lease.stop_at(num_done)) is not None:
            self.kv_moves.insert(cache_lease, tokens_of(cache_lease.row), caches, num_done, stop.kind)

    def extend(
        self, cache_lease: CacheLease, caches: Sequence[Any], tokens: Sequence[int], rest: Sequence[Any] | None = None
    ) -> bool:
        """Take in the KV of `tokens`, all that a row's caches hold between two steps, but nothing of half an image, and
        nothing of an answer where who reads it computes it in other pieces and that matters. Whether the caches were
        given up for it, as may be where the row is over and only the `rest` of its batch has them too; None: it
        continues."""
        sequence = TokenSequence(tuple(tokens), cache_lease.row.request.prompt.images)
        end = len(sequence)
        is_as_read = self.cut_tokens == 1 or (not end % self.cut_tokens and end < len(cache_lease.row.request.prompt))
        if not is_as_read:
            return rest is not None and self.kv_moves.insert_prompt(cache_lease, sequence, caches, rest)
        if (image := image_around(sequence.images, end)) is not None:
            if self.needs_checkpoints or image.start <= cache_lease.lease.num_tokens:
                return rest is not None and self.kv_moves.insert_prompt(cache_lease, sequence, caches, rest)
            end = image.start
        if rest is not None:
            return self.kv_moves.insert_last(cache_lease, sequence, caches, end, "answer", rest)
        self.kv_moves.insert(cache_lease, sequence, caches, end, "answer")
        return False

    def finish(
        self, cache_lease: CacheLease, caches: Sequence[Any], tokens: Sequence[int], rest: Sequence[Any] | None = None
    ) -> bool:
        """The same of a row that has left its batch, and mark its end."""
        if self._disk is not None:
            self._disk.num_turns += 1
        is_moved = self.extend(cache_lease, caches, tokens, rest)
        self._tree.mark_end(cache_lease.lease)
        return is_moved

    def retract_answer(self, cache_lease: CacheLease) -> None:
        """Forget what was kept of a row's answer meanwhile, on disk too: the row is gone."""
        start = cache_lease.row.answer_kept_from
        path = self._tree.retract(cache_lease.lease, start) if start is not None else None
        if self._disk is not None and path is not None and start is not None:
            self._disk.retract(path, start)

    def leave(self, cache_lease: CacheLease) -> None:
        """Release a row's lease; segments that were complete stay."""
        self.kv_moves.let_go(cache_lease.lease)
        self._tree.release(cache_lease.lease)
        if cache_lease.row.is_forgotten:
            self._tree.forget_names()

    def _note_reuse(self, row: Row, match: PrefixMatch) -> None:
        """Note on the row what it starts from, and count where a checkpoint was missing."""
        tail = len(row.request.prompt) - row.request.message_starts[-1].offset if row.request.message_starts else 0
        is_trim_miss = match.num_trim_missed_tokens > TRIM_MISS_TOLERANCE_TOKENS + tail
        self._num_hybrid_trim_misses += is_trim_miss
        if not row.has_begun:  # a row that enters again has its prompt from itself
            is_warmed = self.warmed.use(match.run, match.chain, match.num_usable_tokens) > 0
            tier: ReuseTier = "live row" if row.has_waited_for_row else "disk" if row.has_come_from_disk else "ram"
            tier = "warmed" if is_warmed else "shared" if row.has_come_from_shared else tier
            row.reuse = Reuse(
                tier=tier if match.num_usable_tokens else "nothing",
                num_matched_tokens=match.num_matched_tokens,
                checkpoint=match.state.checkpoint.kind if match.state is not None else None,
                is_trim_miss=is_trim_miss,
                unshared=row.unshared,
            )

    # --- limits, idle work, reports -----------------------------------------------------------------------------------

    def kept_tokens(self, tokens: TokenSequence, partitions: Sequence[str] | None = None) -> tuple[int, int]:
        """How much of a conversation RAM has, and how much RAM or the disk has, the partition with most of it (None:
        of all); asking does not count as use."""
        disk, asked = self._disk, partitions
        if asked is None:
            asked = [*self._tree.partitions(), *(disk.tier.index.partitions() if disk is not None else ())]
        in_ram = max((self._tree.known_depth(tokens, partition=each) for each in asked), default=0)
        on_disk = (disk.known_depth(self._tree.name(tokens, each)) for each in asked) if disk is not None else ()
        return in_ram, max(in_ram, *on_disk, 0)

    def discard(self, tokens: TokenSequence, is_owner: Callable[[str], bool]) -> None:
        """Forget what only the entries of these owners and this conversation use, on disk too."""
        paths = self._tree.discard(tokens, lambda entry_owner: is_owner(request_owner(entry_owner)))
        if self._disk is not None:
            self._disk.discard(tokens, paths, self.hasher)
        elif self.is_unnamed:  # no prefix can be found there yet, but the index knows each file's owners
            self.forget_on_disk(is_owner)
        del paths
        mx.clear_cache()

    def forget(self, is_forgotten: IsForgotten) -> ForgottenKv:
        """Forget what only the requests of these owners used, and what has no known owner: it may be theirs. On the
        disk of this model: see `forget_of_others`."""
        held_bytes = self._tree.num_ram_bytes
        num_tokens = self._tree.forget(is_forgotten)
        num_ram_bytes = held_bytes - self._tree.num_ram_bytes
        forget_on_disk = partial(self._disk.forget, max_bytes=self._max_bytes) if self._disk else self.forget_on_disk
        removal = forget_on_disk(is_forgotten)
        self.warmed.forget_owners(is_forgotten)
        self.make_room()
        self.kv_room.evict_rest(to_its_end=True)  # names of owners are kept until all has been looked at
        mx.clear_cache()
        return ForgottenKv(num_tokens, num_ram_bytes, removal.num_bytes, removal.is_done)

    def forget_of_others(self, is_forgotten: IsForgotten) -> Removal:
        """The same on the disk, of all other models; from any thread, as it may take seconds."""
        # Without one `forget_on_disk` has seen to all of them.
        return self._disk.tier.forget_of_others(is_forgotten) if self._disk else Removal(0, is_done=True)

    def make_room(self, num_needed_bytes: float = 0) -> None:
        """Evict until live rows, the tier and `num_needed_bytes` fit into the budget together."""
        self.kv_room.make(num_needed_bytes)

    def give_ram_back(self) -> None:
        """Where RAM is only lent, evict what no row uses as soon as the disk has it."""
        if self._disk is not None:
            self._disk.writing.evict_written(self._max_bytes)

    def do_disk_work(self) -> bool:
        """Idle work: write what could not be written before and, where RAM is only lent, free it. Whether to ask again
        at once."""
        return self._disk is not None and self._disk.do_idle_work(self._max_bytes)

    def coalesce(self) -> bool:
        """Idle work: join one run of small segments, where there is memory to have it twice. Whether it was."""
        run = self._tree.plan_coalesce()
        if run is None or not self.kv_room.memory.has_room_for_kv(sum(p.segment.num_bytes for p in run.pieces)):
            return False
        self._tree.replace(run, merged(slices_of(run.pieces)))
        return True

    def clear(self) -> None:
        """Forget everything that RAM keeps; live rows continue."""
        if self._disk is not None:
            self._disk.abandon()
        self.kv_moves.clear()
        self._tree.clear()
        mx.clear_cache()

    def empty(self) -> None:
        """Forget everything, on disk too; live rows continue."""
        if self._disk is not None:
            self._disk.tier.clear()
        elif self.is_unnamed:  # which of the files on disk are this model's is not known
            self.forget_on_disk(lambda _: True)
        self.clear()
        self.warmed.clear()

    def rename(self, fingerprint: str) -> None:
        """Name all that is kept by the model's fingerprint, which is known now. Before `use_disk`."""
        self.hasher, self.is_unnamed = replace(self.hasher, fingerprint=fingerprint), False
        self._tree.rename(self.hasher)
        self.warmed.rename(self.hasher)

    def use_disk(self, tier: DiskTier, *, is_ram_lent: bool = False, remote: RemoteTier | None = None) -> None:
        """Write what is kept to disk too from now on, also what RAM has already, and restore from there; `remote` is
        the shared cache behind it. `is_ram_lent`: RAM keeps what rows need now, nothing else."""
        self._disk = DiskCache(
            tier,
            self._tree,
            needs_checkpoints=self.needs_checkpoints,
            is_ram_lent=is_ram_lent,
            make_room=self.make_room,
            make_some_room=self.kv_room.make_some,
            remote=remote,
        )
        for path in list(self._tree.kept_paths()):
            self._disk.writing.save(path, 0)

    def measured_prefill(self, tokens_per_second: float | None) -> None:
        """Note how fast this model computes: reading from disk must be faster to be worth it."""
        if self._disk is not None and tokens_per_second is not None:
            self._disk.tier.worker.prefill_rate = tokens_per_second

    def begin_flush(self) -> Flush:
        """How much `close_disk` will have to write, and a look at how far it is."""
        return self._disk.begin_flush() if self._disk is not None else NOTHING_TO_FLUSH

    def close_disk(self, timeout_seconds: float) -> bool:
        """Write what RAM has and the disk has not, and end the disk's thread. Whether all of it is there."""
        disk, self._disk = self._disk, None
        return disk is None or disk.close(timeout_seconds)

    def begin_anew(self) -> None:
        """Forget all that is kept and counted."""
        self.clear()
        self.warmed.forget()
        self.totals = Totals()
        self._num_hybrid_trim_misses = 0

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of KV in RAM and on disk, from any thread: numbers of about now."""
        disk = self._disk  # the engine thread may close it meanwhile
        return self._tree.num_ram_bytes, disk.tier.index.num_bytes() if disk is not None else 0

    def num_disk_faults(self) -> int:
        """Everything that went wrong with KV on disk; a folder that cannot be used counts once. From any thread."""
        disk = self._disk
        return sum(disk.tier.faults.counts().values()) if disk is not None else int(self.has_lost_disk)

    def report(self) -> CacheReport:
        disk, misses = self._disk.report() if self._disk is not None else None, self._num_hybrid_trim_misses
        stats = replace(self._tree.stats(), live_bytes=self.kv_room.memory.held("live"))
        return CacheReport(stats, replace(self.totals), misses, self._max_bytes, disk, None, self.has_lost_disk)
