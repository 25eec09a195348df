"""The caches of a row without the lists that some models put them in. It knows mlx-lm's `CacheList` only."""

from collections.abc import Iterable
from typing import Any

from mlx_lm.models.cache import CacheList


def flat_caches(caches: Iterable[Any]) -> list[Any]:
    """Every cache that is no list of caches, in order."""
    return [
        leaf for cache in caches for leaf in (flat_caches(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]
