"""Batches whose rows come and go a layer at a time hold what mlx-lm's own hold, in less memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from kvserve.engine import batch_cache
from kvserve.engine.batch_cache import JoiningCache, LeanBatch, joining

NUM_LAYERS = 6
LAYER_BYTES = 2 * 512 * 1024 * 4


@pytest.fixture(scope="module", autouse=True)
def layers_are_settled() -> Iterator[None]:
    """However small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_cache, "MIN_BYTES", 0)
        yield


def row(length: int, seed: int, heads: int = 2, width: int = 4) -> KVCache:
    """A layer of one row with places ahead of its tokens."""
    cache = KVCache()  # type: ignore[no-untyped-call]
    if length:
        keys, values = mx.random.normal((2, 1, heads, length, width), key=mx.random.key(seed))
        cache.update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
    return cache


def held(batch: Any) -> list[Any]:
    """What every row of a batch has: its places, and its keys and values."""
    rows = [] if batch.keys is None else [batch.extract(index) for index in range(batch.keys.shape[0])]
    found = [(each.keys.tolist(), each.values.tolist()) for each in rows]
    return [batch.left_padding.tolist(), batch.offset.tolist(), batch._idx, found]


@settings(deadline=None, max_examples=30)
@given(
    first=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    later=st.lists(st.integers(0, 300), min_size=1, max_size=2),
    data=st.data(),
)
def test_rows_that_join_and_leave_are_those_of_a_plain_batch(
    first: list[int], later: list[int], data: st.DataObject
) -> None:
    """Any rows enter together, others join them, some stay, and a token is added: both hold the same all the time."""
    keep = data.draw(st.sets(st.integers(0, len(first) + len(later) - 1), min_size=1))
    found: list[list[Any]] = []
    for take in (lambda cache: cache, JoiningCache.of):
        caches = [take(row(length, seed)) for seed, length in enumerate([*first, *later])]
        batch = type(caches[0]).merge(caches[: len(first)])
        steps = [held(batch)]
        batch.extend(type(caches[0]).merge(caches[len(first) :]))
        steps.append(held(batch))
        batch.filter(sorted(keep))
        steps.append(held(batch))
        token = mx.ones((len(keep), 2, 1, 4))
        batch.update_and_fetch(token, token)
        steps.append(held(batch))
        found.append(steps)
    assert found[0] == found[1]


def test_whoever_enters_is_consumed_and_other_kinds_enter_as_they_are() -> None:
    """Nothing of a row stays behind in the caches that it came in; inside lists too."""
    plain, other = row(5, 0), object()
    inner = CacheList(row(3, 1), row(4, 2))  # type: ignore[no-untyped-call]
    taken = joining([plain, other, inner])
    assert plain.keys is None and taken[1] is other
    assert [type(each) for each in (taken[0], *taken[2].caches)] == [JoiningCache] * 3
    batch = JoiningCache.merge([taken[0]])
    assert type(batch) is LeanBatch and taken[0].keys is None


def entered(make: Callable[[Sequence[KVCache]], list[Any]]) -> float:
    """How many layers more than the row itself there were when a row of several layers entered a batch."""
    rows = [row(512, seed, heads=8, width=128) for seed in range(NUM_LAYERS)]
    mx.eval([cache.state for cache in rows])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch = make(rows)
    del rows
    for layer in batch:
        layer.filter([0])
    mx.eval([(layer.keys, layer.values) for layer in batch])
    return (mx.get_peak_memory() - before) / LAYER_BYTES


def lean(rows: Sequence[KVCache]) -> list[Any]:
    return [cache.merge([cache]) for cache in joining(rows)]


def plain(rows: Sequence[KVCache]) -> list[Any]:
    return [BatchKVCache.merge([cache]) for cache in rows]  # type: ignore[no-untyped-call]


def test_a_row_enters_without_being_there_twice() -> None:
    """Negative control: mlx-lm's own batch has all layers of the row twice, and more."""
    assert entered(lean) <= 1
    assert entered(plain) >= NUM_LAYERS - 1
