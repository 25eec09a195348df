"""How the KV of a row gets into the prefix tree and out again: copied where both fit beside each other, else moved
where no other row needs it.

    restore        the kept KV of a prompt moves out of the tree to the row, which gives it back at its end
    insert         a row continues: a copy, or its boundary is deferred to the row's end
    insert_last    a row is over that holds its buffers alone: a copy, or they are given up, layer by layer
    insert_prompt  a row is over that leaves no answer: the same of what was restored, and of its prompt

While a row moves it is there once, and one layer twice. What a prefill could not keep at its stops is deferred, with
its states, and kept at the end. Quantised KV is not moved. Belongs to the engine thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from kvserve.cache.match import PrefixMatch
from kvserve.cache.move_nodes import Boundary, Requester
from kvserve.cache.node import Lease, Node
from kvserve.cache.records import BoundaryKind, Extension, KvPiece
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine.cache_records import CacheLease
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.kv_room import KvRoom
from kvserve.engine.model import LoadedModel
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.rows import Row, owner_of, tokens_of, user_of
from kvserve.engine.snapshot import CacheLayout, KvSlice, StateSnapshot, merged

RECORD_TOKENS = 2048
"""What moves in becomes records of at most so many tokens: each can be evicted without a copy of the others."""


@dataclass(slots=True)
class _Deferred:
    """What of a row is kept at its end: its first `num_restored_tokens` tokens were kept before, `boundaries` are the
    places where it stopped, or others did, with their states."""

    num_restored_tokens: int = 0
    boundaries: list[Boundary] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states."""
        return sum(each.state.num_bytes for each in self.boundaries if each.state is not None)


