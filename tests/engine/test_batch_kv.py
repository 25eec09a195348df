"""Rows that decode together in full precision: right whatever joins and leaves, and moved no more often than needed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from benchmarks.weightless import Weightless
from kvserve.engine import kv_buffers
from kvserve.engine.batch_costs import BatchCosts
from kvserve.engine.decode import DecodePool
from kvserve.engine.draft_nouns import DraftSupport
from kvserve.engine.kv_buffers import BatchKv, RowKv, entering, flat_caches, num_slots
from kvserve.engine.kv_size import KvSize
from kvserve.engine.model import LoadedModel
from kvserve.engine.pass_costs import PassCosts
from kvserve.engine.prefill import reserve
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.snapshot import CacheLayout
from tests.engine.engines import prompt_of, request
from tests.engine.led_drafts import ACCEPTED, LedDrafter, drafts_tried, entered, row_of
from tests.laws import num_examples

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 8, 4
"""Keys and values differ in width, as in latent attention."""


def tokens_of(seed: int, num_tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.key(2 * seed + each) for each in range(2))
    return (
        mx.random.normal((1, HEADS, num_tokens, KEY_WIDTH), key=keys),
        mx.random.normal((1, HEADS, num_tokens, VALUE_WIDTH), key=values),
    )


def filled(seed: int, num_tokens: int) -> KVCache:
    cache = KVCache()
    if num_tokens:
        cache.update_and_fetch(*tokens_of(seed, num_tokens))
    return cache


@dataclass(slots=True)
class Rows:
    """A batch, and its rows as mlx-lm's own caches hold them alone."""

    batch: BatchKv
    alone: list[KVCache]

    @classmethod
    def of(cls, lengths: list[int], seed: int) -> "Rows":
        rows = [filled(seed + index, length) for index, length in enumerate(lengths)]
        alone = copy.deepcopy(rows)
        return cls(RowKv.merge([RowKv.of(row) for row in rows]), alone)

    def step(self, seed: int) -> None:
        """One token more for every row."""
        new = [tokens_of(seed + index, 1) for index in range(len(self.alone))]
        for cache, (keys, values) in zip(self.alone, new, strict=True):
            cache.update_and_fetch(keys, values)
        self.batch.update_and_fetch(*(mx.concatenate(list(each)) for each in zip(*new, strict=True)))

    def cut(self, seed: int) -> None:
        """Each row loses its newest tokens, another number of them each, as after drafts that were wrong."""
        dropped = [min(cache.offset, (seed + 5 * index) % 4) for index, cache in enumerate(self.alone)]
        for cache, num in zip(self.alone, dropped, strict=True):
            cache.trim(num)
        self.batch.cut(dropped)

    def check(self) -> None:
        assert self.batch.offset.tolist() == [cache.offset for cache in self.alone]
        assert min(self.batch.left_padding.tolist()) == 0
        for index, cache in enumerate(self.alone):
            row = self.batch.extract(index)
            assert (type(row), row.offset) == (KVCache, cache.offset)
            if cache.offset:
                pairs = zip(row.keys_and_values(), cache.keys_and_values(), strict=True)
                assert all(mx.array_equal(ours, theirs) for ours, theirs in pairs)


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=3)


@given(LENGTHS, st.lists(st.one_of(LENGTHS, st.integers(0, 11)), max_size=8))
@settings(max_examples=num_examples(30), deadline=None)
def test_a_batch_is_its_rows(lengths: list[int], actions: list[list[int] | int]) -> None:
    """Rows join (a list of lengths), leave (an odd number names who), decode, are cut and align (even numbers) in any
    order: each is, bit for bit, what mlx-lm's cache of it alone is."""
    rows = Rows.of(lengths, 0)
    for number, action in enumerate(actions, start=1):
        if isinstance(action, list):
            more = Rows.of(action, 1000 * number)
            rows.batch.extend(more.batch)
            rows.alone += more.alone
        elif action % 2 and len(rows.alone) > 1:
            keep = [index for index in range(len(rows.alone)) if index != action % len(rows.alone)]
            rows.batch.filter(keep)
            rows.alone = [rows.alone[index] for index in keep]
        elif action % 6 == 2:
            rows.cut(action + number)
        elif action == 4:
            rows.batch.align()
        else:
            rows.step(10_000 * number)
        rows.check()


