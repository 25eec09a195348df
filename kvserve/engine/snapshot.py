"""Arrays <-> records: reads KV and states out of live caches, and builds live caches from what was kept.

Every leaf cache of a row has a form (`leaf_forms`): it is cut at any token, or kept as it is at one offset, or both of
it in parts (`pool_forms`), or not kept at all.

Cut leaves may be quantised from some token on (`quantised`). What is kept then has two forms, full precision up to
there and packed behind it, and a restored row has one: its first part is packed again, which gives the same rows.

What is kept never shares an array object with a live cache, because MLX's item assignment changes the object, and
never keeps a larger buffer alive than it needs.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from kvserve.engine.kv_buffers import KvArrays, flat_caches, held_arrays, settle, with_arrays, with_leaves
from kvserve.engine.leaf_forms import TOKEN_AXIS, LeafForm, forms_by_class
from kvserve.engine.quantised import PackedCache, Quantiser

type Attempt = Callable[[Callable[[], Any]], Any]
"""Does some work and returns what came of it: at a second try too, which the work allows."""


@dataclass(frozen=True, slots=True)
class KvSlice:
    """Keys and values of a run of tokens: per leaf of which rows are kept the arrays of keys, then of values.

    `rest` are the last of its tokens, where they are in the other form. `row_tokens`: for how many tokens each leaf has
    a row, which counts with the token that makes a group full; empty where that is one. Then `start`, the first token,
    says which rows these are.
    """

    leaves: tuple[KvArrays, ...]
    num_tokens: int
    num_bytes: int
    is_packed: bool = False
    rest: "KvSlice | None" = None
    start: int = 0
    row_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The leaves that cannot be cut, at exactly one offset: one detached cache object per leaf, without its pool."""

    leaves: tuple[Any, ...]
    num_bytes: int

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Self:
        """These leaves, computed."""
        arrays = held_arrays(list(leaves))
        mx.eval(arrays)
        return cls(tuple(leaves), sum(array.nbytes for array in arrays))


