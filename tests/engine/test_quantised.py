"""Quantised caches: a batch holds what its rows hold alone, whatever is merged, extended, filtered and taken out."""

import copy
from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from kvserve.engine.quantised import BatchPackedCache, PackedCache, Quantiser, Scheme, Turbo, Uniform
from tests.laws import num_examples

HEADS, WIDTH = 2, 32
SCHEMES: list[Scheme] = [Uniform(8, 32), Uniform(4, 32), Turbo(4)]


def tokens_of(seed: int, number: int) -> tuple[mx.array, mx.array]:
    """Keys and values (1, heads, number, width) of a row."""
    key = mx.random.key(seed)
    drawn = mx.random.normal((2, 1, HEADS, number, WIDTH), key=key)
    return drawn[0], drawn[1]


def filled(scheme: Scheme, seed: int, number: int) -> PackedCache:
    cache = PackedCache(scheme)
    if number:
        cache.update_and_fetch(*tokens_of(seed, number))
    return cache


def assert_same(found: PackedCache, expected: PackedCache) -> None:
    assert found.offset == expected.offset
    for ours, theirs in zip(found.rows, expected.rows, strict=True):
        assert mx.array_equal(ours[..., : found.offset, :], theirs[..., : expected.offset, :])


@dataclass(slots=True)
class Rows:
    """A batch, and its rows as they are alone."""

    batch: BatchPackedCache
    alone: list[PackedCache]

    def step(self, seed: int) -> None:
        """One token more for every row."""
        new = [tokens_of(seed + index, 1) for index in range(len(self.alone))]
        for cache, (keys, values) in zip(self.alone, new, strict=True):
            cache.update_and_fetch(keys, values)
        self.batch.update_and_fetch(*(mx.concatenate(list(each)) for each in zip(*new, strict=True)))

    def check(self) -> None:
        assert self.batch.offset.tolist() == [cache.offset for cache in self.alone]
        assert min(self.batch.left_padding.tolist()) == 0
        for index, cache in enumerate(self.alone):
            if cache.offset:
                assert_same(self.batch.extract(index), cache)


def merged(scheme: Scheme, lengths: list[int], seed: int) -> Rows:
    rows = [filled(scheme, seed + index, length) for index, length in enumerate(lengths)]
    alone = copy.deepcopy(rows)
    return Rows(PackedCache.merge(rows), alone)


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=3)


