"""How the KV of a row gets into the prefix tree and out again: copied where both fit beside each other, else moved
where nobody else needs it.

    take_in    at a stop a copy; at the end of a row that holds its buffers alone they are given up, layer by layer
    take_over  what is kept of a prompt leaves the tree for the row, which gives it back at its end

While a row moves it is there once, and one layer twice. What a prefill could not keep at its stops is noted, with its
states, and kept at the end. Quantised KV is not moved. Belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from kvserve.cache.match import Match
from kvserve.cache.moving import Asker, Stand
from kvserve.cache.node import Lease, Node
from kvserve.cache.records import BoundaryKind, Extension
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine.cache_records import Tenancy
from kvserve.engine.disk_cache import DiskCache, Hold
from kvserve.engine.kv_room import KvRoom
from kvserve.engine.model import LoadedModel
from kvserve.engine.row_outline import owner_of, tokens_of, user_of
from kvserve.engine.rows import Row
from kvserve.engine.snapshot import CacheLayout, KvSlice, StateSnapshot, merged

RECORD_TOKENS = 2048
"""What moves in becomes records of at most so many tokens: each can leave without a copy of the others."""


@dataclass(slots=True)
class _Aside:
    """What a row has beside its caches: its first `num_taken` tokens were kept before, `stands` are the places where
    it stopped, or others did, that are to be kept again with their states."""

    num_taken: int = 0
    stands: list[Stand] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states."""
        return sum(stand.state.num_bytes for stand in self.stands if stand.state is not None)