class CacheLayout:
    """Which leaves a model's caches have. Frozen; `read_*` never change the caches that they read."""

    def __init__(
        self,
        new_caches: Callable[[], list[Any]],
        quantiser: Quantiser | None = None,
        forms: Sequence[LeafForm] | None = None,
        *,
        has_states_elsewhere: bool = False,
    ) -> None:
        """`forms` as they were found on the model (`find_forms`); None: as classes say. `has_states_elsewhere`: other
        ranks have layers of the row that cannot be cut, so that it begins where these have a state."""
        self._new_caches = new_caches
        self._has_states_elsewhere = has_states_elsewhere
        self._quantiser = quantiser
        self._forms = tuple(forms) if forms is not None else forms_by_class(new_caches)
        row_tokens = tuple(form.row_tokens for form in self._forms if form.has_rows)
        self._row_tokens = row_tokens if any(count > 1 for count in row_tokens) else ()

    @property
    def is_cuttable(self) -> bool:
        """True when any prefix of a row can be restored from its segments alone."""
        return not self._has_states_elsewhere and not any(form.has_state for form in self._forms)

    def read_kv(self, caches: Sequence[Any], start: int, end: int, packed_from: int | None = None) -> KvSlice:
        """Copy the KV of the tokens `[start, end)` out of a row's caches. `packed_from` is where those are converted;
        None: where quantised KV starts.

        Raises ValueError where the caches do not have these tokens in the form in which they are kept.
        """
        if any(form.kind == "none" and getattr(leaf, "offset", 0) for leaf, form in self._with_forms(caches)):
            raise ValueError("A cache that no pass wrote at load holds tokens.")
        cut = [(leaf, form) for leaf, form in self._with_forms(caches) if form.has_rows]
        is_packed = any(isinstance(leaf, PackedCache) for leaf, _ in cut)
        border = None
        if self._quantiser is not None and cut:
            border = self._quantiser.start if packed_from is None else packed_from
        if border is not None and start < end and (start < border if is_packed else border < end):
            raise ValueError(f"The tokens [{start}, {end}) are not kept as they are: quantised KV starts at {border}.")
        leaves = tuple(_part_of(_kv_arrays(leaf, form, end), start, end, form.row_tokens) for leaf, form in cut)
        return _evaluated_slice(leaves, start, end, is_packed, self._row_tokens)

    def move_kv(
        self,
        caches: Sequence[Any],
        borders: Sequence[int],
        rest: Sequence[Sequence[Any]] = (),
        attempt: Attempt = lambda work: work(),
    ) -> list[KvSlice]:
        """The KV between neighbours of `borders`, in full precision. It leaves the caches layer by layer, so that no
        moment has more than one of them twice. `rest` are, for each leaf, those of the batch that the row has left, and
        of others who left with it: they have the row's buffers too until they are computed, as they are on the way.
        `attempt` does the work of a layer.

        Raises ValueError where the caches have lost it already.
        """
        cut = [position for position, form in enumerate(self._forms) if form.has_rows]
        own, empty = flat_caches(caches), flat_caches(self._new_caches())
        for position in cut:
            if self._forms[position].kind == "cut" and not _kv_arrays(own[position], self._forms[position], 0):
                raise ValueError("These caches have given their KV away.")
        layers = []
        for position in cut:
            leaf, form = own[position], self._forms[position]
            layers.append(attempt(partial(_parts_of, leaf, form, borders, rest[position] if rest else ())))
            _give_away(leaf, form, empty[position])
        spans = list(pairwise(borders))
        return [
            _evaluated_slice(tuple(parts[index] for parts in layers), start, end, False, self._row_tokens)
            for index, (start, end) in enumerate(spans)
        ]

    def read_state(self, caches: Sequence[Any]) -> StateSnapshot | None:
        """Copy the leaves that cannot be cut, at the caches' present offset; None where any prefix can be restored. An
        empty one marks where other ranks have theirs."""
        if self.is_cuttable:
            return None
        return StateSnapshot.of([_detached(leaf, form) for leaf, form in self._with_forms(caches) if form.has_state])

    def restore(
        self, pieces: Sequence[tuple[KvSlice, int, int]], state: StateSnapshot | None, num_next_tokens: int
    ) -> list[Any]:
        """Live caches from consecutive pieces (slice, first row, end row) and the state at their end.

        There is room for `num_next_tokens` more before a buffer has to grow.
        """
        caches = self._new_caches()
        if not pieces and state is None:
            return caches
        kept = iter(state.leaves if state is not None else ())
        plain = [piece for each in pieces for piece in _of_one_form(*each)]
        num_tokens = sum(end - start for _, start, end in plain)
        packer = self._quantiser if self._quantiser is not None and self._quantiser.is_due(num_tokens) else None
        cut_index = 0
        for position, (leaf, form) in enumerate(self._with_forms(caches)):
            if form.kind == "cut" and packer is not None and form.state_form is None:
                self._put_back(caches, position, _packed(packer, plain, cut_index, num_next_tokens))
            else:
                filled = self._put_back(caches, position, copy.deepcopy(next(kept))) if form.has_state else leaf
                if form.has_rows:
                    _fill(filled, form, [_rows(piece, cut_index) for piece in plain], num_next_tokens)
            cut_index += form.has_rows
        mx.eval(held_arrays(caches))
        return caches

    def restore_moved(
        self,
        pieces: list[tuple[KvSlice, int, int]],
        state: StateSnapshot | None,
        num_next_tokens: int,
        attempt: Attempt = lambda work: work(),
    ) -> list[Any]:
        """The same in full precision of pieces that no other row needs. The list is emptied, and what it alone held
        goes layer by layer, before the next one is filled. `attempt` does the work of a layer."""
        caches = self._new_caches()
        num_layers = len(pieces[0][0].leaves) if pieces else 0
        layers = [[_rows(piece, index) for piece in pieces] for index in range(num_layers)]
        pieces.clear()
        kept = iter(state.leaves if state is not None else ())
        layers.reverse()
        for position, (leaf, form) in enumerate(self._with_forms(caches)):
            filled = self._put_back(caches, position, attempt(partial(_twin, next(kept)))) if form.has_state else leaf
            if form.has_rows and layers:
                attempt(partial(_fill_at_once, filled, form, layers[-1], num_next_tokens))
                layers.pop()
        return caches

    def _with_forms(self, caches: Sequence[Any]) -> list[tuple[Any, LeafForm]]:
        return list(zip(flat_caches(caches), self._forms, strict=True))

    def _put_back(self, caches: list[Any], position: int, new: Any) -> Any:
        """Put a leaf in the place of the fresh one, also inside a list of caches; it."""
        fresh = flat_caches(caches)[position]
        caches[:] = with_leaves(caches, lambda leaf: new if leaf is fresh else leaf)
        return new


