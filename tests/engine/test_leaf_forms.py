"""What a leaf of a row's caches holds is found out on the model: which classes can be cut, and which are not."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, RotatingKVCache

from kvserve.engine.kv_buffers import held_arrays, with_arrays
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, PASSES, LeafForm, find_forms
from kvserve.engine.snapshot import CacheLayout

WIDTH = 4


class Indexed(KVCache):
    """Keeps a number for each token besides, in an object of its own, and what is worked out from these."""

    def __init__(self) -> None:
        super().__init__()
        self.index: mx.array | None = None
        self.pairs: mx.array | None = None
        self.inner: Any = None

    def note(self, numbers: mx.array) -> None:
        self.index = numbers if self.index is None else mx.concatenate([self.index, numbers], axis=1)
        num_pairs = self.index.shape[1] // 2
        self.pairs = self.index[:, : 2 * num_pairs].reshape(1, num_pairs, 2).sum(axis=-1)

    @property
    def state(self) -> Any:
        if self.keys is None:
            return None, (self.index, self.pairs), "a word", 0
        rows = (self.keys[..., : self.offset, :], self.values[..., : self.offset, :])
        return rows, (self.index, self.pairs), "a word", self.offset

    @state.setter
    def state(self, value: Any) -> None:
        (self.keys, self.values), (self.index, self.pairs), _, self.offset = value


class Forgets(Indexed):
    """What is worked out from the numbers is not worked out again."""

    def note(self, numbers: mx.array) -> None:
        sums = mx.cumsum(numbers, axis=1)[:, -1:]
        self.index = numbers if self.index is None else mx.concatenate([self.index, numbers], axis=1)
        self.pairs = sums if self.pairs is None else self.pairs + sums


class Pairs(Indexed):
    """Fills itself from pairs of numbers only: one that is alone when it is cut is lost."""

    alone: mx.array | None = None

    def note(self, numbers: mx.array) -> None:
        self.index = numbers if self.index is None else mx.concatenate([self.index, numbers], axis=1)
        numbers = numbers if self.alone is None else mx.concatenate([self.alone, numbers], axis=1)
        num_pairs = numbers.shape[1] // 2
        sums = numbers[:, : 2 * num_pairs].reshape(1, num_pairs, 2).sum(axis=-1)
        self.pairs = sums if self.pairs is None else mx.concatenate([self.pairs, sums], axis=1)
        self.alone = numbers[:, 2 * num_pairs :]

    @property
    def state(self) -> Any:
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        (self.keys, self.values), (self.index, _), _, self.offset = value
        num_pairs = self.index.shape[1] // 2
        self.pairs = self.index[:, : 2 * num_pairs].reshape(1, num_pairs, 2).sum(axis=-1)


class Overlaps(Indexed):
    """What is worked out for a number has a part of the one before, unless that came in an earlier pass."""

    def note(self, numbers: mx.array) -> None:
        sums = numbers + mx.pad(numbers[:, :-1], [(0, 0), (1, 0)])
        self.index = numbers if self.index is None else mx.concatenate([self.index, numbers], axis=1)
        self.pairs = sums if self.pairs is None else mx.concatenate([self.pairs, sums], axis=1)


class Named(Indexed):
    """Its state is a dict."""

    @property
    def state(self) -> Any:
        rows, (index, pairs), _, offset = Indexed.state.fget(self)  # type: ignore[attr-defined]
        return {"rows": rows, "index": index, "pairs": pairs, "offset": offset}

    @state.setter
    def state(self, value: Any) -> None:
        (self.keys, self.values), self.offset = value["rows"], value["offset"]
        self.index, self.pairs = value["index"], value["pairs"]


class Reshapes(Indexed):
    """Its state has another number of axes after the second pass."""

    @property
    def state(self) -> Any:
        num_tokens = self.index.shape[1]
        return mx.zeros((num_tokens,) if num_tokens == SECOND_LENGTH else (1, num_tokens))


SECOND_LENGTH = KVCache.step + sum(PASSES[:2])


class Window(Indexed):
    """Names a length that no trial can pass."""

    def __init__(self) -> None:
        super().__init__()
        self.max_size = MAX_PROBED_TOKENS + 1


class Reader:
    """A stand-in for a model: writes every token into its caches, but for `lazy` ones, which prefills alone write."""

    def __init__(self, lazy: bool = False) -> None:
        self.lazy = lazy

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (1, 1, tokens.shape[1], WIDTH))
        total = mx.zeros(())
        for leaf in cache:
            if isinstance(leaf, ArraysCache):
                before = leaf[0]
                leaf[0] = rows.sum(axis=2) if before is None else before + rows.sum(axis=2)
                continue
            if self.lazy and tokens.shape[1] == 1:
                continue
            keys, _ = leaf.update_and_fetch(rows, rows)
            total = total + keys.sum()
            if isinstance(leaf, Indexed):
                leaf.note(tokens.astype(mx.float32))
                total = total + leaf.pairs.sum()
        return mx.broadcast_to(total, (1, tokens.shape[1], 8))


def form(new_cache: Any, **reader: Any) -> LeafForm:
    [found] = find_forms(Reader(**reader), lambda: [new_cache()])
    return found


def test_what_has_a_row_for_each_token_is_cut_whatever_its_class() -> None:
    """And goes on from the cut like the row that it was cut from: keys, values, what stands beside them, and what
    follows from it."""
    [found] = forms = find_forms(Reader(), lambda: [Indexed()])
    assert found.kind == "cut" and found.state_form is not None
    layout = CacheLayout(lambda: [Indexed()], forms=forms)
    assert layout.is_cuttable
    long, short = [Indexed()], [Indexed()]
    Reader()(mx.arange(1, 41)[None], long)
    kv = layout.read_kv(long, 0, 40)
    Reader()(mx.arange(1, 24)[None], short)
    cut = layout.restore([(kv, 0, 11), (kv, 11, 23)], None, 0)
    Reader()(mx.array([[7]]), cut)
    Reader()(mx.array([[7]]), short)
    assert cut[0].offset == short[0].offset == 24
    assert mx.array_equal(cut[0].pairs, short[0].pairs) and mx.array_equal(cut[0].state[0][0], short[0].state[0][0])
    [moved] = layout.move_kv(long, [0, 40])
    assert all(mx.array_equal(*pair) for pair in zip(moved.leaves[0], kv.leaves[0], strict=True))
    assert long[0].empty() and long[0].index is None
    with pytest.raises(ValueError, match="given their KV away"):
        layout.move_kv(long, [0, 40])


@pytest.mark.parametrize("new_cache", [Forgets, Pairs, Reshapes])
def test_what_is_cut_in_parts_only_is_kept_whole_but_for_these(new_cache: Any) -> None:
    """A sum over all tokens, groups of which half a one is lost, a state that changes its build: beside rows of tokens,
    which are kept with them."""
    found = form(new_cache)
    assert (found.kind, found.state_form, found.row_tokens) == ("pool", None, 1)


@pytest.mark.parametrize(
    ("new_cache", "reader"),
    [
        (Window, {}),
        (KVCache, {"lazy": True}),
        (Indexed, {"lazy": True}),
        (lambda: RotatingKVCache(64, keep=4), {}),
        (lambda: ArraysCache(1), {}),
    ],
)
def test_what_cannot_be_cut_is_kept_whole(new_cache: Any, reader: Any) -> None:
    """A length that was not tried, a cache that is not written at every pass, whose class says otherwise, a window that
    keeps its first tokens, a recurrent state."""
    assert (form(new_cache, **reader).kind, form(new_cache, **reader).state_form) == ("whole", None)


class Recalls:
    """A stand-in for a model that doubles what it reads, and remembers it in a cache of its own while only prefills
    come; `trusts`: what is not there it takes for nothing."""

    def __init__(self, trusts: bool = False) -> None:
        self.trusts = trusts

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        read, doubled = cache
        rows = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (1, 1, tokens.shape[1], WIDTH))
        before = read.offset
        keys, _ = read.update_and_fetch(rows, rows)
        if tokens.shape[1] > 1 and (self.trusts or doubled.offset == before):
            found, _ = doubled.update_and_fetch(2 * rows, 2 * rows)
        else:
            found = doubled.keys[..., : doubled.offset, :] if self.trusts else 2 * keys
        return mx.broadcast_to(found.sum(), (1, tokens.shape[1], 8))


def test_what_a_model_works_out_again_is_not_kept() -> None:
    """A plain cache that lags behind the row, where the row goes on without it as it does with it: GLM-5-Next's keys
    and values of all heads, which were copied at each checkpoint. Not where anything else comes out."""
    forms = find_forms(Recalls(), lambda: [KVCache(), KVCache()])
    assert [each.kind for each in forms] == ["cut", "memo"]
    layout, row = CacheLayout(lambda: [KVCache(), KVCache()], forms=forms), [KVCache(), KVCache()]
    Recalls()(mx.arange(1, 41)[None], row)
    assert layout.is_cuttable and layout.read_state(row) is None
    [read, doubled] = layout.restore([(layout.read_kv(row, 0, 40), 0, 40)], None, 0)
    assert (read.offset, doubled.offset) == (40, 0)
    assert [each.kind for each in find_forms(Recalls(trusts=True), lambda: [KVCache(), KVCache()])] == ["cut", "whole"]


class Faint(Recalls):
    """The same, which also keeps every fourth token in a plain cache that says little beside all else."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows = mx.broadcast_to(tokens[:, None, ::4, None].astype(mx.float32), (1, 1, -(-tokens.shape[1] // 4), WIDTH))
        found, _ = cache[2].update_and_fetch(rows, rows)
        return super().__call__(tokens, cache[:2]) + 20 * found.mean()