@given(st.sampled_from(SCHEMES[1:]), LENGTHS, st.lists(st.one_of(LENGTHS, st.integers(0, 7)), max_size=5))
@example(SCHEMES[1], [0, 1], [1])  # the longest row leaves, and the padding of the other with it
@settings(max_examples=num_examples(25))
def test_a_batch_is_its_rows(scheme: Scheme, lengths: list[int], actions: list[list[int] | int]) -> None:
    """Rows join (a list of lengths), leave (an odd number names who stays) and decode (even) in any order."""
    rows = merged(scheme, lengths, 0)
    for number, action in enumerate(actions, start=1):
        if isinstance(action, list):
            more = merged(scheme, action, 1000 * number)
            rows.batch.extend(more.batch)
            rows.alone += more.alone
        elif action % 2 and len(rows.alone) > 1:
            keep = [index for index in range(len(rows.alone)) if index != action % len(rows.alone)]
            rows.batch.filter(keep)
            rows.alone = [rows.alone[index] for index in keep]
        else:
            rows.step(10_000 * number)
        rows.check()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_attends_in_a_batch_as_alone(scheme: Scheme) -> None:
    """The attention of mlx-lm's models reads rows of three lengths in a batch as it reads each of them."""
    rows = merged(scheme, [7, 300, 40], 0)
    queries = mx.random.normal((3, 2 * HEADS, 1, WIDTH), key=mx.random.key(5))
    new = [tokens_of(50 + index, 1) for index in range(3)]
    mask = rows.batch.make_mask(1)
    together = rows.batch.update_and_fetch(*(mx.concatenate(list(each)) for each in zip(*new, strict=True)))
    found = scaled_dot_product_attention(queries * 1, *together, cache=rows.batch, scale=0.2, mask=mask)
    for index, cache in enumerate(rows.alone):
        alone = cache.update_and_fetch(*new[index])
        query = queries[index : index + 1] * 1
        expected = scaled_dot_product_attention(query, *alone, cache=cache, scale=0.2, mask=None)
        assert mx.allclose(found[index : index + 1], expected, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_packed_is_smaller_and_close(scheme: Scheme) -> None:
    """Bytes shrink with the bits, and attention over what is packed is near to attention over the original."""
    plain, packed = KVCache(), filled(scheme, 3, 255)
    plain.update_and_fetch(*tokens_of(3, 255))
    bits = scheme.bits  # type: ignore[attr-defined]
    assert packed.nbytes * 32 < plain.nbytes * (bits + 4)
    query, new = mx.random.normal((1, HEADS, 1, WIDTH), key=mx.random.key(5)), tokens_of(9, 1)
    found, expected = (
        scaled_dot_product_attention(query * 1, *cache.update_and_fetch(*new), cache=cache, scale=0.2, mask=None)
        for cache in (packed, plain)
    )
    error = mx.abs(found - expected).max() / mx.abs(expected).max()
    assert 0 < error.item() < {8: 0.02, 4: 0.3}[bits]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_packing_does_not_depend_on_the_chunks(scheme: Scheme) -> None:
    """Tokens that came one by one, in chunks or all at once are the same rows."""
    keys, values = tokens_of(1, 300)
    whole = filled(scheme, 1, 300)
    for ends in ([1, 2, 3, 300], [256, 257, 300]):
        cache, start = PackedCache(scheme), 0
        for end in ends:
            cache.update_and_fetch(keys[..., start:end, :], values[..., start:end, :])
            start = end
        assert_same(cache, whole)


def test_only_layers_that_keep_every_token_are_converted() -> None:
    """Windows stay, also inside a list of caches; what is converted already is not converted again."""
    quantiser = Quantiser(Uniform(8, 32), 10)
    caches = [KVCache(), RotatingKVCache(8), CacheList(KVCache(), RotatingKVCache(8))]
    for leaf in (caches[0], *caches[2].caches):
        leaf.update_and_fetch(*tokens_of(1, 12))
    assert quantiser.ready(caches, 9) is caches
    ready = quantiser.ready(caches, 10)
    assert [type(cache) for cache in ready] == [PackedCache, RotatingKVCache, CacheList]
    assert [type(leaf) for leaf in ready[2].caches] == [PackedCache, RotatingKVCache]
    assert_same(ready[0], filled(Uniform(8, 32), 1, 12))
    assert quantiser.ready(ready, 12)[0] is ready[0]


def test_a_chunk_that_attends_to_packed_rows_is_shorter_the_deeper_it_is() -> None:
    """Scores that are written out are bounded; before the start, and where attention unpacks, nothing is."""
    uniform, turbo = Quantiser(Uniform(8, 32), 5000), Quantiser(Turbo(4), 5000)
    assert uniform.longest_chunk(4999) > 10**6 < turbo.longest_chunk(100_000)
    assert uniform.longest_chunk(8191) == 2048
    assert uniform.longest_chunk(131_071) == 128
    assert uniform.longest_chunk(10**8) == 16


def test_a_trimmed_row_forgets_its_newest_tokens() -> None:
    """What comes after a trim overwrites what was there."""
    cache, expected = filled(Uniform(4, 32), 1, 20), filled(Uniform(4, 32), 1, 20)
    cache.update_and_fetch(*tokens_of(2, 5))
    assert cache.trim(5) == 5
    for each in (cache, expected):
        each.update_and_fetch(*tokens_of(3, 1))
    assert_same(cache, expected)
