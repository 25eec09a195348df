"""The buffers of keys and values: who makes room in time writes in place, else all that is there is copied. And what
mlx-lm's `BatchKVCache` does for rows that decode together in full precision, with as few copies as can be. It knows
arrays and mlx-lm's caches, nothing of requests.

A row that enters an empty batch hands its buffers over, with the room that they have. A row is read as a view: the
prefix cache copies the tokens that are new, and lets go of the view before the next step, which else could not write in
place. Rows are copied where a batch gains or loses rows, and where its room is used up.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """Every cache that is no list of caches, in order."""
    return [
        leaf for cache in caches for leaf in (flat_caches(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]


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


def settle(*arrays: mx.array) -> None:
    """Compute large copies at once, before those of the next layer: what they are copied from can leave meanwhile."""
    if sum(array.nbytes for array in arrays) >= LARGE_BYTES:
        mx.eval(arrays)


class RowKv(KVCache):
    """A row on its way into a batch: mlx-lm merges caches by their own class."""

    keys: Any
    values: Any

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
        return BatchKv.of(caches)


class BatchKv(BatchKVCache):
    """Keys and values (rows, heads, slots, width), right-aligned: every row ends at slot `_idx`, room follows."""

    keys: Any
    values: Any

    @classmethod
    def of(cls, rows: Sequence[RowKv]) -> Self:
        """One batch of rows, the shorter ones padded on the left. A single one is handed over, and is empty then."""
        longest = max(row.offset for row in rows)
        batch = cls([longest - row.offset for row in rows])
        if len(rows) == 1:
            [row] = rows
            batch.keys, batch.values, row.keys, row.values, row.offset = row.keys, row.values, None, None, 0
        elif any(row.keys is not None for row in rows):
            num_rows = [1] * len(rows)
            batch.keys = stacked([(row.keys, row.offset) for row in rows], num_rows, longest)
            batch.values = stacked([(row.values, row.offset) for row in rows], num_rows, longest)
        batch._idx = longest
        batch.offset = batch.offset + longest
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens (rows, heads, tokens, width); all slots so far, padding included."""
        end = self._idx + keys.shape[2]
        if self.keys is not None and end > self.keys.shape[2]:
            self.keys = with_room(self.keys, self._idx, num_slots(end))
            self.values = with_room(self.values, self._idx, num_slots(end))
            settle(self.keys, self.values)
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return fetched

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows, and no slot that only padding needs. Where all stay nothing moves."""
        keep = [int(index) for index in batch_indices]
        padding = [int(self.left_padding[index].item()) for index in keep]  # type: ignore[arg-type]
        num_spare = min(padding)
        if num_spare == 0 and keep == list(range(self.left_padding.size)):
            return
        chosen = mx.array(keep)
        if self.keys is not None:
            self.keys = gathered(self.keys, chosen, num_spare, self._idx)
            self.values = gathered(self.values, chosen, num_spare, self._idx)
        self.offset = self.offset[chosen]
        self.left_padding = self.left_padding[chosen] - num_spare
        self._idx -= num_spare

    def extend(self, other: "BatchKv") -> None:
        """Take the rows of another batch in, which is empty then; the shorter ones are padded."""
        longest = max(self._idx, other._idx)
        batches = (self, other)
        if any(batch.keys is not None for batch in batches):
            num_rows = [batch.left_padding.size for batch in batches]
            keys = stacked([(batch.keys, batch._idx) for batch in batches], num_rows, longest)
            values = stacked([(batch.values, batch._idx) for batch in batches], num_rows, longest)
            self.keys, self.values, other.keys, other.values = keys, values, None, None
            settle(keys, values)
        self.left_padding = mx.concatenate([batch.left_padding + (longest - batch._idx) for batch in batches])
        self.offset = mx.concatenate([batch.offset for batch in batches])
        self._idx = longest

    def extract(self, idx: int) -> KVCache:
        """One row, not copied: a view without room, which shows what the row holds now whatever is written later."""
        row: Any = KVCache()  # type: ignore[no-untyped-call]
        start = int(self.left_padding[idx].item())  # type: ignore[arg-type]
        if self.keys is not None:
            row.keys = self.keys[idx : idx + 1, :, start : self._idx]
            row.values = self.values[idx : idx + 1, :, start : self._idx]
            row.offset = self._idx - start
        taken: KVCache = row
        return taken


def entering(caches: list[Any]) -> list[Any]:
    """A row's caches as they go into a batch: those of plain keys and values are moved, others are the same."""
    return [_entering(cache) for cache in caches]


def _entering(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_entering(leaf) for leaf in cache.caches))  # type: ignore[no-untyped-call]
    return RowKv.of(cache) if type(cache) is KVCache else cache
