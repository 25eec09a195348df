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


def stacked(parts: Sequence[tuple[mx.array | None, int]], num_rows: Sequence[int], longest: int) -> mx.array:
    """Arrays of (rows, heads, slots, width), of which the first so many slots are used, below one another and
    right-aligned at `longest`, each copied once. Behind it is room for a few tokens: when rows come and go, all of them
    are copied again."""
    form = next(array for array, _ in parts if array is not None)
    _, heads, _, width = form.shape
    joined = mx.zeros((sum(num_rows), heads, num_slots(longest + 1), width), form.dtype)
    first = 0
    for (array, num_used), count in zip(parts, num_rows, strict=True):
        if array is not None and num_used:
            joined[first : first + count, :, longest - num_used : longest] = array[..., :num_used, :]
        first += count
    return joined


def _stacked_rows(parts: Sequence[tuple[KvArrays, int, int]]) -> KvArrays:
    """The same for all arrays of parts (arrays, how many rows, how many slots of them are used)."""
    longest, num_rows = max(num_used for _, _, num_used in parts), [count for _, count, _ in parts]
    num_arrays = max(len(rows) for rows, _, _ in parts)
    return tuple(
        stacked([(rows[index] if rows else None, num_used) for rows, _, num_used in parts], num_rows, longest)
        for index in range(num_arrays)
    )


def settle(*arrays: mx.array) -> None:
    """Compute large copies at once, before those of the next layer: what they are copied from can leave meanwhile."""
    if sum(array.nbytes for array in arrays) >= LARGE_BYTES:
        mx.eval(arrays)


class RightAligned:
    """Rows that decode together: arrays of (rows, heads, slots, width), in which every row ends at slot `_idx` and room
    follows. `offset` (rows,) is the number of tokens of each row, `left_padding` (rows,) what is missing to the longest
    one."""

    rows: KvArrays
    offset: mx.array
    left_padding: mx.array
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

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, and no slot that only padding needs. Where all stay nothing moves."""
        keep = [int(index) for index in batch_indices]
        chosen = mx.array(keep)
        num_spare = int(mx.min(self.left_padding[chosen]).item())  # type: ignore[arg-type]
        if num_spare == 0 and keep == list(range(self.num_rows)):
            return
        self.rows = tuple(gathered(array, chosen, num_spare, self._idx) for array in self.rows)
        self.left_padding = self.left_padding[chosen] - num_spare
        self.offset = self.offset[chosen]
        self._idx -= num_spare

    def extend(self, other: Self) -> None:
        """Take the rows of another batch in, which is empty then; the shorter ones are padded."""
        batches, longest = (self, other), max(self._idx, other._idx)
        self.rows = _stacked_rows([(each.rows, each.num_rows, each._idx) for each in batches])
        other.rows = ()
        settle(*self.rows)
        self.left_padding = mx.concatenate([each.left_padding + (longest - each._idx) for each in batches])
        self.offset = mx.concatenate([each.offset for each in batches])
        self._idx = longest

    def row(self, index: int) -> tuple[KvArrays, int]:
        """One row and its length, not copied: a view without room, which shows what the row holds now whatever is
        written later."""
        start = int(self.left_padding[index].item())  # type: ignore[arg-type]
        return tuple(array[index : index + 1, :, start : self._idx] for array in self.rows), self._idx - start

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
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return not self.rows


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
        end = self._idx + keys.shape[2]
        if self.keys is not None and end > self.keys.shape[2]:
            self.rows = tuple(with_room(array, self._idx, num_slots(end)) for array in self.rows)
            settle(*self.rows)
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return fetched

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
