"""Pools whose groups overlap remember the group before: every pass then leads to what one pass over all tokens does.
The model's part is mlx-vlm's own, of DeepSeek V4."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache
from mlx_vlm.models.cache import PoolingCache

from benchmarks.tiny_families import write_model
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.leaf_forms import find_forms
from kvserve.engine.model import load
from kvserve.engine.pools import RememberingPool, with_memory
from kvserve.engine.vision import CurrentPass, VlmDecoder
from tests.engine.engines import assert_exact, cached, cold_with_logits, generate, prompt_of, turn
from tests.engine.test_changed_weights import engine_on, is_on_disk
from tests.laws import num_examples
from tests.web.fakes import eventually

WIDTH = 8
SIZES = (4, 3)
"""Groups of four overlap, others do not."""

TOKENS = mx.random.normal((3, 40, WIDTH), key=mx.random.key(3))


@cache
def compressor(size: int) -> Any:
    from mlx_vlm.models.deepseek_v4.language import Compressor  # here: it takes a while, and every worker collects this

    keys = {"qk_rope_head_dim": 4, "hidden_size": WIDTH, "rms_norm_eps": 1e-5, "compress_rope_theta": 10000.0}
    made = Compressor(SimpleNamespace(**keys, rope_scaling=None, max_position_embeddings=64), size, WIDTH)
    names = {"wkv", "wgate"}
    for number, name in enumerate(sorted(names)):
        weight = getattr(made, name).weight
        getattr(made, name).weight = mx.random.normal(weight.shape, key=mx.random.key(number))
    return made


def pooled(pool: Any, row: int, ends: Sequence[int], start: int = 0) -> mx.array:
    """What a pool holds of a row's tokens behind `start`, in passes that end at these places."""
    found = mx.zeros((1, 0, WIDTH))
    for begin, end in pairwise(sorted({start, *ends})):
        found = compressor(pool.ratio)(TOKENS[row : row + 1, begin:end], pool, begin)
    return found