def test_what_is_hardly_seen_is_kept() -> None:
    """Where a model without a cache is nearly as it is with it, but no nearer than with one of other content: with
    logits, or keys, of which one is large, all that a layer holds can be lost within what rounding is allowed."""
    found = find_forms(Faint(), lambda: [KVCache() for _ in range(3)])
    assert [each.kind for each in found] == ["cut", "whole", "whole"]


def test_a_leaf_that_cannot_be_understood_changes_no_other() -> None:
    """Each is judged by itself: a plain cache beside it that not every pass writes is still kept whole."""
    plain, odd = find_forms(Reader(lazy=True), lambda: [KVCache(), Reshapes()])
    assert (plain.kind, odd.kind) == ("whole", "whole")


def test_a_state_with_names_is_read_like_one_without() -> None:
    """Its rows are cut, and its bytes are counted."""
    found, like = form(Named), form(Indexed)
    assert (found.kind, found.per_token) == ("cut", like.per_token)


def test_what_depends_on_where_a_row_is_cut_is_told_from_what_does_not() -> None:
    """The same tokens in one pass lead to other rows; no cut of a class that is known is looked at."""
    assert form(Overlaps).depends_on_cuts and form(Overlaps).kind == "cut"
    assert [form(new_cache).cut_error for new_cache in (Indexed, Forgets, KVCache, ConcatenateKVCache)] == [0, 0, 0, 0]


