"""Payloads as bytes: every tree that a cache object can hold comes back with the same arrays, types and shapes."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from kvserve.cache.disk_blob import BlobHead, Tensor, pack_blob, unpack_blob
from kvserve.cache.token_run import TokenRun
from kvserve.engine.blobs import DTYPES, NotReadable, NotStorable, decode_kv, decode_state, encode_kv, encode_state
from kvserve.engine.snapshot import KvSlice, StateSnapshot
from tests.engine.odd_caches import Unmergeable
from tests.laws import num_examples


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and, for arrays, in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, mx.array):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and (not one.size or bytes(memoryview(bits(one))) == bytes(memoryview(bits(other))))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return same(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)


def bits(array: mx.array) -> mx.array:
    return array.reshape(-1).view(mx.uint8)


def through_a_file(text: str, tensors: list[Tensor]) -> tuple[str, tuple[Tensor, ...]]:
    """What a reader has in its hands after a restart."""
    head = BlobHead("model", "checkpoint", "", TokenRun(3, b""), "user")
    blob = unpack_blob(b"".join(bytes(part) for part in pack_blob(head, text, tensors)), head.name)
    return blob.note, blob.tensors


def again(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    return decode_state(*through_a_file(*encode_state(StateSnapshot(leaves, 5)))).leaves


shapes = st.lists(st.integers(0, 3), max_size=4)
arrays = st.builds(
    lambda shape, dtype: (mx.arange(math.prod(shape)).reshape(shape) % 2).astype(dtype),
    shapes,
    st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "F64"]),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), arrays)
keys = st.text(max_size=8)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=num_examples(60), deadline=None)
@given(trees)
def test_every_state_tree_comes_back(tree: Any) -> None:
    """Nested lists, tuples and dicts, None, numbers, strings, arrays of every type, empty and zero-width ones."""
    cache = ArraysCache(1)
    cache.cache = [tree]
    [back] = again((cache,))
    assert same(cache, back)


def filled(cache: Any, num_tokens: int, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """A cache after some tokens, one of them alone."""
    for size in (num_tokens - 1, 1):
        cache.update_and_fetch(*(mx.random.normal((1, 2, size, 32)).astype(dtype) for _ in range(2)))
    return cache


def layer_cache() -> LayerCache:
    cache = LayerCache(4)
    cache.update_window(mx.random.normal((1, 9, 8)).astype(mx.bfloat16))
    cache.compress_kv, cache.pending_kv = mx.ones((1, 2, 8)), mx.ones((1, 0, 8))
    return cache


def remembering_pool() -> Any:
    from kvserve.engine.pools import RememberingPool

    pool = RememberingPool(4)
    values, gates, _ = pool.accumulate_windows(mx.random.normal((1, 9, 8)), mx.random.normal((1, 9, 8)), 0)
    pool.update_and_fetch((values * gates)[:, ::4])
    return pool


CACHES = {
    "dense": lambda: filled(KVCache(), 5),
    "empty": KVCache,
    "quantised": lambda: filled(QuantizedKVCache(group_size=32, bits=4), 5),
    "window": lambda: filled(RotatingKVCache(8), 21),
    "window that keeps its first tokens": lambda: filled(RotatingKVCache(8, keep=2), 21, mx.float16),
    "chunked": lambda: filled(ChunkedKVCache(8), 5),
    "concatenated": lambda: filled(ConcatenateKVCache(), 5),
    "recurrent": lambda: ArraysCache(2, left_padding=[0]),
    "list of two, one inside the other": lambda: CacheList(
        filled(KVCache(), 5), CacheList(filled(RotatingKVCache(8), 9), ArraysCache(2))
    ),
    "window and compressed groups": layer_cache,
    "pool that remembers a group": remembering_pool,
}


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_class_comes_back(name: str) -> None:
    """An object of the same class with the same attributes, and arrays of its own."""
    cache = CACHES[name]()
    [back] = again((cache,))
    assert same(cache, back)


def test_a_window_goes_on_as_it_would_have() -> None:
    """After a restart the next tokens lead to the same keys, beyond the place where the window turns."""
    cache = filled(RotatingKVCache(8), 13)
    [back] = again((cache,))
    for _ in range(10):
        keys, values = mx.random.normal((1, 2, 1, 32)), mx.random.normal((1, 2, 1, 32))
        assert all(map(mx.array_equal, cache.update_and_fetch(keys, values), back.update_and_fetch(keys, values)))


def test_an_unknown_class_is_not_written() -> None:
    """Neither a foreign class nor a subclass of a known one: it may hold more than its parent."""
    for odd in (Unmergeable(), object(), {1: 2}):
        cache = ArraysCache(1)
        cache.cache = [odd]
        with pytest.raises(NotStorable):
            encode_state(StateSnapshot((cache,), 1))


def kv(num_tokens: int, *, rest: KvSlice | None = None, is_packed: bool = False) -> KvSlice:
    leaves = tuple((mx.random.normal((1, 2, num_tokens, 4)), mx.zeros((1, 2, num_tokens, 0))) for _ in range(2))
    return KvSlice(leaves, num_tokens + (rest.num_tokens if rest else 0), 99, is_packed, rest)


def test_slices_of_both_forms_come_back() -> None:
    """Rows in full precision with packed ones behind them, a zero-width array among them, and no rows at all."""
    for slice_ in (kv(5), kv(5, rest=kv(3, is_packed=True)), KvSlice((), 4, 0)):
        back = decode_kv(*through_a_file(*encode_kv(slice_)))
        assert same([slice_.leaves, slice_.rest and slice_.rest.leaves], [back.leaves, back.rest and back.rest.leaves])
        assert (back.num_tokens, back.num_bytes, back.is_packed) == (
            slice_.num_tokens,
            99 if slice_.leaves else 0,
            False,
        )


def test_text_and_tensors_of_two_blobs_do_not_go_together() -> None:
    """Whatever does not fit is said to be unreadable, never an object of something else."""
    text, tensors = encode_kv(kv(5))
    for broken in (
        ("{", tensors),
        ("{}", tensors),
        ("[]", tensors),
        (text, tensors[:1]),
        (text.replace("kv", "k"), tensors),
    ):
        with pytest.raises(NotReadable):
            decode_kv(*broken)
    with pytest.raises(NotReadable):
        decode_state('{"state":[{"object":"Path","attributes":{}}],"num_bytes":1}', [])
    with pytest.raises(NotReadable):
        decode_kv(text, [Tensor("F32", (9, 9), bytes(4)), *tensors[1:]])


def test_bytes_outlive_the_arrays_they_were_taken_from() -> None:
    """The writer may come late: the arrays are gone by then, and their memory is not used again."""
    array = mx.random.normal((64, 1024))
    expected = bytes(memoryview(bits(array)))
    _, [tensor] = encode_kv(KvSlice(((array,),), 64, array.nbytes))
    del array
    mx.clear_cache()
    rubbish = [mx.ones((64, 1024)) for _ in range(8)]
    mx.eval(rubbish)
    assert bytes(tensor.data) == expected


def test_a_blob_is_read_by_any_safetensors_reader(tmp_path: Path) -> None:
    """mlx's own reader finds the tensors under their numbers."""
    text, tensors = encode_kv(kv(5))
    head = BlobHead("model", "segment", "", TokenRun(0, bytes(20)), "user")
    path = tmp_path / "blob.safetensors"
    path.write_bytes(b"".join(bytes(part) for part in pack_blob(head, text, tensors)))
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert metadata["note"] == text and arrays["000000"].shape == (1, 2, 5, 4) and arrays["tokens"].shape == (5,)
