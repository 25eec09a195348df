"""Admitted rows that have not begun: each waits for KV that another row computes, or the disk reads, for it."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.checkpoints import Stop
from kvserve.cache.in_flight import InFlight, plan_wait
from kvserve.core import Awaiting
from kvserve.engine.borders import costs_no_row
from kvserve.engine.cache_records import CacheLease
from kvserve.engine.kv_room import NO_ROOM
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.prefill import Prefill
from kvserve.engine.prefill_pool import PrefillPool
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.ranks.decisions import READY, Readied
from kvserve.engine.ranks.place import ALONE, Ranks, RanksLost
from kvserve.engine.rows import Row, tokens_of

NOT_RESTORED = "KV could not be restored and will be computed again"


@dataclass(slots=True, eq=False)
class _Waiting:
    """`awaited` is the row in flight that will have stored this one's first tokens. `pinned` keeps what is known of its
    prompt from eviction while room is made for it; without `has_room` it does not begin. `is_restored`: every rank has
    what it waits for from its disk."""

    row: Row
    pinned: PinnedPrefix
    has_room: bool
    awaited: CacheLease | None = None
    awaited_tokens: int = 0
    is_restored: bool = False


class WaitingForPrefix:
    """Admitted rows that have not begun, in the order in which they were admitted. Owned by the engine thread."""

    def __init__(self, cache: PrefixCache, report: Callable[[str], None], ranks: Ranks = ALONE) -> None:
        self._cache = cache
        self._ranks = ranks
        self._report = report
        self._entries: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._entries)

    def rows(self) -> list[Row]:
        """The rows that have not begun."""
        return [entry.row for entry in self._entries]

    def without_room(self) -> list[Row]:
        """Those for which room is still to be made."""
        return [entry.row for entry in self._entries if not entry.has_room]

    def awaited(self) -> dict[Row, tuple[Row, int]]:
        """Who waits for whom, and for how many tokens of its prompt."""
        waits = ((each.row, each.awaited, each.awaited_tokens) for each in self._entries)
        return {row: (awaited.row, num_tokens) for row, awaited, num_tokens in waits if awaited is not None}

    def add(self, row: Row, *, has_room: bool) -> None:
        """Take a row in, and pin what it will start from."""
        self._entries.append(_Waiting(row, self._cache.pin(row), has_room))

    def make_way(self, missing_bytes: Callable[[Row, Sequence[Row]], float], *, is_beside_streams: bool) -> bool:
        """Evict kept KV for rows, one after the other, so many bytes for one before those behind it, or
        continue with evictions that no row waits for. Beside streams for a slice of time. Whether one more has room."""
        is_one_more = False
        waiting = [entry for entry in self._entries if not entry.has_room]
        if not waiting:
            with costs_no_row(self._report, NO_ROOM):
                self._cache.kv_room.evict_rest()
        for entry in self._entries if waiting else ():  # or what a row waited for makes way for it
            self._cache.pin_more(entry.pinned)
        for place, entry in enumerate(waiting, 1):
            num_bytes = missing_bytes(entry.row, [each.row for each in waiting[place:]])
            while not self._make_some(num_bytes):
                if is_beside_streams:
                    return is_one_more
            entry.has_room = is_one_more = True
        return is_one_more

    def _make_some(self, num_bytes: float) -> bool:
        """Whether a row may begin. Where evicting fails it begins with the room that there is."""
        may_begin = True
        with costs_no_row(self._report, NO_ROOM):
            may_begin = self._cache.kv_room.make_some(num_bytes)
        return may_begin

    def remove(self, row: Row) -> None:
        """Let go of what is pinned for a row: it has begun, or left. Nothing where it is not here."""
        for entry in [entry for entry in self._entries if entry.row is row]:
            self._entries.remove(entry)
            self._cache.let_go(entry.pinned)

    def forget(self) -> None:
        """Let go of what is pinned for rows of forgotten owners: they begin with what is left."""
        for entry in [each for each in self._entries if each.row.is_forgotten]:
            self._cache.let_go(entry.pinned)

    def discard(self, *, is_cache_kept: bool) -> None:
        """Drop all of them, and what is pinned for them unless the cache goes too."""
        entries, self._entries = self._entries, []
        if is_cache_kept:
            for entry in entries:
                self._cache.let_go(entry.pinned)

    def take_ready(self, prefills: PrefillPool, keep: Callable[[Prefill], None]) -> Iterator[Row]:
        """The rows that nothing keeps waiting. Each is held until the next one is asked for, so that it can begin.

        `prefills` are those in flight, these rows among them once they have begun; `keep` stores what one has at this
        very offset, where a row waits for it.
        """
        for step in self._ranks.each(READY, lambda: self._readied(prefills)):
            if step.what == "begin":
                yield step.row
                self.remove(step.row)
            elif step.what == "ask":
                self._ask(step.row)
            elif step.stop is not None:
                self._in_flight(step.row, prefills).cache_lease.add_stop(step.stop)
            else:
                keep(self._in_flight(step.row, prefills))

    def _readied(self, prefills: PrefillPool) -> Iterator[Readied]:
        """Who begins, and what is to be done for others before. Each step is taken before the next one is asked for."""
        for entry in list(self._entries):
            if self._is_restoring(entry):
                continue
            if not self._ranks.is_alone:
                yield Readied(entry.row, "ask")
                if not entry.is_restored:
                    continue
            awaits_row = yield from self._awaits_row(entry, prefills)
            if not awaits_row and entry.has_room:
                yield Readied(entry.row, "begin")

    def _ask(self, row: Row) -> None:
        """Note whether every rank has what this row waits for from its disk; rank 0 has it."""
        entry = next((each for each in self._entries if each.row is row), None)
        is_restored = self._ranks.is_following is False or entry is None or not self._is_restoring(entry)
        is_restored = self._ranks.all_agree("restored", is_restored)
        if entry is not None:
            entry.is_restored = is_restored

    def _in_flight(self, row: Row, prefills: PrefillPool) -> Prefill:
        """The prefill of a row. Raises RanksLost for one that only rank 0 has."""
        if (found := next((prefill for prefill in prefills if prefill.row is row), None)) is None:
            raise RanksLost(f"{self._ranks.place} is out of step: row {row.serial} is not prefilled here")
        return found

    def _awaits_row(self, entry: _Waiting, prefills: PrefillPool) -> Generator[Readied, None, bool]:
        """Whether a row in flight will have what this one needs. Asked anew once that row is there, or gone."""
        for prefill in prefills:
            awaited, num_done = prefill.cache_lease, prefill.num_done
            if awaited is entry.awaited and not awaited.lease.is_detached:
                # One that has come to that place and could not keep it, for want of room, will not have it later.
                is_to_come = awaited.lease.num_tokens < entry.awaited_tokens != num_done
                if is_to_come:
                    return True
        entry.awaited, entry.awaited_tokens = None, 0
        if (wait := self._wait_for(entry.row, prefills)) is None:
            return False
        prefill, num_tokens, stop = wait
        if stop is not None:
            yield Readied(prefill.row, "stop", stop)
        entry.row.has_waited_for_row = True
        if prefill.num_done == num_tokens:  # its state there is gone after its next chunk
            yield Readied(prefill.row, "keep")
            return False
        entry.awaited, entry.awaited_tokens = prefill.cache_lease, num_tokens
        self._tell(entry.row, prefill, num_tokens, prefills.chunk_length.tokens_per_second)
        return True

    def _wait_for(self, row: Row, prefills: PrefillPool) -> tuple[Prefill, int, Stop | None] | None:
        """The prefill that a row should wait for, up to which offset, and the stop that it is to make there."""
        partition, tokens = row.request.partition, tokens_of(row)
        shared = [
            prefill
            for prefill in prefills
            if not prefill.cache_lease.lease.is_detached and prefill.row.request.partition == partition
        ]
        if not shared:
            return None
        flights = [
            InFlight(
                prefill.cache_lease.prompt,
                prefill.num_done,
                prefill.cache_lease.lease.num_tokens,
                tuple(stop.offset for stop in prefill.cache_lease.stops),
            )
            for prefill in shared
        ]
        num_usable_tokens = self._cache.usable_tokens(tokens, partition)
        cache = self._cache
        wait = plan_wait(
            tokens,
            num_usable_tokens,
            flights,
            needs_checkpoints=cache.needs_checkpoints,
            cut_tokens=cache.cut_tokens,
        )
        if wait is None:
            return None
        if wait.is_new_stop:
            return shared[wait.row], wait.offset, Stop(wait.offset, "divergence")
        return shared[wait.row], wait.offset, None

    def _tell(self, row: Row, prefill: Prefill, num_tokens: int, rate: float | None) -> None:
        """Tell a row's client which row it waits for, and how long if no other row computes meanwhile."""
        num_left = num_tokens - prefill.num_done
        seconds = num_left / rate if rate else None
        row.handle.put(Awaiting(prefill.row.request.request_id, num_tokens, num_left, seconds))

    def _is_restoring(self, entry: _Waiting) -> bool:
        """Whether more of what it starts from is on its way from the disk, or the shared cache. What has come is
        progress."""
        before = entry.pinned.num_restored_tokens, entry.pinned.last_news_at
        is_restoring = is_known = False
        with costs_no_row(self._report, NOT_RESTORED):
            is_restoring = self._cache.is_restoring(entry.pinned)
            if (entry.pinned.num_restored_tokens, entry.pinned.last_news_at) > before:
                entry.row.note_progress()
            is_restoring |= self._cache.kv_moves.awaits_disk(entry.row, entry.pinned)
            entry.row.has_come_from_disk |= entry.pinned.num_restored_tokens > 0
            entry.row.has_come_from_shared |= entry.pinned.num_shared_tokens > 0
            entry.row.unshared = entry.row.unshared or entry.pinned.unshared
            is_known = True
        entry.pinned.is_settled |= not is_known
        return is_restoring and is_known
