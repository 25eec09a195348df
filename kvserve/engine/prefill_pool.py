"""Prefill: prompts go through the model, alone or several short ones in one padded pass, and what happens when one of
them breaks.

A padded pass reads the weights once for all of its rows. A long chunk keeps the processor busy by itself, so that
nothing is won by company. A deep row stays alone, because what is behind it would be copied, and the others padded to
its depth.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvserve.engine.borders import described
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefill import ALIGNMENT_TOKENS, ChunkLength, Prefill
from kvserve.engine.ranks.decisions import GROUP, ChunkRow
from kvserve.engine.ranks.place import ALONE, Ranks, RanksLost
from kvserve.engine.rows import Row


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What one chunk brought: the rows that have so many tokens more between them, or one that failed and its error.

    `trouble`: rows that were to compute together could not, and none will from now on.
    """

    computed: tuple[Prefill, ...] = ()
    num_tokens: int = 0
    failed: tuple[Prefill, Exception] | None = None
    trouble: str = ""


class PrefillPool:
    """All rows that are being prefilled, in the order in which they came. Owned by the engine thread."""

    def __init__(self, model: LoadedModel, chunk_length: ChunkLength, ranks: Ranks = ALONE) -> None:
        self._model = model
        self._ranks = ranks
        self.chunk_length = chunk_length
        self._can_share = model.cache_support.can_pad
        self._prefills: list[Prefill] = []

    def __iter__(self) -> Iterator[Prefill]:
        return iter(self._prefills)

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, prefill: Prefill) -> None:
        """Take a row in behind the others."""
        self._prefills.append(prefill)

    def remove(self, row: Row) -> Prefill | None:
        """Take a row out between two chunks; None if it is not being prefilled."""
        found = next((prefill for prefill in self._prefills if prefill.row is row), None)
        if found is not None:
            self._prefills.remove(found)
        return found

    def discard(self) -> None:
        """Throw all of them away."""
        self._prefills.clear()

    def step(self, row: Row, seconds: float) -> PrefillStep:
        """One chunk of this row, of about so many seconds, or of several rows in one pass. One that fails is taken out,
        one that is through stays until it is taken out."""
        group = [self._at(each) for each in self._ranks.decided(GROUP, lambda: self._group(row, seconds))]
        for prefill in group:
            prefill.row.prefill_started_at = prefill.row.prefill_started_at or time.monotonic()
        try:
            num_tokens = self._ranks.together(lambda: self._compute(group, seconds))
        except Exception as error:  # noqa: BLE001 - a prefill touches no other row: a row's failure stays its own
            return self._failed(group, error)
        return PrefillStep(tuple(group), num_tokens)

    def _group(self, row: Row, seconds: float) -> tuple[ChunkRow, ...]:
        """Who computes together with this row."""
        group = [first := next(prefill for prefill in self._prefills if prefill.row is row)]
        if self._can_share:
            group = companions(first, self._prefills, self._model, self.chunk_length, seconds)
        return tuple(ChunkRow(each.row, each.num_done, each.num_to_stop) for each in group)

    def _at(self, chunk: ChunkRow) -> Prefill:
        """The prefill of a row, which must be where rank 0 has it: passes of equal shape at other places would add up
        to wrong text. Raises RanksLost."""
        found = next((prefill for prefill in self._prefills if prefill.row is chunk.row), None)
        if found is None or (found.num_done, found.num_to_stop) != (chunk.num_done_tokens, chunk.num_to_stop_tokens):
            raise RanksLost(f"{self._ranks.place} is out of step: row {chunk.row.serial} is not where rank 0 has it")
        return found

    def _compute(self, group: list[Prefill], seconds: float) -> int:
        """The chunk, and its length over all rows. Raises what the model raises."""
        if len(group) > 1:
            return step_together(group, self._model, self.chunk_length)
        [prefill] = group
        return prefill.step(self._model, self.chunk_length, seconds) if prefill.num_left else 0

    def _failed(self, group: list[Prefill], error: Exception) -> PrefillStep:
        """A row that computed alone is taken out. Of several, whose failure it is shows when each computes alone."""
        if len(group) > 1:
            self._can_share = False
            return PrefillStep(trouble=f"Short prompts are prefilled one by one from now on: {described(error)}")
        [prefill] = group
        self._prefills.remove(prefill)
        return PrefillStep(failed=(prefill, error))


SHORT_TOKENS = 128
"""A row with more of them to its next stop computes alone."""

SHALLOW_TOKENS = 1024
"""So does one that has more than that when it gets there: rows that share a pass hold their KV up to four times for the
moment, and the answers that they were admitted with are of that size."""