@pytest.mark.parametrize("window_size", [None, 20])
@pytest.mark.parametrize(("num_new", "dropped"), [(1, None), (1, (0, 2, 1)), (3, (2, 0, 5))])
def test_a_row_attends_in_a_batch_as_alone(
    num_new: int, dropped: tuple[int, ...] | None, window_size: int | None
) -> None:
    """The attention of mlx-lm's models reads rows of three lengths in a batch as it reads each of them, also where they
    were cut and have several tokens more."""
    rows = Rows.of([7, 300, 40], 0)
    if dropped is not None:
        rows.batch.cut(dropped)
        for cache, num in zip(rows.alone, dropped, strict=True):
            cache.trim(num)
    queries = mx.random.normal((3, 2 * HEADS, num_new, KEY_WIDTH), key=mx.random.key(5))
    new = [tokens_of(50 + index, num_new) for index in range(3)]
    mask = rows.batch.make_mask(num_new, window_size=window_size)
    together = rows.batch.update_and_fetch(*(mx.concatenate(list(each)) for each in zip(*new, strict=True)))
    found = scaled_dot_product_attention(queries, *together, cache=rows.batch, scale=0.2, mask=mask)
    for index, cache in enumerate(rows.alone):
        own = cache.make_mask(num_new, return_array=True, window_size=window_size)
        own = create_causal_mask(1, cache.offset, window_size=window_size) if own is None else own
        alone, queried = cache.update_and_fetch(*new[index]), queries[index : index + 1]
        expected = scaled_dot_product_attention(queried, *alone, cache=cache, scale=0.2, mask=own)
        assert mx.allclose(found[index : index + 1], expected, atol=1e-5)


def test_a_row_that_was_handed_over_is_empty() -> None:
    """Nobody else holds the buffers that the batch writes into, also inside a list of caches."""
    cache = filled(1, 20)
    [row] = entering([cache])
    assert (cache.keys, cache.values, cache.offset, row.offset) == (None, None, 0, 20)
    batch = RowKv.merge([row])
    assert (row.keys, row.values, batch.size()) == (None, None, 20)


