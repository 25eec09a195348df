"""Pools inside caches are kept with the tokens, once for all checkpoints; what else a leaf holds at each of them."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import KVCache

from benchmarks.tiny_families import write_model
from kvserve.engine.blobs import decode_kv, encode_kv
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, LeafForm, find_forms
from kvserve.engine.model import load
from kvserve.engine.self_check import check_caches
from kvserve.engine.snapshot import CacheLayout, KvSlice, merged
from tests.engine.odd_caches import DEEPSEEK_V41
from tests.laws import num_examples

WIDTH = 4
NUM_TOKENS = 60


class Pool:
    """The sum of each full group of tokens, the tokens of the one that is not full, and a window."""

    size = 4

    def __init__(self) -> None:
        self.offset = 0
        self.sums: mx.array | None = None
        self.open = mx.zeros((1, 0, WIDTH))
        self.window = mx.zeros((1, 0, WIDTH))

    def add(self, rows: mx.array) -> None:
        self.offset += rows.shape[1]
        self.window = mx.concatenate([self.window, rows], axis=1)[:, -5:]
        rows = mx.concatenate([self.open, rows], axis=1)
        num_full = rows.shape[1] - rows.shape[1] % self.size
        self.open = rows[:, num_full:]
        if num_full:
            self.pool(rows[:, :num_full].reshape(1, -1, self.size, WIDTH).sum(axis=2))

    def pool(self, sums: mx.array) -> None:
        self.sums = sums if self.sums is None else mx.concatenate([self.sums, sums], axis=1)

    @property
    def state(self) -> Any:
        return self.sums, self.open, self.window, mx.array(self.offset)


class OfThree(Pool):
    size = 3


class Deep(Pool):
    """The same in a list of an object of its own, the tokens on the last axis."""

    class Inner:
        def __init__(self) -> None:
            self.held: list[Any] = [None, None]

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def pool(self, sums: mx.array) -> None:
        before = [] if self.inner.held[1] is None else [self.inner.held[1]]
        self.inner.held[1] = mx.concatenate([*before, sums.swapaxes(1, 2)], axis=2)

    @property
    def state(self) -> Any:
        return self.inner.held[1], self.open, self.window, mx.array(self.offset)


class Rewrites(Pool):
    """Later groups change what is held of the first one."""

    def pool(self, sums: mx.array) -> None:
        super().pool(sums)
        self.sums = mx.concatenate([self.sums[:, :1] + 1, self.sums[:, 1:]], axis=1)


class PrefillsOnly(Pool):
    """A single token makes no group full."""

    def add(self, rows: mx.array) -> None:
        if rows.shape[1] > 1:
            super().add(rows)


class Minds(Pool):
    """Begins anew where its pool is not the very one that it made."""

    made: Any = None

    def pool(self, sums: mx.array) -> None:
        if self.made is not self.sums:
            self.sums = None
        super().pool(sums)
        self.made = self.sums


class NamesMore(Pool):
    """May do otherwise behind a length that is too long to be tried."""

    max_size = MAX_PROBED_TOKENS + 1


class Reader:
    """A stand-in for a model that writes its tokens into pools and plain caches."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows = mx.sin(tokens[..., None] * mx.arange(1, WIDTH + 1).astype(mx.float32))
        total = mx.zeros(())
        for leaf in cache:
            if isinstance(leaf, Pool):
                leaf.add(rows)
            else:
                total = total + leaf.update_and_fetch(rows[:, None], rows[:, None])[0].sum()
        return mx.broadcast_to(total, (1, tokens.shape[1], 8))


def caches() -> list[Any]:
    return [Pool(), KVCache(), OfThree(), Deep()]


def tokens(start: int, end: int) -> mx.array:
    return mx.arange(start + 1, end + 1)[None]


@cache
def forms() -> tuple[LeafForm, ...]:
    return find_forms(Reader(), caches)


@cache
def layout() -> CacheLayout:
    return CacheLayout(caches, forms=forms())


def row(*ends: int) -> list[Any]:
    """A row in passes that end at these places."""
    found = caches()
    for start, end in pairwise((0, *ends)):
        Reader()(tokens(start, end), found)
    return found


def held(leaf: Any) -> list[mx.array]:
    """All that it holds; of a plain cache without the room that it has."""
    if isinstance(leaf, Pool):
        return list(leaf.state)
    return [array[..., : leaf.offset, :] for array in (leaf.keys, leaf.values)]


def are_same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(mx.array_equal(*pair) for one, other in pairs for pair in zip(held(one), held(other), strict=True))


def test_the_size_of_groups_is_found_whatever_holds_the_pool() -> None:
    """From the numbers of rows: it need not be named. What is plain beside them is cut as ever."""
    assert [(form.kind, form.row_tokens) for form in forms()] == [("pool", 4), ("cut", 1), ("pool", 3), ("pool", 4)]
    assert not layout().is_cuttable


@pytest.mark.parametrize("new_cache", [Rewrites, PrefillsOnly, Minds, NamesMore])
def test_what_is_no_pool_is_kept_whole(new_cache: Any) -> None:
    """Rows that change later, that single tokens add none to, or that the object does not go on from; a length that was
    not tried."""
    [found] = find_forms(Reader(), lambda: [new_cache()])
    assert (found.kind, found.pool_form) == ("whole", None)


