"""Batches whose rows come and go one layer at a time, so that no moment has the whole batch in memory twice.

mlx-lm describes what joins, leaves and grows lazily, for all layers, and the device then computes many layers at once:
a row that enters is there two to three times. Here each layer is computed, and its old arrays are free, before the next
one is described. Values are the same; a row alone enters without a copy.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

MIN_BYTES = 2**21
"""Layers of short rows stay lazy, as mlx-lm has them: to wait for each costs running streams more than it saves."""


class LeanBatch(BatchKVCache):
    """A layer of a batch that is computed at once where rows join or leave."""

    keys: Any
    values: Any

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows, in this order. All of them, as they are, is nothing to do."""
        if self.keys is not None and list(batch_indices) == list(range(self.keys.shape[0])):
            return
        super().filter(batch_indices)  # type: ignore[no-untyped-call]
        self._settle()

    def extend(self, other: Any) -> None:
        """Take in the rows of another batch, which is consumed."""
        super().extend(other)  # type: ignore[no-untyped-call]
        other.keys = other.values = None
        self._settle()

    def _settle(self) -> None:
        if self.keys is not None and self.keys.nbytes + self.values.nbytes >= MIN_BYTES:
            mx.eval(self.keys, self.values)


class JoiningCache(KVCache):
    """A layer of one row on its way into a batch: whoever merges it consumes it."""

    keys: Any
    values: Any

    @classmethod
    def of(cls, cache: KVCache) -> "JoiningCache":
        """The same rows; the cache that had them has none any more."""
        joining = cls()
        joining.keys, joining.values, joining.offset = cache.keys, cache.values, cache.offset
        cache.keys = cache.values = None
        return joining

    @classmethod
    def merge(cls, caches: "Sequence[JoiningCache]") -> LeanBatch:
        """One layer of a batch. Of a single row it takes the arrays as they are, with the places ahead."""
        if len(caches) == 1 and caches[0].keys is not None:
            [cache] = caches
            batch = LeanBatch([0])
            batch.keys, batch.values = cache.keys, cache.values
            batch.offset += cache.offset
            batch._idx = cache.offset
        elif all(cache.keys is None for cache in caches):
            batch = LeanBatch([0] * len(caches))
        else:
            batch = LeanBatch.merge(caches)  # type: ignore[no-untyped-call]
            batch._settle()
        for cache in caches:
            cache.keys = cache.values = None
        return batch


def joining(caches: Sequence[Any]) -> list[Any]:
    """A row's caches, which are consumed, as they enter a batch. Only plain ones can be taken over layer by layer."""
    return [_joining(cache) for cache in caches]


def _joining(cache: Any) -> Any:
    if type(cache) is KVCache:
        return JoiningCache.of(cache)
    if type(cache) is CacheList:
        return CacheList(*(_joining(each) for each in cache.caches))  # type: ignore[no-untyped-call]
    return cache