def merged(slices: Sequence[tuple[KvSlice, int, int]]) -> KvSlice:
    """One slice of consecutive pieces (slice, first row, end row): what coalescing small segments makes."""
    plain = [piece for each in slices for piece in _of_one_form(*each)]
    whole: KvSlice | None = None
    for is_packed, pieces in groupby(reversed(plain), lambda piece: piece[0].is_packed):
        whole = _joined(list(reversed(list(pieces))), is_packed, whole)
    if whole is None:
        raise ValueError("There is nothing to join.")
    return whole


def _joined(pieces: Sequence[tuple[KvSlice, int, int]], is_packed: bool, rest: KvSlice | None) -> KvSlice:
    """One slice of pieces of one form, and the rest behind them."""
    leaves = tuple(
        tuple(  # contiguous: of a single piece the concatenation is a view that keeps its whole buffer alive
            mx.contiguous(mx.concatenate(list(parts), axis=TOKEN_AXIS))
            for parts in zip(*_filled(_rows(piece, i) for piece in pieces), strict=True)
        )
        for i in range(len(pieces[0][0].leaves))
    )
    first, start, _ = pieces[0]
    begin = first.start + start
    end = begin + sum(end - start for _, start, end in pieces)
    joined = _evaluated_slice(leaves, begin, end, is_packed, first.row_tokens)
    if rest is None:
        return joined
    num_tokens, num_bytes = joined.num_tokens + rest.num_tokens, joined.num_bytes + rest.num_bytes
    return replace(joined, num_tokens=num_tokens, num_bytes=num_bytes, rest=rest)


def _of_one_form(kv: KvSlice, start: int, end: int) -> Iterator[tuple[KvSlice, int, int]]:
    """The rows `[start, end)` of a slice as pieces without a rest."""
    if kv.rest is None:
        if start < kv.num_tokens:
            yield kv, start, min(end, kv.num_tokens)
        return
    num_own = kv.num_tokens - kv.rest.num_tokens
    if start < num_own:
        yield replace(kv, num_tokens=num_own, rest=None), start, min(end, num_own)
    if end > num_own:
        yield from _of_one_form(kv.rest, max(start - num_own, 0), end - num_own)


def _evaluated_slice(
    leaves: tuple[KvArrays, ...], start: int, end: int, is_packed: bool, row_tokens: tuple[int, ...]
) -> KvSlice:
    mx.eval(leaves)
    num_bytes = sum(array.nbytes for leaf in leaves for array in leaf)
    return KvSlice(leaves, end - start, num_bytes, is_packed, start=start if row_tokens else 0, row_tokens=row_tokens)