def is_alike(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and bool(mx.allclose(ours, theirs, atol=1e-5))


@settings(max_examples=num_examples(20), deadline=None)
@given(st.sampled_from(SIZES), st.sets(st.integers(1, 39), max_size=8))
def test_however_tokens_are_cut_into_passes_the_pool_is_that_of_one(size: int, cuts: set[int]) -> None:
    """Of one token or many, in the middle of a group or between two: what the library's own pool holds after one."""
    ends = [*sorted(cuts), 40]
    assert is_alike(pooled(RememberingPool(size), 0, ends), pooled(PoolingCache(size), 0, [40]))


def test_the_librarys_own_pool_is_another_where_it_was_cut() -> None:
    """The control: without this nothing above could fail."""
    whole = pooled(PoolingCache(4), 0, [40])
    assert not is_alike(pooled(PoolingCache(4), 0, [20, 40]), whole)
    assert not is_alike(pooled(PoolingCache(4), 0, [40 - 12, *range(29, 41)]), whole)
    assert is_alike(pooled(PoolingCache(3), 0, [20, 40]), pooled(PoolingCache(3), 0, [40]))


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_decode_together_have_the_pools_of_each_alone(size: int) -> None:
    """Of lengths that fill a group at different steps, one of them empty; a third joins, the first leaves, and each
    goes on alone."""
    lengths, rows = [9, 0, 14], [RememberingPool(size) for _ in range(3)]
    for number, length in enumerate(lengths):
        pooled(rows[number], number, [length])
    batch = RememberingPool.merge(rows[:2])
    step(batch, lengths, [0, 1], 5)
    batch.extend(RememberingPool.merge(rows[2:]))
    step(batch, lengths, [0, 1, 2], 6)
    first = batch.extract(0)
    batch.filter([1, 2])
    step(batch, lengths, [1, 2], 7)
    left = {0: first, 1: batch.extract(0), 2: batch.extract(1)}
    for number, pool in left.items():
        num_tokens = lengths[number]
        alone = RememberingPool(size)
        pooled(alone, number, [num_tokens])
        assert pool.remainder == alone.remainder and is_alike(pool.pooled, alone.pooled)
        both = [pooled(each, number, [num_tokens + 3, 40], num_tokens) for each in (pool, alone)]
        assert is_alike(*both)


def step(batch: Any, lengths: list[int], rows: Sequence[int], num_steps: int) -> None:
    """Tokens one by one for these rows of a batch."""
    for _ in range(num_steps):
        tokens = mx.stack([TOKENS[row, lengths[row] : lengths[row] + 1] for row in rows])
        compressor(batch.ratio)(tokens, batch, mx.array([lengths[row] for row in rows]))
        for row in rows:
            lengths[row] += 1


def test_rows_of_which_none_has_a_group_have_none_before_it() -> None:
    """Rows that begin together: the first group of each is pooled by itself."""
    batch, lengths = RememberingPool.merge([RememberingPool(4) for _ in range(2)]), [0, 0]
    batch.extend(RememberingPool.merge([RememberingPool(4)]))
    batch.filter([0, 1])
    step(batch, lengths, [0, 1], 3)
    assert batch.extract(1).before is None
    step(batch, lengths, [0, 1], 6)
    for number in range(2):
        assert is_alike(batch.extract(number).pooled, pooled(PoolingCache(4), number, [9]))


# --- which pools of a model ------------------------------------------------------------------------------------------


class Language(Module):
    """Reads tokens, and what they are pooled to; `counts`: and how much it is given to pool."""

    def __init__(self, size: int, *, counts: bool = False) -> None:
        super().__init__()
        self.size, self.counts = size, counts

    def make_cache(self) -> list[Any]:
        return [KVCache(), PoolingCache(self.size)]

    def __call__(self, inputs: mx.array, **rest: Any) -> Any:
        kv, pool = rest["cache"]
        embedded = mx.sin(inputs[..., None] * mx.arange(1, WIDTH + 1))
        offset = kv.offset
        keys, _ = kv.update_and_fetch(embedded[:, None], embedded[:, None])
        entries = compressor(self.size)(embedded, pool, offset)
        logits = embedded + keys.mean(axis=(1, 2)) + (entries.sum(axis=1) if entries.size else 0)
        if self.counts:
            logits = logits * mx.arange(1, WIDTH + 1) ** (pool.before is not None if hasattr(pool, "before") else 2)
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(
    ("size", "counts", "expected"), [(4, False, RememberingPool), (3, False, PoolingCache), (4, True, PoolingCache)]
)
def test_pools_remember_where_the_model_is_the_same_in_one_pass_and_its_own_forget(
    size: int, counts: bool, expected: type
) -> None:
    """Groups that overlap; those that do not keep the library's class, and so does a model that would compute something
    else in one pass."""
    decoder = VlmDecoder(Language(size, counts=counts), CurrentPass(), has_positions=False)
    forms = with_memory(decoder, find_forms(decoder, decoder.make_cache))
    assert type(decoder.make_cache()[1]) is expected
    assert [form.depends_on_cuts for form in forms] == [False, expected is PoolingCache and size == 4]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "library"), [("deepseek_v4", "mlx-vlm"), ("glm5_next", "mlx-vlm"), ("deepseek_v41", "mlx-lm")]
)
def test_a_conversation_of_a_model_with_pools_is_computed_once(family: str, library: Any, tmp_path: Path) -> None:
    """Its second turn has all of the first one, the answer too, after a restart as well, and writes what a cold one
    does; also beside a shorter row. With DeepSeek V4 reuse began at multiples of 256 tokens, behind no answer."""
    folder, num_known = write_model(tmp_path / "model", library, family), 700 + 80
    with engine_on(folder, tmp_path / "kv") as engine:
        support = engine.status.cache_support
        assert support is not None and (support.can_keep, support.cut_tokens) == (True, 1)
        assert support.can_batch == (family != "deepseek_v41")
        assert [note for note in support.notes if "whole copies" in note] == []
        eventually(lambda: is_on_disk(engine))
        first = prompt_of(700)
        answer = cold_with_logits(engine, first, 80)[0].tokens
        rows = [[*first, *answer, *prompt_of(30, 3)], first[:301]]
        colds = [cold_with_logits(engine, each, 40)[0].tokens for each in rows]
        generate(engine, turn(first, 80))
        warm = generate(engine, *(turn(each, 40) for each in rows))
        assert cached(warm[0]) == num_known and cached(warm[1]) > 0
        for each, expected in zip(warm, colds, strict=True):
            assert_exact(each, expected)
    with engine_on(folder, tmp_path / "kv") as engine:
        eventually(lambda: is_on_disk(engine))
        [again] = generate(engine, turn([*rows[0][:num_known], *prompt_of(40, 7)], 4))
        assert cached(again) == num_known


@pytest.mark.long
def test_only_the_pools_that_forget_are_others(tmp_path: Path) -> None:
    """DeepSeek V4's groups of four overlap, those of 128 do not."""
    model = load(write_model(tmp_path, "mlx-vlm", "deepseek_v4"), 4096)
    pools = [leaf for leaf in flat_caches(model.new_caches()) if isinstance(leaf, PoolingCache)]
    assert {leaf.ratio: type(leaf) for leaf in pools} == {4: RememberingPool, 128: PoolingCache}
    assert model.own_leaves == ("PoolingCache 128", "RememberingPool 4")