class Moving:
    """The way in and out of one model's prefix tree. `disk` tells the disk side, if there is one."""

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
        self._aside: dict[Lease, _Aside] = {}
        self.with_second_try: Callable[[Callable[[], Any]], Any] = lambda work: work()
        room.aside_bytes = lambda: self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of states that rows have beside their caches: they count as live."""
        return sum(aside.num_bytes for aside in self._aside.values())

    def let_go(self, lease: Lease) -> None:
        """The row is gone. Idempotent."""
        self._aside.pop(lease, None)

    def clear(self) -> None:
        """Forget all that rows have besides."""
        self._aside.clear()

    # --- out of the tree ----------------------------------------------------------------------------------------------

    def planned_bytes(self, row: Row, restorable_bytes: float, known: Callable[[], int]) -> float:
        """How much of what is kept a row would take over where it may stand on so much of it: 0 where all of it fits
        beside the row, or others need it. `known` tells how much is kept, also on disk, which costs a walk."""
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

    def nodes(self, row: Row, match: Match, lease: Lease | None = None) -> list[Node]:
        """What leaves the tree for a row that begins now, deepest first; nothing where it fits beside the row, where
        others need it, or the disk still reads it from RAM."""
        if not row.moved_bytes or self._sizes.kept(0, match.num_usable_tokens) <= row.restorable_bytes:
            return []
        nodes = self._nodes(row, match, row.restorable_bytes, lease)
        return [] if self._tree.mover.unwritten(nodes) else nodes

    def _nodes(self, row: Row, match: Match, restorable_bytes: float, lease: Lease | None = None) -> list[Node]:
        def may_stay(num_tokens: int) -> bool:
            return self._sizes.kept(0, num_tokens) <= restorable_bytes

        return self._tree.mover.nodes(match, Asker(owner_of(row), user_of(row)), may_stay, lease)

    def awaits_disk(self, row: Row, hold: Hold) -> bool:
        """Whether a row that is to take KV over must wait, as the disk still reads it from RAM: then it would be there
        twice. Not for ever."""
        if not row.moved_bytes or hold.is_stalled:
            return False
        match = self._tree.peek(tokens_of(row), partition=row.request.partition)
        return self._tree.mover.unwritten(self._nodes(row, match, row.restorable_bytes, hold.lease))

    def take_over(self, row: Row, match: Match, lease: Lease, nodes: Sequence[Node], num_next_tokens: int) -> list[Any]:
        """Live caches from what is kept, of which `nodes` leave the tree; each layer's kept arrays go before the next
        one is filled. The lease stands on what stays."""
        taken = self._tree.mover.take(match, lease, nodes)
        pieces: list[tuple[KvSlice, int, int]] = [
            (piece.payload, piece.first_row, piece.end_row)  # type: ignore[misc]
            for piece in taken.pieces
            if piece.payload is not None
        ]
        taken.pieces.clear()
        state: Any = match.state.payload if match.state is not None else None
        aside = self._aside[lease] = _Aside(match.num_usable_tokens)
        left_bytes = row.restorable_bytes - self._sizes.kept(0, taken.start)
        for stand in reversed(taken.stands):
            left_bytes -= stand.state.num_bytes if stand.state is not None else 0
            if left_bytes >= 0:
                aside.stands.insert(0, stand)
        return self._layout.restore_moved(pieces, state, num_next_tokens, self.with_second_try)

    # --- into the tree ------------------------------------------------------------------------------------------------

    def take_in(
        self,
        tenancy: Tenancy,
        tokens: TokenSequence,
        caches: Sequence[Any],
        end: int,
        kind: BoundaryKind,
        *,
        rest: Sequence[Any] | None = None,
    ) -> bool:
        """Keep the KV of a row up to `end`. `rest`: the row is at its end, and nobody else holds its buffers but these
        leaves of the batch that it was in. Whether they were given up for it.

        Room is made first: the tier is never above its budget, but for what goes through RAM to the disk.
        """
        lease, room = tenancy.lease, self._room
        if lease.is_detached:  # it leaves nothing, and nothing leaves for it
            return False
        start, has_disk, aside = lease.num_tokens, self._disk() is not None, self._aside.get(lease)
        num_bytes = self._sizes.kept(start, end) + (aside.num_bytes if aside is not None else 0)
        is_free = room.left().fits(num_bytes, self._sizes.fixed)
        if not tenancy.may_evict and not is_free:
            return False
        # A copy that would cost what is kept is made only where the row cannot move for less.
        is_moved = rest is not None and not is_free and self._makes_way(lease, end, has_disk=has_disk, has_all=True)
        if not is_moved and tenancy.may_evict and room.could_take(num_bytes, has_disk=has_disk):
            room.make(num_bytes)
        if not is_moved and room.takes(num_bytes, has_disk=has_disk):
            extension = self._copied(tenancy, tokens, caches, end, kind)
        elif rest is not None and (is_moved := is_moved or self._makes_way(lease, end, has_disk=has_disk)):
            extension = self._moved(tenancy, tokens, caches, rest, end, kind)
        else:
            self._miss(tenancy, caches, end, kind, is_over=rest is not None)
            return False
        self._tell_disk(tenancy, start, extension)
        return is_moved

    def give_up(self, tenancy: Tenancy, tokens: TokenSequence, caches: Sequence[Any], rest: Sequence[Any] = ()) -> bool:
        """The row is gone and leaves no answer, but what it took over is kept again, and its prompt up to the last stop
        that it came to. Whether its caches were given up for it."""
        lease, aside = tenancy.lease, self._aside.get(tenancy.lease, _Aside())
        num_prompt_tokens = len(tenancy.row.request.prompt)
        ends = [0 if self._needs_checkpoints else aside.num_taken]
        ends += [stand.offset for stand in aside.stands if stand.offset <= num_prompt_tokens]
        end = max(ends)
        if end <= lease.num_tokens or lease.is_detached:
            return False
        start = lease.num_tokens
        aside.stands = [stand for stand in aside.stands if stand.offset <= end]
        has_disk, num_vital = self._disk() is not None, int(self._needs_checkpoints)
        if not self._makes_way(lease, end, has_disk=has_disk, num_vital=num_vital):
            return False
        self._tell_disk(tenancy, start, self._moved(tenancy, tokens, caches, rest, end, "stride", has_state=False))
        return True

    def _copied(
        self, tenancy: Tenancy, tokens: TokenSequence, caches: Sequence[Any], end: int, kind: BoundaryKind
    ) -> Extension:
        packed_from, lease = self._model.packed_from(tokens.images), tenancy.lease

        def take_rows(first: int, last: int) -> KvSlice:
            return self._layout.read_kv(caches, first, last, packed_from)

        start, first_new = lease.num_tokens, end
        if (aside := self._aside.get(lease)) is not None:  # what did not fit at earlier stops
            while aside.stands:
                stand = aside.stands[0]
                if lease.num_tokens < stand.offset < end and stand.state is not None:
                    first_new = min(first_new, self._stand(lease, tokens, stand, take_rows).first_new)
                del aside.stands[0]  # not before: where an allocation fails all of this is tried once more
        take_state: Any = (lambda: self._layout.read_state(caches)) if self._needs_checkpoints else None
        extension = self._tree.extend(lease, tokens, end, take_rows, take_state, kind)
        return replace(extension, start=start, first_new=min(first_new, extension.first_new))

    def _makes_way(
        self, lease: Lease, end: int, *, has_disk: bool, num_vital: int = 0, has_all: bool = False
    ) -> bool:
        """Whether what is kept may have a row's KV up to `end` in the place of the row: beside both there is one state,
        and a layer, which is counted with the row. Its oldest states go where they are too much, but for `num_vital` of
        them (`has_all`: all)."""
        if not self._can_move:
            return False
        room, aside, fixed_bytes = self._room, self._aside.get(lease, _Aside()), self._sizes.fixed
        num_bytes = self._sizes.kept(lease.num_tokens, end)

        def fits(asks: Callable[..., bool]) -> bool:
            return asks(fixed_bytes, has_disk=has_disk, num_moved_bytes=num_bytes + aside.num_bytes)

        while not has_all and len(aside.stands) > num_vital and not fits(room.could_take):
            del aside.stands[0]
        if not fits(room.could_take):
            return False
        room.make(fixed_bytes)
        return fits(room.takes)

    def _moved(
        self,
        tenancy: Tenancy,
        tokens: TokenSequence,
        caches: Sequence[Any],
        rest: Sequence[Any],
        end: int,
        kind: BoundaryKind,
        *,
        has_state: bool = True,
    ) -> Extension:
        """Give the caches up and keep what they held, in records of some length, with the states of its stops."""
        lease = tenancy.lease
        start = lease.num_tokens
        stands = self._stands(tenancy, start, end)
        borders = [start, *(stand.offset for stand in stands), end]
        slices = self._layout.move_kv(caches, borders, rest, self.with_second_try)
        if has_state:
            state = None
            if self._needs_checkpoints:
                state = self.with_second_try(lambda: self._layout.read_state(caches))
            stands.append(Stand(end, kind, state))
        else:
            known = (each for each in self._aside.get(lease, _Aside()).stands if each.offset == end)
            stands.append(next(known, Stand(end, kind, None)))
        self.let_go(lease)
        first_new, is_new = end, False
        slices.reverse()
        for stand in stands:
            take_rows = partial(_rows_of, slices.pop(), lease.num_tokens)
            extension = self.with_second_try(partial(self._stand, lease, tokens, stand, take_rows))
            first_new, is_new = min(first_new, extension.first_new), is_new or extension.has_new_checkpoint
        return Extension(start, first_new, end, is_new)

    def _stand(
        self, lease: Lease, tokens: TokenSequence, stand: Stand, take_rows: Callable[[int, int], KvSlice]
    ) -> Extension:
        state = stand.state
        take_state = None if state is None else (lambda: state)
        return self._tree.extend(lease, tokens, stand.offset, take_rows, take_state, stand.kind)

    def _stands(self, tenancy: Tenancy, start: int, end: int) -> list[Stand]:
        """Where what moves in is divided: at stops, with states where these are needed, else where the answer begins,
        which may be retracted, and after so many tokens."""
        aside, prompt_end = self._aside.get(tenancy.lease, _Aside()), tenancy.row.answer_start
        known = {stand.offset: stand for stand in aside.stands if start < stand.offset < end}
        if self._needs_checkpoints:
            known = {offset: stand for offset, stand in known.items() if stand.state is not None}
        elif start < prompt_end < end:
            known.setdefault(prompt_end, Stand(prompt_end, "stride", None))
        borders = [start, *sorted(known), end]
        for first, last in pairwise(borders):
            for offset in range(first + RECORD_TOKENS, last, RECORD_TOKENS):
                known[offset] = Stand(offset, "stride", None)
        return [known[offset] for offset in sorted(known)]

    def _miss(self, tenancy: Tenancy, caches: Sequence[Any], end: int, kind: BoundaryKind, *, is_over: bool) -> None:
        """What does not fit beside the row is kept at its end. The state is there only now."""
        lease, sizes = tenancy.lease, self._sizes
        if is_over or not self._can_move:
            self._room.note_not_kept()
            return
        aside = self._aside.setdefault(lease, _Aside())
        if any(stand.offset == end for stand in aside.stands):
            return
        state: StateSnapshot | None = None
        if self._needs_checkpoints:
            if not self._room.could_take(sizes.fixed, has_disk=True):
                return
            self._room.make(sizes.fixed)
            if not self._room.takes(sizes.fixed, has_disk=True):
                return
            state = self._layout.read_state(caches)
        aside.stands.append(Stand(end, kind, state))

    def _tell_disk(self, tenancy: Tenancy, start: int, extension: Extension) -> None:
        if (disk := self._disk()) is not None:
            if extension.num_new_tokens or extension.has_new_checkpoint:
                disk.writing.save_end(tenancy.lease, start)
            else:
                disk.writing.note_users(tenancy.lease)
        tenancy.row.note_kept(extension.first_new, extension.end)


def _rows_of(kv: KvSlice, begin: int, first: int, last: int) -> KvSlice:
    """The rows of these tokens, of a slice that begins at `begin`: all of them, unless others had some meanwhile."""
    return kv if first == begin else merged([(kv, first - begin, last - begin)])