NUM_COPIES = 7
"""How often the KV of a row that does not compute alone is read or written for it: into the batch, once more where that
grows by the new tokens, and out of it."""

NEGLIGIBLE_COPY_BYTES = 32 * 2**20
"""Copied in a few milliseconds anywhere: less than describing another pass takes, however small the model."""


def companions(
    first: Prefill, prefills: Sequence[Prefill], model: LoadedModel, chunk_length: ChunkLength, max_seconds: float
) -> list[Prefill]:
    """`first` and those that are well computed with it, each to its next stop; the likest come first.

    The larger of two: of a group that was worth it with each that was added, and of one that may become worth it with
    the next, as seven may be where two are not.
    """
    if not _is_short(first):
        return [first]

    def fits(group: Sequence[Prefill]) -> bool:
        num_padded = len(group) * max(each.num_to_stop for each in group)
        return num_padded <= chunk_length.max_tokens and chunk_length.fits(num_padded, max_seconds)

    steady, hoped, found = [first], [first], [first]
    others = [prefill for prefill in prefills if prefill is not first and _is_short(prefill)]
    for prefill in sorted(others, key=lambda prefill: _difference(prefill, first)):
        if fits(larger := [*steady, prefill]) and _is_worth_it(larger, model):
            steady = larger
        if fits(larger := [*hoped, prefill]):
            hoped = larger
            found = hoped if _is_worth_it(hoped, model) else found
    return max(steady, found, key=len)


def step_together(group: Sequence[Prefill], model: LoadedModel, chunk_length: ChunkLength) -> int:
    """Compute every row to its next stop and wait for it; returns how many prompt tokens that were.

    Whatever the model raises leaves the rows as they were.
    """
    chunks = [prefill.tokens[prefill.num_done : prefill.num_done + prefill.num_to_stop] for prefill in group]
    started = time.perf_counter()
    caches = padded_pass(model.module, [prefill.caches for prefill in group], chunks)
    mx.clear_cache()  # as behind any chunk: see `Prefill.step`
    num_tokens = sum(len(chunk) for chunk in chunks)
    if max(len(chunk) for chunk in chunks) >= ALIGNMENT_TOKENS:
        chunk_length.measured(num_tokens, time.perf_counter() - started)
    for prefill, own, chunk in zip(group, caches, chunks, strict=True):
        prefill.caches = own
        prefill.advance(len(chunk))
    return num_tokens


def _is_short(prefill: Prefill) -> bool:
    return 0 < prefill.num_to_stop <= SHORT_TOKENS and _num_behind(prefill) <= SHALLOW_TOKENS


def _difference(one: Prefill, other: Prefill) -> int:
    """How unlike two rows are, in tokens of padding."""
    return abs(one.num_to_stop - other.num_to_stop) + abs(_num_behind(one) - _num_behind(other))


def _num_behind(prefill: Prefill) -> int:
    """Tokens that a row has when it is at its next stop."""
    return prefill.num_done + prefill.num_to_stop


def _is_worth_it(group: Sequence[Prefill], model: LoadedModel) -> bool:
    """Whether padding is at most every second token, in what is computed and in what is held, and less is copied than
    there are weights that are not read again, or next to nothing."""
    num_held = len(group) * max(_num_behind(prefill) for prefill in group)
    num_computed = len(group) * max(prefill.num_to_stop for prefill in group)
    is_dense = num_computed <= 2 * sum(prefill.num_to_stop for prefill in group)
    is_dense = is_dense and num_held <= 2 * sum(_num_behind(prefill) for prefill in group)
    num_copied_bytes = NUM_COPIES * num_held * model.sizes.per_token
    return is_dense and num_copied_bytes <= max((len(group) - 1) * model.active_weight_bytes, NEGLIGIBLE_COPY_BYTES)


def can_be_padded(caches: Sequence[Any]) -> bool:
    """Whether rows with such caches can share a pass: plain ones only. A window or a state would take the padding in,
    and a subclass may do other things than its parent."""
    return all(type(cache) is KVCache for cache in caches)


def padded_pass(
    module: Callable[..., Any], rows: Sequence[list[Any]], chunks: Sequence[Sequence[int]]
) -> list[list[KVCache]]:
    """Put each row's chunk through the model; returns evaluated caches of their own that hold it too.

    Each row's KV is at the right end of its buffers (as in mlx-lm's `BatchKVCache`), its new tokens follow at the left
    end of the chunk: the causal mask hides the padding behind them, and none of it is taken along.

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