def _part_of(rows: KvArrays, start: int, end: int, row_tokens: int) -> KvArrays:
    """Of a leaf's rows those of the tokens `[start, end)`, copied."""
    return tuple(mx.contiguous(array[..., start // row_tokens : end // row_tokens, :]) for array in rows)


def _filled(pieces: Iterable[KvArrays]) -> list[KvArrays]:
    """Those that have rows: before its first group is full a pool has none."""
    return [rows for rows in pieces if rows]


def _kv_arrays(leaf: Any, form: LeafForm, num_wanted: int) -> KvArrays:
    """The rows of a leaf; none where it is empty. Raises ValueError where it has fewer than are wanted: a slice would
    be short, or of places that hold nothing yet, and nobody would see it."""
    reader = form.state_form or form.pool_form
    rows = reader.rows(leaf) if reader is not None else _plain_rows(leaf)
    num_held = leaf.offset if reader is None else form.row_tokens * rows[0].shape[TOKEN_AXIS] if rows else 0
    if num_held < num_wanted - num_wanted % form.row_tokens:
        raise ValueError(f"A cache of {type(leaf).__name__} holds {num_held} of {num_wanted} tokens.")
    return rows


def _plain_rows(leaf: Any) -> KvArrays:
    if isinstance(leaf, PackedCache):
        return leaf.rows
    return () if leaf.keys is None else (leaf.keys, leaf.values)


def _give_away(leaf: Any, form: LeafForm, fresh: Any) -> None:
    """Let go of the rows that a leaf holds."""
    if form.pool_form is not None:
        form.pool_form.give_away(leaf)
    elif form.state_form is None:
        leaf.keys = leaf.values = None
    else:
        vars(leaf).clear()
        vars(leaf).update(vars(fresh))


def _rows(piece: tuple[KvSlice, int, int], leaf_index: int) -> KvArrays:
    kv, start, end = piece
    if (start, end) == (0, kv.num_tokens):
        return kv.leaves[leaf_index]
    row_tokens = kv.row_tokens[leaf_index] if kv.row_tokens else 1
    first = kv.start // row_tokens
    start, end = ((kv.start + offset) // row_tokens - first for offset in (start, end))
    return tuple(array[..., start:end, :] for array in kv.leaves[leaf_index])


def _fill(leaf: Any, form: LeafForm, pieces: Sequence[KvArrays], room: int) -> None:
    """Give an empty leaf the rows of all pieces, in one copy, with room behind them where its class has any."""
    pieces = _filled(pieces)
    if not pieces:
        return
    if (reader := form.state_form or form.pool_form) is not None:
        reader.fill(leaf, _with_room(pieces, 0))
        return
    leaf.keys, leaf.values = _with_room(pieces, room)
    settle(leaf.keys, leaf.values)
    leaf.offset = sum(piece[0].shape[TOKEN_AXIS] for piece in pieces)


def _fill_at_once(leaf: Any, form: LeafForm, pieces: Sequence[KvArrays], room: int) -> None:
    """The same, and nothing of it is left to be computed."""
    _fill(leaf, form, pieces, room)
    mx.eval(held_arrays(leaf))


def _twin(leaf: Any) -> Any:
    """A copy of a kept leaf that is computed."""
    twin = copy.deepcopy(leaf)
    mx.eval(held_arrays(twin))
    return twin


def _parts_of(leaf: Any, form: LeafForm, borders: Sequence[int], rest: Sequence[Any]) -> list[KvArrays]:
    """The rows of a leaf between neighbours of `borders`, computed, and with them those of `rest`, but for leaves that
    have given theirs away."""
    arrays = _kv_arrays(leaf, form, borders[-1])
    parts = [_part_of(arrays, start, end, form.row_tokens) for start, end in pairwise(borders)]
    mx.eval(parts, held_arrays(list(rest)))
    return parts


def _packed(quantiser: Quantiser, pieces: Sequence[tuple[KvSlice, int, int]], leaf_index: int, room: int) -> Any:
    """A quantised leaf of pieces of both forms: those in full precision are packed once more, all in one go."""
    plain = [_rows(piece, leaf_index) for piece in pieces if not piece[0].is_packed]
    packed = [_rows(piece, leaf_index) for piece in pieces if piece[0].is_packed]
    if plain:
        keys, values = (mx.concatenate(list(parts), axis=TOKEN_AXIS) for parts in zip(*plain, strict=True))
        packed = [quantiser.scheme.pack(keys, values), *packed]
    rows = _with_room(packed, room)
    return PackedCache(quantiser.scheme, rows, sum(piece[0].shape[TOKEN_AXIS] for piece in packed))


def _with_room(pieces: Sequence[KvArrays], room: int) -> KvArrays:
    """The rows of all pieces, in one copy, with empty slots behind them."""
    arrays = []
    for parts in zip(*pieces, strict=True):
        shape = (*parts[0].shape[:TOKEN_AXIS], room, parts[0].shape[-1])
        arrays.append(mx.concatenate([*parts, mx.zeros(shape, parts[0].dtype)], axis=TOKEN_AXIS))
    return tuple(arrays)


def _detached_window(leaf: Any) -> Any:
    """The last `max_size` rows in temporal order: after a prefill chunk a window holds up to a chunk more."""
    held = () if leaf.keys is None else (leaf.keys, leaf.values)
    return window_of(leaf, *(mx.contiguous(leaf._temporal_order(each)[..., -leaf.max_size :, :]) for each in held))


def window_of(like: Any, *rows: mx.array) -> Any:
    """A sliding window like this one that holds these keys and values, in the order of time; or nothing."""
    window: Any = RotatingKVCache(like.max_size, like.keep)  # type: ignore[no-untyped-call]
    window.offset = like.offset
    if rows:
        window.keys, window.values, window._idx = *rows, rows[0].shape[TOKEN_AXIS]
    return window


def _detached(leaf: Any, form: LeafForm) -> Any:
    """A copy of a cache object whose arrays are copies of their own, so that no batch buffer stays alive; of one with a
    pool all but that."""
    if form.kind == "window":
        return _detached_window(leaf)
    return with_arrays(leaf, mx.contiguous) if form.pool_form is None else form.pool_form.rest(leaf)
