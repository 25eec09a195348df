"""The buffers of keys and values: who makes room in time writes in place, else all that is there is copied. And what
mlx-lm's `BatchKVCache` does for rows that decode together in full precision, with as few copies as can be. It knows
arrays and mlx-lm's caches, nothing of requests.

A row that enters an empty batch hands its buffers over, with the room that they have. A row is read as a view: the
prefix cache copies the tokens that are new, and lets go of the view before the next step, which else could not write in
place. Rows are copied where a batch gains or loses rows, and where its room is used up.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from inspect import isroutine
from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache


def is_list(cache: Any) -> bool:
    """Whether a cache is a list of caches, of either library."""
    return isinstance(getattr(cache, "caches", None), list | tuple)


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """Every cache that is no list of caches, in order."""
    return [leaf for cache in caches for leaf in (flat_caches(cache.caches) if is_list(cache) else [cache])]


def with_leaves(caches: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The caches with every leaf changed, in lists of the kind in which they were."""
    return [type(cache)(*with_leaves(cache.caches, change)) if is_list(cache) else change(cache) for cache in caches]


def arrays_in(tree: Any) -> list[mx.array]:
    """All arrays in lists, tuples and dicts."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]  # type: ignore[str-unpack]


def with_arrays(value: Any, change: Callable[[mx.array], Any]) -> Any:
    """A copy of a cache, or of what one holds, with every array changed, however deep it lies: in lists, tuples, dicts
    and objects of its own. What it only refers to, a module or a function, stays the same object."""
    return _with_arrays(value, change, {})


def _with_arrays(value: Any, change: Callable[[mx.array], Any], known: dict[int, Any]) -> Any:
    if isinstance(value, mx.array):
        return change(value)
    if type(value) is dict:
        return {key: _with_arrays(each, change, known) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_arrays(each, change, known) for each in value)
    if isinstance(value, type | Module) or not hasattr(value, "__dict__") or isroutine(value):
        return value
    if id(value) not in known:
        twin = known[id(value)] = copy.copy(value)
        for name, each in vars(value).items():
            vars(twin)[name] = _with_arrays(each, change, known)
    return known[id(value)]


def held_arrays(value: Any) -> list[mx.array]:
    """All arrays that a cache holds, or a tree of caches does."""
    found: list[mx.array] = []

    def note(array: mx.array) -> mx.array:
        found.append(array)
        return array

    with_arrays(value, note)
    return found


type KvArrays = tuple[mx.array, ...]
"""Arrays of (rows, heads, tokens, width of their own): those of the keys, then as many of the values; or none."""

STEP_TOKENS = 256
"""Buffers that grow have a multiple of so many slots."""

GROWTH_SHARE = 32
"""A long one grows by this part of what it holds, so that an answer of any length copies its prompt a few times only;
the price is 3 % of memory."""

LARGE_BYTES = 2**21
"""Layers of short rows stay lazy, as mlx-lm has them: to wait for each costs running streams more than it saves. Of
others no moment has all of them twice."""


def num_slots(num_tokens: int) -> int:
    """How many slots a buffer gets that must hold so many tokens and had too few."""
    return (-(-num_tokens // STEP_TOKENS) + num_tokens // GROWTH_SHARE // STEP_TOKENS) * STEP_TOKENS


def with_room(array: mx.array, num_used: int, size: int) -> mx.array:
    """The first slots of (rows, heads, slots, width), copied once into a buffer of so many."""
    rows, heads, _, width = array.shape
    roomy = mx.zeros((rows, heads, size, width), array.dtype)
    roomy[..., :num_used, :] = array[..., :num_used, :]
    return roomy


def gathered(array: mx.array, keep: mx.array, start: int, end: int) -> mx.array:
    """These rows of (rows, heads, slots, width) without the slots before `start`, and with room for a few tokens behind
    `end`. Cut before they are gathered, as a view of what is gathered could not be written in place."""
    return mx.take(array[..., start : num_slots(end + 1), :], keep, axis=0)


def num_slots_ahead(num_tokens: int) -> int:
    """How many slots a buffer gets that holds so many tokens and is to have room for a step of growth: no more than is
    held ahead for each row."""
    return num_tokens + STEP_TOKENS + num_tokens // GROWTH_SHARE // STEP_TOKENS * STEP_TOKENS


def stacked(parts: Sequence[tuple[mx.array | None, int]], num_rows: Sequence[int], longest: int, size: int) -> mx.array:
    """Arrays of (rows, heads, slots, width), of which the first so many slots are used, below one another and
    right-aligned at `longest`, each copied once, with `size` slots."""
    form = next(array for array, _ in parts if array is not None)
    _, heads, _, width = form.shape
    joined = mx.zeros((sum(num_rows), heads, size, width), form.dtype)
    first = 0
    for (array, num_used), count in zip(parts, num_rows, strict=True):
        if array is not None and num_used:
            joined[first : first + count, :, longest - num_used : longest] = array[..., :num_used, :]
        first += count
    return joined


def _stacked_rows(parts: Sequence[tuple[KvArrays, int, int]], size: int | None = None) -> KvArrays:
    """The same for all arrays of parts (arrays, how many rows, how many slots of them are used); by default with room
    for a few tokens: where rows come and go, all of them are copied again then."""
    longest, num_rows = max(num_used for _, _, num_used in parts), [count for _, count, _ in parts]
    num_arrays = max(len(rows) for rows, _, _ in parts)
    size = num_slots(longest + 1) if size is None else size
    return tuple(
        stacked([(rows[index] if rows else None, num_used) for rows, _, num_used in parts], num_rows, longest, size)
        for index in range(num_arrays)
    )


def settle(*arrays: mx.array) -> None:
    """Compute large copies at once, before those of the next layer: what they are copied from can leave meanwhile."""
    if sum(array.nbytes for array in arrays) >= LARGE_BYTES:
        mx.eval(arrays)


class RightAligned:
    """Rows that decode together: arrays of (rows, heads, slots, width), in which every row ends at slot `_idx` and room
    follows. `offset` (rows,) is the number of tokens of each row, `left_padding` (rows,) what is missing to the longest
    one.

    A row whose newest tokens were dropped ends before the others: `gaps` says by how many slots, and is empty where all
    end at `_idx`. What is in the gap is never read, and the row's next tokens are written over it.
    """

    rows: KvArrays
    offset: mx.array
    left_padding: mx.array
    gaps: tuple[int, ...] = ()
    _idx: int

    def take_in(self, caches: Sequence[Any]) -> Self:
        """Begin with these rows, each by itself. A single one is handed over, and is empty then."""
        self.offset = mx.array([cache.offset for cache in caches])
        self._idx = max(cache.offset for cache in caches)
        self.left_padding = self._idx - self.offset
        if len(caches) == 1:
            [row] = caches
            self.rows, row.rows, row.offset = row.rows, (), 0
        else:
            self.rows = _stacked_rows([(cache.rows, 1, cache.offset) for cache in caches])
        return self

    def add(self, new: KvArrays) -> None:
        """Add tokens, arrays of (rows, heads, tokens, width), to each row's end: in place where there is room."""
        num_new = new[0].shape[2]
        end = self._idx + num_new
        self.rows = self.rows or tuple(array[..., :0, :] for array in new)
        self._grow(end)
        for array, added in zip(self.rows, new, strict=True):
            if not self.gaps:
                array[..., self._idx : end, :] = added
            for row, gap in enumerate(self.gaps):
                array[row : row + 1, :, self._idx - gap : end - gap, :] = added[row : row + 1]
        self.offset = self.offset + num_new
        self._idx = end

    def cut(self, num_dropped: Sequence[int]) -> None:
        """Drop each row's newest tokens, so many of each. Nothing moves."""
        gaps = [gap + num for gap, num in zip(self.gaps or (0,) * self.num_rows, num_dropped, strict=True)]
        num_less = min(gaps)
        self.gaps = tuple(gap - num_less for gap in gaps) if max(gaps) > num_less else ()
        self.offset = self.offset - mx.array(list(num_dropped))
        self._idx -= num_less

    def align(self) -> None:
        """Let all rows end at one slot again: each is copied once. Nothing where they do. A row that is shorter than
        the longest may grow faster, so the room behind it is for as many tokens as a step of growth has: with less,
        rows would be copied again after each few tokens before a buffer's end."""
        if self.gaps:
            parts = self._parts(range(self.num_rows))
            self._stack(parts, num_slots_ahead(max(num_used for _, _, num_used in parts)))
            settle(*self.rows)

    def uneven_mask(self, num_tokens: int, window_size: int | None = None) -> mx.array:
        """Which slots each of so many new tokens sees, (rows, 1, tokens, slots), where rows end at unequal ones: those
        of its row up to its own."""
        starts, ends = (each[:, None, None, None] for each in (self.left_padding, self.left_padding + self.offset))
        slots, places = mx.arange(self._idx + num_tokens), ends + mx.arange(num_tokens)[:, None]
        mask = (slots >= starts) & (slots <= places)
        return mask if window_size is None else mask & (places < slots + window_size)

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, and no slot that only padding needs. Where all stay nothing moves."""
        keep = [int(index) for index in batch_indices]
        chosen = mx.array(keep)
        num_spare = int(mx.min(self.left_padding[chosen]).item())  # type: ignore[arg-type]
        is_whole = keep == list(range(self.num_rows))
        if is_whole and (num_spare == 0 or self.gaps):
            return
        if self.gaps:
            self.offset = self.offset[chosen]
            self._stack(self._parts(keep))
            return
        self.rows = tuple(gathered(array, chosen, num_spare, self._idx) for array in self.rows)
        self.left_padding = self.left_padding[chosen] - num_spare
        self.offset = self.offset[chosen]
        self._idx -= num_spare

    def extend(self, other: Self) -> None:
        """Take the rows of another batch in, which is empty then; the shorter ones are padded."""
        parts = [part for each in (self, other) for part in each._parts(range(each.num_rows))]
        self.offset = mx.concatenate([self.offset, other.offset])
        self._stack(parts)
        other.rows = ()
        settle(*self.rows)

    def row(self, index: int) -> tuple[KvArrays, int]:
        """One row and its length, not copied: a view without room, which shows what the row holds now whatever is
        written later."""
        start = int(self.left_padding[index].item())  # type: ignore[arg-type]
        end = self._idx - (self.gaps[index] if self.gaps else 0)
        return tuple(array[index : index + 1, :, start:end] for array in self.rows), end - start

    def take_out(self) -> Any:
        """The only row as a cache of its own: see `only_row`."""
        raise NotImplementedError

    def only_row(self) -> tuple[KvArrays, int]:
        """The one row of a batch that has no other, and its length: handed over with the room that it has, so that the
        batch is empty. Else as `row`."""
        if self.num_rows > 1 or int(self.left_padding[0].item()):  # type: ignore[arg-type]
            return self.row(0)
        rows, self.rows = self.rows, ()
        return rows, self._idx

    @property
    def num_rows(self) -> int:
        return self.left_padding.size

    @property
    def num_slots(self) -> int:
        """How many slots the buffers have."""
        return self.rows[0].shape[2] if self.rows else 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return not self.rows

    def _grow(self, end: int) -> None:
        """Let the buffers reach to this slot at least."""
        if end > self.num_slots:
            self.rows = tuple(with_room(array, self._idx, num_slots(end)) for array in self.rows)
            settle(*self.rows)

    def _parts(self, keep: Sequence[int]) -> list[tuple[KvArrays, int, int]]:
        """What is stacked of these rows, all in order: as they are where they end together, else each by itself."""
        if not self.gaps:
            return [(self.rows, self.num_rows, self._idx)]
        return [(rows, 1, length) for rows, length in map(self.row, keep)]

    def _stack(self, parts: Sequence[tuple[KvArrays, int, int]], size: int | None = None) -> None:
        """Hold the rows of these parts, whose lengths `offset` has, all of which end at one slot: see `stacked`."""
        self.rows = _stacked_rows(parts, size)
        self._idx = max(num_used for _, _, num_used in parts)
        self.left_padding, self.gaps = self._idx - self.offset, ()


class _Plain:
    """`rows` of a cache of mlx-lm's that has keys and values in full precision."""

    keys: Any
    values: Any

    @property
    def rows(self) -> KvArrays:
        return () if self.keys is None else (self.keys, self.values)

    @rows.setter
    def rows(self, rows: KvArrays) -> None:
        self.keys, self.values = rows or (None, None)


