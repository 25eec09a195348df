"""Pools of groups that overlap: mlx-vlm's caches forget the group before at the end of each pass, these remember it.

A pool has one entry for each group of tokens. Where groups overlap, an entry has a part of the group before, which a
pass knows for its own groups only: the first entry of each pass, and all that are decoded, lack it. Here the group
before goes through the model once more, ahead of the new ones, and its entry is dropped. Every pass then computes what
one pass over all tokens does. It knows mlx-vlm's classes and no model's name; which pools need it is found by trying.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import mlx.core as mx
from mlx_vlm.models.cache import BatchPoolingCache, PoolingCache

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import flat_caches, held_arrays
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, LeafForm, find_forms
from kvserve.engine.logits_error import logits_error
from kvserve.engine.vision import MAX_TWIN_ERROR, VlmDecoder

type Groups = tuple[mx.array, mx.array, Any]
"""What a model pools: values and gates (rows, tokens, width), and the position of the first one, of each row or all."""

NOTHING = (0.0, -mx.inf)
"""Values and gates in the place of a group that is not there: the same as a model puts there itself."""


class RememberingPool(PoolingCache):
    """A row's pool. `before`: values and gates of the newest group in it, or nothing."""

    def __init__(self, ratio: int) -> None:
        super().__init__(ratio)
        self.before: tuple[mx.array, mx.array] | None = None

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> Groups:
        """The groups that are full, behind the one before; nothing where none is."""
        values, gates, start = super().accumulate_windows(kv, gate, offset)
        if not values.shape[1]:
            return values, gates, start
        values, gates = _behind(self.before, (values, gates), self.ratio)
        self.before = (mx.contiguous(values[:, -self.ratio :]), mx.contiguous(gates[:, -self.ratio :]))
        return values, gates, start - self.ratio

    def update_and_fetch(self, px: mx.array) -> mx.array:
        """Add the entries (rows, groups, width) of these groups, but for that of the one before."""
        pooled: mx.array = super().update_and_fetch(px[:, 1:])
        return pooled

    @property  # type: ignore[misc]  # nobody sets it
    def state(self) -> tuple[Any, ...]:
        return (*super().state, self.before)

    @classmethod
    def merge(cls, caches: Sequence[Self], prefix_lens: Any = None) -> "RememberingPools":
        """What mlx-lm calls to make a batch."""
        return RememberingPools.merge(caches, prefix_lens)


class RememberingPools(BatchPoolingCache):
    """The pools of rows that decode together."""

    def __init__(self, ratio: int, left_padding: Any) -> None:
        super().__init__(ratio, left_padding)
        self.before: tuple[mx.array, mx.array] | None = None

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> Groups:
        """The same for each row; one that has fewer full groups is padded."""
        values, gates, starts = super().accumulate_windows(kv, gate, offset)
        if not values.shape[1]:
            return values, gates, starts
        values, gates = _behind(self.before, (values, gates), self.ratio)
        counts = zip(self._processed, self.remainder, self._pool_lengths, strict=True)
        ends = [processed - remainder - self.ratio * pooled for processed, remainder, pooled in counts]
        newest = (mx.array(ends)[:, None] + mx.arange(self.ratio))[..., None]
        self.before = (mx.take_along_axis(values, newest, axis=1), mx.take_along_axis(gates, newest, axis=1))
        return values, gates, starts - self.ratio

    def update_and_fetch(self, px: mx.array) -> mx.array:
        """Add the entries of the rows' groups, but for those of the groups before."""
        pooled: mx.array = super().update_and_fetch(px[:, 1:])
        return pooled

    @property  # type: ignore[misc]  # nobody sets it
    def state(self) -> tuple[Any, ...]:
        return (*super().state, self.before)

    @classmethod
    def merge(cls, caches: Sequence[Any], prefix_lens: Any = None) -> Self:
        batch: Self = super().merge(caches, prefix_lens)  # type: ignore[no-untyped-call]
        batch.before = _below([(cache.before, 1) for cache in caches], batch.ratio)
        return batch

    def filter(self, batch_indices: Any) -> None:
        super().filter(batch_indices)  # type: ignore[no-untyped-call]
        if self.before is not None:
            values, gates = self.before
            self.before = (values[batch_indices], gates[batch_indices])

    def extend(self, other: Self) -> None:
        self.before = _below([(each.before, each.batch_size) for each in (self, other)], self.ratio)
        super().extend(other)  # type: ignore[no-untyped-call]

    def extract(self, idx: int) -> RememberingPool:
        row = RememberingPool(self.ratio)
        vars(row).update(vars(super().extract(idx)))  # type: ignore[no-untyped-call]
        if self.before is not None and self._pool_lengths[idx]:
            values, gates = (mx.contiguous(each[idx : idx + 1]) for each in self.before)
            row.before = (values, gates)
        return row


