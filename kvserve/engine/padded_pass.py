"""Several rows' chunks in one forward pass, padded to the longest; knows caches and tokens, nothing of requests.

Each row's KV is at the right end of its buffers (as in mlx-lm's `BatchKVCache`), its new tokens follow at the
left end of the chunk: the causal mask hides the padding behind them, and none of it is taken along.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache


def can_be_padded(caches: Sequence[Any]) -> bool:
    """Whether rows with such caches can share a pass: plain ones only. A window or a state would take the padding in,
    and a subclass may do other things than its parent."""
    return all(type(cache) is KVCache for cache in caches)


def padded_pass(
    module: Callable[..., Any], rows: Sequence[list[Any]], chunks: Sequence[Sequence[int]]
) -> list[list[KVCache]]:
    """Put each row's chunk through the model; returns evaluated caches of their own that hold it too.

    `rows` are the caches of each row, layer by layer, and stay as they are. Raises what the model raises.
    """
    longest = max(len(chunk) for chunk in chunks)
    depths = [layers[0].offset for layers in rows]
    merged = [BatchKVCache.merge(layer) for layer in zip(*rows, strict=True)]  # type: ignore[no-untyped-call]
    module(mx.array([[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks]), cache=merged)
    deepest = max(depths)
    parted = [
        [_part(cache, index, deepest - depth, deepest + len(chunk)) for cache in merged]
        for index, (depth, chunk) in enumerate(zip(depths, chunks, strict=True))
    ]
    mx.eval([cache.state for layers in parted for cache in layers])
    return parted


def _part(cache: Any, index: int, start: int, end: int) -> KVCache:
    """A cache of its own for one row of a batch: a copy of its positions `[start, end)`."""
    part = KVCache()  # type: ignore[no-untyped-call]
    part.keys = mx.contiguous(cache.keys[index : index + 1, :, start:end])
    part.values = mx.contiguous(cache.values[index : index + 1, :, start:end])
    part.offset = end - start
    return part