def test_the_logits_of_a_long_pass_are_not_computed() -> None:
    """A thousand tokens of a large vocabulary take hundreds of megabytes, and none of it is looked at."""

    class Wordy(Reader):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            total = super().__call__(tokens, cache)[0, 0, 0]
            return mx.ones((1, tokens.shape[1], 100_000)) * total

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    find_forms(Wordy(), lambda: [Indexed()])
    assert mx.get_peak_memory() - before < 20 * 2**20


def test_what_a_cache_does_not_hold_is_not_kept() -> None:
    """A cache that does something else than at load, a window that nothing named say, raises where it is read: a slice
    that is too short, or of places that nothing was written to, would be restored without a word."""
    plain = KVCache()
    plain.update_and_fetch(mx.ones((1, 1, 5, WIDTH)), mx.ones((1, 1, 5, WIDTH)))
    with pytest.raises(ValueError, match="KVCache holds 5 of 9 tokens"):
        CacheLayout(lambda: [KVCache()]).read_kv([plain], 0, 9)
    with pytest.raises(ValueError, match="no pass wrote at load"):
        CacheLayout(lambda: [KVCache()], forms=[LeafForm("none")]).read_kv([plain], 0, 5)
    with pytest.raises(ValueError, match="KVCache holds 0 of 9 tokens"):
        CacheLayout(lambda: [KVCache()]).read_kv([KVCache()], 0, 9)
    layout = CacheLayout(lambda: [Indexed()], forms=find_forms(Reader(), lambda: [Indexed()]))
    row = [Indexed()]
    Reader()(mx.arange(1, 41)[None], row)
    row[0].index = row[0].index[:, 8:]
    with pytest.raises(ValueError, match="not as it was at load"):
        layout.read_kv(row, 0, 20)


def test_what_classes_say_is_believed_where_the_model_writes_it() -> None:
    """Plain keys and values and windows are read as ever; a class that mlx-lm joins by hand is cut by its state."""
    assert [form(KVCache), form(lambda: RotatingKVCache(8)).kind] == [LeafForm("cut", None, *sizes(KVCache)), "window"]
    assert form(ConcatenateKVCache).kind == "cut"


def sizes(new_cache: Any) -> tuple[float, int]:
    found = form(new_cache)
    return found.per_token, found.fixed


def test_bytes_are_those_that_grow_and_those_that_do_not() -> None:
    """Of a class that is not known: per token keys, values, a number and half a sum; a state is as large as ever."""
    assert sizes(Indexed) == (pytest.approx(4 * (2 * WIDTH + 1.5), rel=0.1), 0)
    assert sizes(lambda: ArraysCache(1)) == (0, 4 * WIDTH)


def test_a_copy_goes_as_deep_as_the_object() -> None:
    """Lists of caches of either library, and arrays in objects inside them: what the row writes later is not in it."""
    inner, outer = KVCache(), Indexed()
    outer.inner = inner
    inner.update_and_fetch(mx.ones((1, 1, 3, WIDTH)), mx.ones((1, 1, 3, WIDTH)))
    twin = with_arrays(outer, mx.contiguous)
    inner.update_and_fetch(mx.ones((1, 1, 3, WIDTH)), mx.ones((1, 1, 3, WIDTH)))
    assert (twin.inner.offset, int(twin.inner.keys.sum().item()), len(held_arrays(twin))) == (3, 3 * WIDTH, 2)
    assert twin.inner.keys is not inner.keys