class KvMoves:
    """The way in and out of one model's prefix tree. `disk` gives the disk side, if there is one."""

    def __init__(
        self,
        tree: PrefixTree,
        layout: CacheLayout,
        model: LoadedModel,
        room: KvRoom,
        disk: Callable[[], DiskCache | None],
    ) -> None:
        self._tree = tree
        self._layout = layout
        self._model = model
        self._sizes = model.sizes
        self._room = room
        self._disk = disk
        self._needs_checkpoints = not layout.is_cuttable
        self._can_move = model.quantiser is None
        self._deferred: dict[Lease, _Deferred] = {}
        self.with_second_try: Callable[[Callable[[], Any]], Any] = lambda work: work()
        room.deferred_bytes = lambda: self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of states that rows have beside their caches: they count as live."""
        return sum(deferred.num_bytes for deferred in self._deferred.values())

    def let_go(self, lease: Lease) -> None:
        """Drop what is deferred for a lease: its row is gone. Idempotent."""
        self._deferred.pop(lease, None)

    def clear(self) -> None:
        """Forget all that is deferred."""
        self._deferred.clear()

    # --- out of the tree ----------------------------------------------------------------------------------------------

    def planned_bytes(self, row: Row, restorable_bytes: float, known: Callable[[], int]) -> float:
        """How much of the kept KV a row would take over where it may use so much of it: 0 where all of it fits beside
        the row, or others need it. `known` says how much is kept, also on disk, which costs a walk."""
        request, tokens = row.request, tokens_of(row)
        can_be_kept = self._can_move and self._model.cache_support.can_keep
        if not can_be_kept or request.ttl_seconds == 0 or row.is_forgotten or restorable_bytes < 0:
            return 0.0
        if self._sizes.kept(0, len(tokens)) <= restorable_bytes or self._sizes.kept(0, known()) <= restorable_bytes:
            return 0.0
        match = self._tree.peek(tokens, partition=request.partition)
        nodes = self._nodes(row, match, restorable_bytes)
        if nodes:
            return self._sizes.kept(nodes[-1].start, known())
        num_staying = match.num_usable_tokens  # the rest comes from the disk, and is this row's alone
        stays = not num_staying or self._sizes.kept(0, num_staying) <= restorable_bytes
        return self._sizes.kept(num_staying, known()) if stays else 0.0

    def nodes(self, row: Row, match: PrefixMatch, lease: Lease | None = None) -> list[Node]:
        """What moves out of the tree to a row that begins now, deepest first; nothing where it fits beside the row,
        where others need it, or the disk still reads it from RAM."""
        if not row.moved_bytes or self._sizes.kept(0, match.num_usable_tokens) <= row.restorable_bytes:
            return []
        nodes = self._nodes(row, match, row.restorable_bytes, lease)
        return [] if self._tree.mover.unwritten(nodes) else nodes

    def _nodes(self, row: Row, match: PrefixMatch, restorable_bytes: float, lease: Lease | None = None) -> list[Node]:
        def may_stay(num_tokens: int) -> bool:
            return self._sizes.kept(0, num_tokens) <= restorable_bytes

        return self._tree.mover.nodes(match, Requester(owner_of(row), user_of(row)), may_stay, lease)

    def awaits_disk(self, row: Row, pinned: PinnedPrefix) -> bool:
        """Whether a row that is to take KV over must wait, as the disk still reads it from RAM: then it would be there
        twice. Not for ever."""
        if not row.moved_bytes or pinned.is_stalled:
            return False
        match = self._tree.peek(tokens_of(row), partition=row.request.partition)
        return self._tree.mover.unwritten(self._nodes(row, match, row.restorable_bytes, pinned.lease))

    def restore(
        self, row: Row, match: PrefixMatch, lease: Lease, nodes: Sequence[Node], num_next_tokens: int
    ) -> list[Any]:
        """Live caches from what is kept, of which `nodes` move out of the tree; each layer's kept arrays go before the
        next one is filled. The lease stands on what stays."""
        extracted = self._tree.mover.extract(match, lease, nodes)
        pieces = slices_of(extracted.pieces)
        extracted.pieces.clear()
        state: Any = match.state.payload if match.state is not None else None
        deferred = self._deferred[lease] = _Deferred(match.num_usable_tokens)
        left_bytes = row.restorable_bytes - self._sizes.kept(0, extracted.start)
        for boundary in reversed(extracted.boundaries):
            left_bytes -= boundary.state.num_bytes if boundary.state is not None else 0
            if left_bytes >= 0:
                deferred.boundaries.insert(0, boundary)
        return self._layout.restore_moved(pieces, state, num_next_tokens, self.with_second_try)

    # --- into the tree ------------------------------------------------------------------------------------------------

    def insert(
        self, cache_lease: CacheLease, tokens: TokenSequence, caches: Sequence[Any], end: int, kind: BoundaryKind
    ) -> None:
        """Keep the KV of a row that continues, up to `end`.

        Room is made first: the tier is never above its budget, but for what goes through RAM to the disk.
        """
        if self._may_insert(cache_lease, end) and not self._insert_copy(cache_lease, tokens, caches, end, kind):
            self._defer(cache_lease.lease, caches, end, kind)

    def insert_last(
        self,
        cache_lease: CacheLease,
        tokens: TokenSequence,
        caches: Sequence[Any],
        end: int,
        kind: BoundaryKind,
        rest: Sequence[Any],
    ) -> bool:
        """The same of a row that is over: only it and the `rest` of its batch hold its buffers. Whether they
        were given up for it: where a copy would cost what is kept, and where there is no room for one.
        """
        if not self._may_insert(cache_lease, end):
            return False
        lease = cache_lease.lease
        num_deferred, is_free = len(self._deferred_of(lease).boundaries), self._is_free(lease, end)
        if is_free or not self._makes_way(lease, end, num_vital=num_deferred):
            if self._insert_copy(cache_lease, tokens, caches, end, kind):
                return False
            if not self._makes_way(lease, end):
                self._room.note_not_kept()
                return False

        def last() -> Boundary:
            state = self.with_second_try(lambda: self._layout.read_state(caches)) if self._needs_checkpoints else None
            return Boundary(end, kind, state)

        self._insert_moved(cache_lease, tokens, caches, rest, end, last)
        return True

    def insert_prompt(
        self, cache_lease: CacheLease, tokens: TokenSequence, caches: Sequence[Any], rest: Sequence[Any] = ()
    ) -> bool:
        """Keep nothing of an ended row's answer, but what had moved to it, and its prompt up to the
        last stop that it came to. Whether its caches were given up for it."""
        lease, deferred = cache_lease.lease, self._deferred_of(cache_lease.lease)
        num_prompt_tokens = len(cache_lease.row.request.prompt)
        ends = [0 if self._needs_checkpoints else deferred.num_restored_tokens]
        ends += [each.offset for each in deferred.boundaries if each.offset <= num_prompt_tokens]
        end = max(ends)
        if end <= lease.num_tokens or lease.is_detached:
            return False
        deferred.boundaries = [each for each in deferred.boundaries if each.offset <= end]
        if not self._makes_way(lease, end, num_vital=int(self._needs_checkpoints)):
            return False
        known = (each for each in self._deferred_of(lease).boundaries if each.offset == end)
        last = next(known, Boundary(end, "stride", None))
        self._insert_moved(cache_lease, tokens, caches, rest, end, lambda: last)
        return True

    def _deferred_of(self, lease: Lease) -> _Deferred:
        return self._deferred.get(lease, _Deferred())

    def _copied_bytes(self, lease: Lease, end: int) -> float:
        return self._sizes.kept(lease.num_tokens, end) + self._deferred_of(lease).num_bytes

    def _is_free(self, lease: Lease, end: int) -> bool:
        """Whether a copy fits beside the row and all that is kept."""
        return self._room.left().fits(self._copied_bytes(lease, end), self._sizes.fixed)

    def _may_insert(self, cache_lease: CacheLease, end: int) -> bool:
        if cache_lease.lease.is_detached:  # nothing of it is kept, and nothing is evicted for it
            return False
        return cache_lease.may_evict or self._is_free(cache_lease.lease, end)

    def _insert_copy(
        self, cache_lease: CacheLease, tokens: TokenSequence, caches: Sequence[Any], end: int, kind: BoundaryKind
    ) -> bool:
        """Make room for a copy of a row's KV up to `end`, and keep it; whether there was any. What was deferred is kept
        with it."""
        lease, room, has_disk = cache_lease.lease, self._room, self._disk() is not None
        num_bytes = self._copied_bytes(lease, end)
        if cache_lease.may_evict and room.could_take(num_bytes, has_disk=has_disk):
            room.make(num_bytes)
        if not room.takes(num_bytes, has_disk=has_disk):
            return False
        packed_from = self._model.packed_from(tokens.images)

        def take_rows(first: int, last: int) -> KvSlice:
            return self._layout.read_kv(caches, first, last, packed_from)

        start, first_new, deferred = lease.num_tokens, end, self._deferred_of(lease)
        while deferred.boundaries:
            boundary = deferred.boundaries[0]
            if lease.num_tokens < boundary.offset < end and boundary.state is not None:
                first_new = min(first_new, self._extend(lease, tokens, boundary, take_rows).first_new)
            del deferred.boundaries[0]  # not before: where an allocation fails all of this is tried once more
        take_state: Any = (lambda: self._layout.read_state(caches)) if self._needs_checkpoints else None
        extension = self._tree.extend(lease, tokens, end, take_rows, take_state, kind)
        first_new = min(first_new, extension.first_new)
        self._tell_disk(cache_lease, start, replace(extension, start=start, first_new=first_new))
        return True

    def _makes_way(self, lease: Lease, end: int, *, num_vital: int = 0) -> bool:
        """Whether what is kept may have a row's KV up to `end` in the place of the row: beside both there is one state,
        and a layer, which is counted with the row. Its oldest states go where they are too much, but for `num_vital` of
        them."""
        if not self._can_move:
            return False
        room, deferred, fixed_bytes = self._room, self._deferred_of(lease), self._sizes.fixed
        num_bytes, has_disk = self._sizes.kept(lease.num_tokens, end), self._disk() is not None

        def fits(asks: Callable[..., bool]) -> bool:
            return asks(fixed_bytes, has_disk=has_disk, num_moved_bytes=num_bytes + deferred.num_bytes)

        while len(deferred.boundaries) > num_vital and not fits(room.could_take):
            del deferred.boundaries[0]
        if not fits(room.could_take):
            return False
        room.make(fixed_bytes)
        return fits(room.takes)

    def _insert_moved(
        self,
        cache_lease: CacheLease,
        tokens: TokenSequence,
        caches: Sequence[Any],
        rest: Sequence[Any],
        end: int,
        last: Callable[[], Boundary],
    ) -> None:
        """Give the caches up and keep what they held, in records of some length, with the states of its stops. `last`
        gives the boundary at `end` once the KV has moved: there is room for its state then."""
        lease = cache_lease.lease
        start = lease.num_tokens
        boundaries = self._boundaries(cache_lease, start, end)
        offsets = [start, *(each.offset for each in boundaries), end]
        slices = self._layout.move_kv(caches, offsets, rest, self.with_second_try)
        boundaries.append(last())
        self.let_go(lease)
        first_new, is_new = end, False
        slices.reverse()
        for boundary in boundaries:
            take_rows = partial(_rows_of, slices.pop(), lease.num_tokens)
            extension = self.with_second_try(partial(self._extend, lease, tokens, boundary, take_rows))
            first_new, is_new = min(first_new, extension.first_new), is_new or extension.has_new_checkpoint
        self._tell_disk(cache_lease, start, Extension(start, first_new, end, is_new))

    def _extend(
        self, lease: Lease, tokens: TokenSequence, boundary: Boundary, take_rows: Callable[[int, int], KvSlice]
    ) -> Extension:
        state = boundary.state
        take_state = None if state is None else (lambda: state)
        return self._tree.extend(lease, tokens, boundary.offset, take_rows, take_state, boundary.kind)

    def _boundaries(self, cache_lease: CacheLease, start: int, end: int) -> list[Boundary]:
        """Where what moves in is divided: at stops, with states where these are needed, else where the answer begins,
        which may be retracted, and after so many tokens."""
        deferred, prompt_end = self._deferred_of(cache_lease.lease), cache_lease.row.answer_start
        known = {each.offset: each for each in deferred.boundaries if start < each.offset < end}
        if self._needs_checkpoints:
            known = {offset: each for offset, each in known.items() if each.state is not None}
        elif start < prompt_end < end:
            known.setdefault(prompt_end, Boundary(prompt_end, "stride", None))
        for first, last in pairwise([start, *sorted(known), end]):
            for offset in range(first + RECORD_TOKENS, last, RECORD_TOKENS):
                known[offset] = Boundary(offset, "stride", None)
        return [known[offset] for offset in sorted(known)]

    def _defer(self, lease: Lease, caches: Sequence[Any], end: int, kind: BoundaryKind) -> None:
        """Note what is to be kept at the row's end, as it does not fit beside it. The state is there only now."""
        fixed_bytes = self._sizes.fixed
        if not self._can_move:
            self._room.note_not_kept()
            return
        deferred = self._deferred.setdefault(lease, _Deferred())
        if any(each.offset == end for each in deferred.boundaries):
            return
        state: StateSnapshot | None = None
        if self._needs_checkpoints:
            if not self._room.could_take(fixed_bytes, has_disk=True):
                return
            self._room.make(fixed_bytes)
            if not self._room.takes(fixed_bytes, has_disk=True):
                return
            state = self._layout.read_state(caches)
        deferred.boundaries.append(Boundary(end, kind, state))

    def _tell_disk(self, cache_lease: CacheLease, start: int, extension: Extension) -> None:
        if (disk := self._disk()) is not None:
            if extension.num_new_tokens or extension.has_new_checkpoint:
                disk.writing.save_end(cache_lease.lease, start)
            else:
                disk.writing.note_users(cache_lease.lease)
        cache_lease.row.note_kept(extension.first_new, extension.end)


def slices_of(pieces: Iterable[KvPiece]) -> list[tuple[KvSlice, int, int]]:
    """The KV of a path's pieces: slices, and which rows of them."""
    payloads: Any = ((each.payload, each.first_row, each.end_row) for each in pieces)
    return [each for each in payloads if each[0] is not None]


def _rows_of(kv: KvSlice, begin: int, first: int, last: int) -> KvSlice:
    """The rows of these tokens, of a slice that begins at `begin`: all of them, unless others had some meanwhile."""
    return kv if first == begin else merged([(kv, first - begin, last - begin)])