def _behind(
    before: tuple[mx.array, mx.array] | None, groups: tuple[mx.array, mx.array], size: int
) -> tuple[mx.array, mx.array]:
    """Groups with the one before ahead of them."""
    led = before or _nothing(groups, groups[0].shape[0], size)
    values, gates = (mx.concatenate(list(pair), axis=1) for pair in zip(led, groups, strict=True))
    return values, gates


def _below(
    parts: Sequence[tuple[tuple[mx.array, mx.array] | None, int]], size: int
) -> tuple[mx.array, mx.array] | None:
    """The groups before of batches of so many rows, below one another."""
    like = next((before for before, _ in parts if before is not None), None)
    if like is None:
        return None
    stacked = [before or _nothing(like, num_rows, size) for before, num_rows in parts]
    values, gates = (mx.concatenate(list(each), axis=0) for each in zip(*stacked, strict=True))
    return values, gates


def _nothing(like: tuple[mx.array, mx.array], num_rows: int, size: int) -> tuple[mx.array, mx.array]:
    """In the place of the groups before of rows that have none."""
    values, gates = (
        mx.full((num_rows, size, array.shape[2]), empty, array.dtype)
        for array, empty in zip(like, NOTHING, strict=True)
    )
    return values, gates


# --- which pools of a model ------------------------------------------------------------------------------------------


def with_memory(decoder: VlmDecoder, forms: Sequence[LeafForm]) -> tuple[LeafForm, ...]:
    """Give a decoder such pools where what its own hold depends on where a prefill is cut. They stay where nothing
    depends on it any more and one pass computes what it did. Returns the forms of its leaves then."""
    sizes, found = _remember(decoder, forms)
    num_tokens = min(3 * max(sizes, default=0) + 1, MAX_PROBED_TOKENS)
    ours = finding(lambda: _in_one_pass(decoder, num_tokens))
    decoder.stand_in = _itself
    if not isinstance(ours, mx.array) or any(form.depends_on_cuts for form in found):
        return tuple(forms)
    if not logits_error(ours, _in_one_pass(decoder, num_tokens)) <= MAX_TWIN_ERROR:
        return tuple(forms)
    decoder.stand_in = partial(_stand_in, sizes)
    return found


def _remember(decoder: VlmDecoder, forms: Sequence[LeafForm]) -> tuple[frozenset[int], tuple[LeafForm, ...]]:
    """Pools that remember, for one size of groups after the other: what depends on cuts in one layer shows in those
    behind it."""
    sizes, found = frozenset[int](), tuple(forms)
    while (size := _forgotten(decoder, found)) is not None:
        sizes |= {size}
        decoder.stand_in = partial(_stand_in, sizes)
        again = finding(lambda: find_forms(decoder, decoder.make_cache))
        if isinstance(again, Exception):
            break
        found = again
    return sizes, found


def _forgotten(decoder: VlmDecoder, forms: Sequence[LeafForm]) -> int | None:
    """The size of groups of the first pool that depends on cuts."""
    leaves = zip(flat_caches(decoder.make_cache()), forms, strict=True)
    return next((leaf.ratio for leaf, form in leaves if type(leaf) is PoolingCache and form.depends_on_cuts), None)


def _itself(leaf: Any) -> Any:
    return leaf


def _stand_in(sizes: frozenset[int], leaf: Any) -> Any:
    return RememberingPool(leaf.ratio) if type(leaf) is PoolingCache and leaf.ratio in sizes else leaf


def _in_one_pass(decoder: VlmDecoder, num_tokens: int) -> mx.array:
    """Logits (vocabulary,) behind so many tokens."""
    caches = decoder.make_cache()
    logits: mx.array = decoder(mx.array([[1 + 37 * place % 89 for place in range(num_tokens)]]), caches)[0, -1]
    mx.eval(logits, held_arrays(caches))
    return logits