@given(st.integers(1, 10**6))
def test_what_grows_has_room_for_a_thirty_second_part(num_tokens: int) -> None:
    """Room for what is needed and at most a step and 1/32 more: an answer copies its prompt a few times only."""
    assert num_tokens <= num_slots(num_tokens) <= num_tokens + num_tokens // 32 + 256
    assert num_slots(num_tokens + 1) > num_tokens + max(0, num_tokens // 32 - 256)


# --- how often KV moves -----------------------------------------------------------------------------------------------

NUM_LAYERS, NUM_TOKENS, ANSWER_TOKENS = 2, 20_000, 40


@pytest.fixture
def model() -> LoadedModel:
    """A model without weights, whose KV is all that takes memory."""
    return LoadedModel(
        module=Weightless(NUM_LAYERS, HEADS, 16, vocab_size=8),  # type: ignore[arg-type]
        config={},
        vocab_size=8,
        context_limit=10**6,
        weight_bytes=1,
        active_weight_bytes=2**40,
        sizes=KvSize(0, 2 * NUM_LAYERS * HEADS * 16 * 4),
    )


@dataclass(slots=True)
class Decoding:
    """A row of 20,000 tokens that decodes with others, or alone."""

    model: LoadedModel
    pool: DecodePool

    def enter(self, num_answer_tokens: int = ANSWER_TOKENS, num_room_tokens: int | None = None) -> Row:
        each = request(prompt_of(NUM_TOKENS), num_answer_tokens)
        row, caches = Row(RequestHandle(each), lambda: None), self.model.new_caches()
        self.model.module(mx.zeros((1, 16), mx.int32), cache=caches)
        reserve(caches, NUM_TOKENS + (num_room_tokens or num_answer_tokens))
        self.model.module(mx.zeros((1, NUM_TOKENS - 17), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
        self.pool.enter(row, caches)
        return row


@pytest.fixture
def decoding(model: LoadedModel) -> Decoding:
    return Decoding(model, DecodePool(model, 8))


def peak_beyond(held: int) -> float:
    """The most memory since the last reset beyond `held` bytes, in rows of 20,000 tokens."""
    row_bytes = 2 * NUM_LAYERS * HEADS * 16 * 4 * NUM_TOKENS
    return (mx.get_peak_memory() - held) / row_bytes


def test_a_row_alone_is_never_copied(decoding: Decoding) -> None:
    """From its entry over its answer to its end, and while it is looked at: no layer of it is there twice."""
    others = mx.get_active_memory()
    row = decoding.enter()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    layout, kept = CacheLayout(decoding.model.new_caches), []
    while not row.is_over:
        if len(row.generated) == ANSWER_TOKENS // 2 and (left := decoding.pool.look_at(row)) is not None:
            kept.append(layout.read_kv(left.caches, NUM_TOKENS, len(left.tokens)))
            del left
        finished = decoding.pool.step().finished
    [left] = finished
    kept.append(layout.read_kv(left.caches, NUM_TOKENS, len(left.tokens)))
    assert peak_beyond(held) < 0.1
    del left, finished
    left_bytes = mx.get_active_memory() - others
    assert left_bytes < (held - others) / 10, "what is kept of the row keeps no buffer of its batch alive"
    assert kept[-1].num_tokens == ANSWER_TOKENS


def test_a_view_that_is_held_over_a_step_costs_a_copy(decoding: Decoding) -> None:
    """Negative control: it shows what it showed before, and the step could not write in place."""
    row = decoding.enter()
    for _ in range(3):
        decoding.pool.step()
    left = decoding.pool.look_at(row)
    assert left is not None
    before = [mx.array(each) for each in left.caches[0].keys_and_values()]
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    decoding.pool.step()
    mx.synchronize()
    assert peak_beyond(held) > 0.4
    assert all(mx.array_equal(a, b) for a, b in zip(left.caches[0].keys_and_values(), before, strict=True))


def test_a_row_that_joins_or_leaves_moves_each_row_once(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserve.engine.kv_buffers.LARGE_BYTES", 2**20)
    """Rows are copied into their new batch layer by layer, and not a second time by the write that follows."""
    first = decoding.enter(2 * ANSWER_TOKENS)
    decoding.pool.step()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    second = decoding.enter()
    decoding.pool.step()
    decoding.pool.step()
    assert len(decoding.pool._groups) == 1
    # The second row itself, and one layer of the new batch: the old ones leave layer by layer.
    assert peak_beyond(held) < 2.4
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    while not second.is_over:
        decoding.pool.step()
    decoding.pool.step()
    assert not first.is_over
    assert peak_beyond(held) < 1.2


def test_rows_that_are_cut_one_by_one_are_not_copied() -> None:
    """They end at different slots from then on, and each is written where it ends."""
    num_tokens, num_steps = 4000, 3
    rows = [filled(seed, num_tokens - 9 * seed) for seed in range(3)]
    batch = RowKv.merge([RowKv.of(row) for row in rows])
    mx.eval(batch.rows)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    for step in range(num_steps):
        keys, values = tokens_of(step, 4)
        fetched = batch.update_and_fetch(*(mx.concatenate([each] * 3) for each in (keys, values)))
        mx.eval([each.sum() for each in fetched])
        del fetched
        batch.cut([step, 3 - step, 1])
    mx.eval(batch.rows)
    assert batch.gaps
    assert mx.get_peak_memory() - held < batch.nbytes / 4


def test_rows_that_grow_at_unequal_speed_are_copied_once_in_256_tokens(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row whose drafts are right beside a longer one whose drafts are not, and which is near the end of its room:
    to begin at its end again would be a copy of the batch for each few tokens. What they hold is never more than the
    account of memory knows of."""
    model = replace(model, sizes=replace(model.sizes, slot_tokens=KVCache.step))
    pool, num_answer_tokens, num_arrays = DecodePool(model, 8), 400, [0]
    pool._draft_support = DraftSupport(("trim",) * NUM_LAYERS, "", 0, PassCosts(), together=BatchCosts(PassCosts()))
    rows = []
    with drafts_tried():
        for num_tokens, spoilt in ((40, "all"), (240, "none")):
            drafter = LedDrafter([0] * num_answer_tokens, ACCEPTED[spoilt])
            rows.append(row_of(replace(request(prompt_of(num_tokens), num_answer_tokens), drafter=drafter)))
            entered(pool, model, rows[-1])
        for name in ("stacked", "with_room"):
            monkeypatch.setattr(kv_buffers, name, _counted(getattr(kv_buffers, name), num_arrays))
        while not rows[0].is_over:
            pool.step()
            [group] = [each for each in pool._groups if each.rows]
            held = [leaf.nbytes for leaf in flat_caches(group.generator._generation_batch.prompt_cache)]
            assert sum(held) <= pool.held_bytes()
    assert len(rows[1].generated) < num_answer_tokens // 6, "drafts were tried"
    num_copies = num_arrays[0] / (2 * NUM_LAYERS) - 2  # once where they joined, and once where one has left
    assert 1 <= num_copies <= 1 + num_answer_tokens / 256
    pool.discard()


def _counted(real: Callable[..., mx.array], num_calls: list[int]) -> Callable[..., mx.array]:
    def counting(*args: Any) -> mx.array:
        num_calls[0] += 1
        return real(*args)

    return counting


def test_a_row_that_outgrows_its_room_is_moved_layer_by_layer(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first tokens are written in place; where room ends one layer at a time is there twice."""
    monkeypatch.setattr("kvserve.engine.kv_buffers.LARGE_BYTES", 2**20)
    row = decoding.enter(2 * ANSWER_TOKENS, num_room_tokens=ANSWER_TOKENS)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    while len(row.generated) < ANSWER_TOKENS - 4:
        decoding.pool.step()
    assert peak_beyond(held) < 0.1
    while not row.is_over:
        decoding.pool.step()
    assert 0.4 < peak_beyond(held) < 0.6


def test_a_prefill_makes_room_once(model: LoadedModel) -> None:
    """Chunks are written into buffers that have room for the whole row; whoever has room already is left alone."""
    caches: list[Any] = model.new_caches()
    reserve(caches, 5000)
    assert all(cache.keys is None for cache in caches)
    model.module(mx.zeros((1, 100), mx.int32), cache=caches)
    before = [mx.array(each) for each in caches[0].keys_and_values()]
    reserve(caches, 5000)
    assert {cache.keys.shape[2] for cache in caches} == {cache.values.shape[2] for cache in caches} == {5000}
    buffers = [cache.keys for cache in caches]
    reserve(caches, 4000)
    assert all(cache.keys is buffer for cache, buffer in zip(caches, buffers, strict=True))
    assert all(mx.array_equal(a, b) for a, b in zip(caches[0].keys_and_values(), before, strict=True))