@settings(max_examples=num_examples(25), deadline=None)
@given(st.sets(st.integers(1, NUM_TOKENS - 1), max_size=6), st.data())
def test_however_its_tokens_are_kept_a_row_goes_on_as_it_was(borders: set[int], data: Any) -> None:
    """In slices between any tokens, some joined, some cut again, from the row as it was then or is later, through a
    file; and the state of its end."""
    ends = [*sorted(borders), NUM_TOKENS]
    live, slices = row(NUM_TOKENS), []
    for start, end in pairwise((0, *ends)):
        slices.append(layout().read_kv(live if data.draw(st.booleans()) else row(end), start, end))
    state = layout().read_state(live)
    assert state is not None
    if len(slices) > 1 and data.draw(st.booleans()):
        cut = data.draw(st.integers(1, len(slices) - 1))
        slices[cut - 1 : cut + 1] = [merged([(each, 0, each.num_tokens) for each in slices[cut - 1 : cut + 1]])]
    pieces: list[tuple[KvSlice, int, int]] = []
    for each in (decode_kv(*encode_kv(each)) for each in slices):
        middle = data.draw(st.integers(0, each.num_tokens))
        parts = [part for part in ((each, 0, middle), (each, middle, each.num_tokens)) if part[1] < part[2]]
        pieces += [(merged([part]), 0, part[2] - part[1]) if data.draw(st.booleans()) else part for part in parts]
    restored = layout().restore(pieces, state, 5)
    assert are_same(restored, live)
    for start, end in ((NUM_TOKENS, NUM_TOKENS + 1), (NUM_TOKENS + 1, NUM_TOKENS + 9)):
        for each in (live, restored):
            Reader()(tokens(start, end), each)
    assert are_same(restored, live)


def test_a_row_that_moves_leaves_its_pool_too() -> None:
    """What is left of it has none; what was kept goes on as the row was."""
    live, before = row(41, 42), row(41, 42)
    slices = layout().move_kv(live, [0, 7, 42])
    state = layout().read_state(live)
    assert live[0].sums is None and live[3].inner.held[1] is None and live[0].open.shape == (1, 2, WIDTH)
    assert are_same(layout().restore_moved([(each, 0, each.num_tokens) for each in slices], state, 5), before)
    with pytest.raises(ValueError, match="given their KV away"):
        layout().move_kv(live, [0, 7, 42])
    with pytest.raises(ValueError, match="Pool holds 0 of 42 tokens"):
        CacheLayout(lambda: [Pool()], forms=forms()[:1]).move_kv(live[:1], [0, 7, 42])


def test_wrong_records_are_other_rows() -> None:
    """The controls: rows of another prompt, a state of a token before, groups that begin one token later."""
    live = row(NUM_TOKENS)
    kv, state = layout().read_kv(live, 0, NUM_TOKENS), layout().read_state(live)
    other = caches()
    Reader()(tokens(100, 100 + NUM_TOKENS), other)
    whole = [(kv, 0, NUM_TOKENS)]
    assert are_same(layout().restore(whole, state, 0), live)
    assert not are_same(layout().restore([(layout().read_kv(other, 0, NUM_TOKENS), 0, NUM_TOKENS)], state, 0), live)
    assert not are_same(layout().restore(whole, layout().read_state(row(NUM_TOKENS - 1)), 0), live)
    assert not are_same(layout().restore([(kv, 1, NUM_TOKENS)], state, 0), live)


def test_a_checkpoint_does_not_grow_with_the_row() -> None:
    """It was a copy of all that the leaf held."""
    pools = CacheLayout(lambda: [Pool()], forms=forms()[:1])
    short, long = ([each[0]] for each in (row(40), row(2000)))
    states = [pools.read_state(each) for each in (short, long)]
    assert states[0] is not None and states[1] is not None and states[0].num_bytes == states[1].num_bytes
    whole = CacheLayout(lambda: [Pool()], forms=[LeafForm("whole")]).read_state(long)
    assert whole is not None and whole.num_bytes > 30 * states[1].num_bytes
    assert pools.read_kv(long, 0, 2000).num_bytes == 500 * WIDTH * 4


def test_what_a_pool_does_not_hold_is_not_kept() -> None:
    """Where it does something else than at load: fewer rows than there are full groups, or arrays of two lengths."""
    pools, short = CacheLayout(lambda: [Pool()], forms=forms()[:1]), row(40)[:1]
    short[0].sums = short[0].sums[:, 1:]
    with pytest.raises(ValueError, match="Pool holds 36 of 40 tokens"):
        pools.read_kv(short, 0, 40)


def test_compressed_groups_of_a_model_are_kept_once() -> None:
    """mlx-lm's DeepSeek V4.1: windows and pools in one object of a layer."""
    model = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(DEEPSEEK_V41))
    found = find_forms(model, model.make_cache)
    assert [(form.kind, form.row_tokens) for form in found] == [("whole", 1), ("pool", 4), ("whole", 1), ("pool", 4)]


@pytest.mark.long
def test_of_glm_5_next_a_checkpoint_has_what_does_not_grow(tmp_path: Path) -> None:
    """A pool beside plain keys, and keys and values of all heads, which prefills remember: what is kept of a token is
    less than a row holds of it."""
    model = load(write_model(tmp_path, "mlx-vlm", "glm5_next"), 4096)
    kinds = {form.kind for form in model.leaf_forms or ()}
    assert {"cut", "pool", "memo"} <= kinds <= {"cut", "pool", "memo", "whole", "none"}
    assert model.sizes.kept(0, 100) - model.sizes.fixed < 50 * model.sizes.per_token
    support = check_caches(model)
    assert (support.can_batch, support.can_keep, support.cut_tokens, support.notes) == (True, True, 1, ())
    kept, live, sizes = CacheLayout(model.new_caches, forms=model.leaf_forms), model.new_caches(), []
    for _ in range(2):
        model.module(mx.arange(1, 301)[None], cache=live)
        state = kept.read_state(live)
        assert state is not None
        sizes.append(state.num_bytes)
    assert sizes[0] == sizes[1]