class RowKv(_Plain, KVCache):
    """A row on its way into a batch: mlx-lm merges caches by their own class."""

    @classmethod
    def of(cls, cache: KVCache) -> Self:
        """The same keys and values. `cache` is empty then."""
        row = cls()
        row.keys, row.values, row.offset = cache.keys, cache.values, cache.offset
        cache.keys = cache.values = None
        cache.offset = 0
        return row

    @classmethod
    def merge(cls, caches: "Sequence[RowKv]") -> "BatchKv":
        """What mlx-lm calls to make a batch."""
        return BatchKv([0] * len(caches)).take_in(caches)


class BatchKv(_Plain, RightAligned, BatchKVCache):
    """Keys and values of such rows in full precision."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens (rows, heads, tokens, width); all slots so far, padding included."""
        if self.gaps:
            self.add((keys, values))
            held: tuple[mx.array, mx.array] = self.keys_and_values()  # type: ignore[no-untyped-call]
            return held
        self._grow(self._idx + keys.shape[2])
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return fetched

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's, where rows end at one slot; see `uneven_mask`."""
        if not self.gaps:
            return super().make_mask(*args, **kwargs)
        return self.uneven_mask(args[0], kwargs.get("window_size"))

    def extract(self, idx: int) -> KVCache:
        """One row as a cache of its own: see `row`."""
        return _plain_cache(*self.row(idx))

    def take_out(self) -> KVCache:
        """The same of the only row: see `only_row`."""
        return _plain_cache(*self.only_row())


def _plain_cache(rows: KvArrays, num_tokens: int) -> KVCache:
    taken: Any = KVCache()  # type: ignore[no-untyped-call]
    if rows:
        taken.keys, taken.values, taken.offset = *rows, num_tokens
    cache: KVCache = taken
    return cache


def entering(caches: list[Any]) -> list[Any]:
    """A row's caches as they go into a batch: those of plain keys and values are moved, others are the same."""
    return with_leaves(caches, lambda leaf: RowKv.of(leaf) if type(leaf) is KVCache else leaf)


def leaving(caches: list[Any]) -> list[Any]:
    """The caches of a batch's only row: buffers of keys and values are moved, others are extracted."""
    return with_leaves(caches, lambda leaf: leaf.take_out() if isinstance(leaf, RightAligned) else leaf.extract(0))
