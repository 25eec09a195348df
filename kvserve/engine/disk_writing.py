"""Writes what is new in RAM to disk: behind, and waited for only where RAM evicts it, or at the end.

It belongs to the engine thread. A disk that does not keep up costs a moment now and then, never a request.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvserve.cache.disk_records import Entry, Found
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.kept_path import EvictedNodes, KeptPart, KeptPath
from kvserve.cache.node import Lease
from kvserve.cache.records import BoundaryKind, Copy
from kvserve.cache.tree import PrefixTree
from kvserve.engine.blobs import NotStorable, encode_kv, encode_state, since
from kvserve.engine.borders import costs_the_disk_only
from kvserve.engine.snapshot import KvSlice, StateSnapshot, merged

IDLE_WAIT_SECONDS = 0.02

MAX_CHAIN = 16
"""So many states are read one after the other at most, to have the windows of the last."""

KINDS: frozenset[BoundaryKind] = frozenset({"system", "user", "answer", "stride"})
"""Ends whose states are written: those that requests come back to whatever else they change, and what is far from any
end. A state is as large as thousands of tokens of KV, and in a tool loop a prefill stops at the ends of several
messages, where RAM keeps one each."""

STRIDE_TOKENS = 8192
"""So far from the last one any state is written."""

LEAVE_SECONDS = 2.0
"""So long an eviction from RAM may wait until the disk has it; streams pause meanwhile."""

LEAVE_WINDOW_SECONDS = 60.0
MAX_WAITS_SECONDS = 5.0
"""All such waits of one window together. A disk that did not make it in time is left alone for half a window."""


@dataclass(frozen=True, slots=True)
class Flush:
    """What the end has to write to disk, and how many bytes it has written by now; from any thread."""

    num_bytes: int
    num_written_bytes: Callable[[], int]


NOTHING_TO_FLUSH = Flush(0, lambda: 0)


def is_worth_writing(kind: BoundaryKind, num_tokens_behind: int, *, is_end: bool) -> bool:
    """Whether a state goes to disk that stands so many tokens behind the last one there. `is_end`: its path is left
    now, and nothing stands behind it."""
    return is_end or kind in KINDS or num_tokens_behind >= STRIDE_TOKENS


@dataclass(frozen=True, slots=True)
class _Unwanted:
    """Stands for the copy of a state that the disk is not to have: its eviction from RAM waits for nothing."""

    is_written: bool = True
    is_forgotten: bool = False


UNWANTED: Copy = _Unwanted()


class DiskWriting:
    """The writing side of one model's disk cache. `is_ram_lent`: RAM keeps what rows need now, nothing else;
    `make_some_room` evicts from RAM for a slice of time, and says whether so many bytes fit or nothing can be
    evicted."""

    def __init__(
        self, tier: DiskTier, tree: PrefixTree, *, is_ram_lent: bool, make_some_room: Callable[[float], bool]
    ) -> None:
        self._tier = tier
        self._tree = tree
        self._is_ram_lent = is_ram_lent
        self._make_some_room = make_some_room
        self._is_storable = True
        self._num_left_bytes = 0
        self._patient_from = self._window_ends_at = self._waited_seconds = 0.0
        tree.before_eviction(self.secure)

    def save_end(self, lease: Lease, behind: int) -> None:
        """Put what a row has added behind so many tokens, in time that does not depend on what lies before."""
        if (path := self._end_of(lease, behind)) is not None:
            self.save(path, behind)

    def note_users(self, lease: Lease) -> None:
        """Note on disk that a row used its path, where it added nothing."""
        if (path := self._end_of(lease, lease.num_tokens)) is not None:
            self._tier.note_users(path)

    def _end_of(self, lease: Lease, behind: int) -> KeptPath | None:
        """What the disk lacks of a row's path; all of it where the disk has lost what that follows."""
        path = self._tree.kept_end(lease, behind)
        is_cut_off = path is not None and self._tier.index.find(path.run, path.chain, path.above).depth < path.run.start
        return self._tree.kept(lease) if is_cut_off else path

    def save(self, path: KeptPath, behind: int, until: float = 0.0, *, is_end: bool = False) -> bool:
        """Put what the disk lacks of a path into the queue, as far as it is worth it; whether nothing was refused. What
        lies before `behind` has been put before, and only counts if what comes later cannot stand without it. A queue
        that is full is waited for, `until` then (`time.monotonic`). `is_end`: the path is left where it ends."""
        is_put = self._is_storable and self._put(path, behind, until, is_end=is_end)
        self._tier.note_users(path)
        return is_put

    def _put(self, path: KeptPath, behind: int, until: float, *, is_end: bool) -> bool:
        found = self._tier.index.find(path.run, path.chain, path.above)
        states = {step.end: step.checkpoint for step in found.steps if step.checkpoint is not None}
        above: Sequence[Copy] = [step.segment for step in found.steps] or path.above
        first = min(behind, found.depth + 1)
        parts = [part for part in path.parts if part.piece.end >= first]
        for part, known in zip(parts, _covering(found, parts), strict=True):
            start, rows = max(part.piece.start, found.depth), tuple[Copy, ...](known)
            if part.piece.end > found.depth:
                if (entry := self._save_rows(path, part, start, until, above)) is None:
                    return False
                rows = above = (*rows, entry)
            part.copies.rows = rows
            if (state := states.get(part.piece.end)) is not None:
                part.copies.state = state
            elif not self._is_worth(part, is_end=is_end and part is parts[-1]):
                part.copies.state = UNWANTED if part.state is not None else None
            elif not self._save_state(path, part, until):
                return False
        return True

    def _is_worth(self, part: KeptPart, *, is_end: bool) -> bool:
        """Whether there is a state that the disk is to have."""
        if part.state is None:
            return False
        _, num_tokens = self._tier.index.state_behind(part.copies.rows, part.piece.end)
        return is_worth_writing(part.state.checkpoint.kind, num_tokens, is_end=is_end)

    def save_lost(self) -> bool:
        """Idle work: put everything once more that was refused when there was no room. Whether there was anything."""
        if has_lost := self._tier.take_lost():
            self.save_kept()
        return has_lost

    def evict_written(self, num_bytes: int) -> None:
        """Where RAM is only lent: evict what no row uses, up to so many bytes, once all is on disk."""
        if not self._is_ram_lent or self._tree.num_ram_bytes == self._num_left_bytes:
            return
        if self._tier.is_settled:
            self._evict(num_bytes)
        else:
            self.save_lost()

    def await_ram(self, num_bytes: int) -> bool:
        """Idle work: the same, and wait a moment for the disk. Whether to ask again at once."""
        if not self._is_ram_lent or not self._tree.num_ram_bytes:
            return False
        if self._tier.is_settled:
            return not self._evict(num_bytes)
        self._tier.wait(IDLE_WAIT_SECONDS)
        return self._tier.is_writing

    def _evict(self, num_bytes: int) -> bool:
        """Whether all was evicted that could be."""
        if is_all := self._make_some_room(num_bytes):
            self._num_left_bytes = self._tree.num_ram_bytes
        return is_all

    def secure(self, leaving: EvictedNodes) -> None:
        """Wait a moment until the disk has all of what is evicted from RAM now. What it refuses is counted. What it has
        already is noted there, and costs nothing."""
        if not self._is_storable or self._tier.is_settled:
            return
        is_lost = self._tier.has_lost and not leaving.is_copied
        if not (is_lost or leaving.unwritten()):
            return
        with costs_the_disk_only(partial(self._tier.faults.add, "unwritable")):
            self._secure(leaving, is_lost=is_lost)

    def _secure(self, leaving: EvictedNodes, *, is_lost: bool) -> None:
        now = time.monotonic()
        patience_seconds = self._patience_seconds(now)
        until = now + patience_seconds
        # A queue without room is asked before the path is built: nothing of it could be put.
        is_put = not is_lost or (self._tier.can_take(leaving.num_bytes, until) and self.save(leaving.path(), 0, until))
        is_there = self._tier.await_written(leaving.unwritten(), until)
        self._tier.evicted_from_ram(leaving.unwritten())
        over = time.monotonic()
        self._waited_seconds += over - now
        if patience_seconds and over >= until and not (is_put and is_there):
            self._patient_from = over + LEAVE_WINDOW_SECONDS / 2
        if not is_put and not self._tier.is_full:  # a full disk is reported anyway
            self._tier.faults.add("behind", f"not within {LEAVE_SECONDS:g} s")

    def _patience_seconds(self, now: float) -> float:
        if now >= self._window_ends_at:
            self._window_ends_at, self._waited_seconds = now + LEAVE_WINDOW_SECONDS, 0.0
        left = 0.0 if now < self._patient_from else MAX_WAITS_SECONDS - self._waited_seconds
        return max(0.0, min(LEAVE_SECONDS, left))

    def num_unwritten_bytes(self) -> int:
        """How much RAM has that the disk has not, whether it was put or not. The tree must not change meanwhile."""
        num_bytes: dict[tuple[int, int], int] = {}  # paths share their beginnings
        for path in self._tree.kept_paths() if self._is_storable else ():
            found = self._tier.index.find(path.run, path.chain)
            with_state = {step.end for step in found.steps if step.checkpoint is not None}
            for part in path.parts:
                piece = part.piece
                state = part.state if self._is_worth(part, is_end=part is path.parts[-1]) else None
                start = max(piece.start, found.depth)
                if start < piece.end and isinstance(piece.payload, KvSlice):
                    share = (piece.end - start) / piece.payload.num_tokens
                    num_bytes[id(piece.payload), piece.end] = int(share * piece.payload.num_bytes)
                if state is not None and piece.end not in with_state and isinstance(state.payload, StateSnapshot):
                    num_bytes[id(state.payload), piece.end] = state.payload.num_bytes
        return sum(num_bytes.values()) + self._tier.stats().num_queued_bytes

    def save_kept(self, until: float = 0.0, *, is_end: bool = False) -> None:
        """Put everything that RAM has: at the end (`is_end`) as far as the disk takes it, `until` then."""
        for path in list(self._tree.kept_paths()):
            self.save(path, 0, until, is_end=is_end)

    def _save_rows(
        self, path: KeptPath, part: KeptPart, start: int, until: float, above: Sequence[Copy]
    ) -> Entry | None:
        """Put the rows from `start` on, which follow on what is in `above`; None where that was refused."""
        payload, end = part.piece.payload, part.piece.end
        if not isinstance(payload, KvSlice) or not self._tier.can_take(payload.num_bytes, until):
            return None
        first, last = start - part.piece.segment.tokens.start, part.piece.end_row
        is_copied = (first, last) != (0, payload.num_tokens)
        kv = merged([(payload, first, last)]) if is_copied else payload
        encoded = encode_kv(kv)
        entry = self._tier.index.add_segment(path.run, path.chain, start, end, part.kind or "stride", above)
        if entry is not None:
            self._tier.put(entry, *encoded, is_own=is_copied)
        return entry

    def _save_state(self, path: KeptPath, part: KeptPart, until: float) -> bool:
        """Whether there is no state here, or it is on its way."""
        if part.state is None or not isinstance(part.state.payload, StateSnapshot):
            return True
        if not self._tier.can_take(part.state.payload.num_bytes, until):
            return False
        base, num_tokens = self._tier.index.state_behind(part.copies.rows, part.piece.end)
        rest = None
        if base is not None and len(base.chain) < MAX_CHAIN:
            rest = since(part.state.payload, num_tokens)
        try:
            encoded = encode_state(rest or part.state.payload)
        except NotStorable as error:
            self._tier.faults.add("unsupported", error)
            self._is_storable = False  # without its states a row of this model cannot be restored
            return False
        kind = part.state.checkpoint.kind
        entry = self._tier.index.add_checkpoint(
            path.run, path.chain, part.piece.end, kind, part.copies.rows, base if rest is not None else None
        )
        if entry is not None:
            part.copies.state = entry
            self._tier.put(entry, *encoded, is_own=rest is not None)
        return True


def _covering(found: Found, parts: Sequence[KeptPart]) -> Iterator[tuple[Entry, ...]]:
    """For each of consecutive parts of a path the blobs that have its rows, or the first of them: in one pass."""
    first, steps = 0, found.steps
    for part in parts:
        while first < len(steps) and steps[first].end <= part.piece.start:
            first += 1
        last = first
        while last < len(steps) and steps[last].start < part.piece.end:
            last += 1
        yield tuple(dict.fromkeys(step.segment for step in steps[first:last]))
