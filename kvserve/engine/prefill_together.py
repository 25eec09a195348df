"""Short prompts that wait together are prefilled in one padded pass, which reads the weights once for all of them.

A long chunk keeps the processor busy by itself, so that nothing is won by company. A deep row stays alone, because what
is behind it would be copied, and the others padded to its depth.
"""

import time
from collections.abc import Sequence

import mlx.core as mx

from kvserve.engine.model import LoadedModel
from kvserve.engine.padded_pass import padded_pass
from kvserve.engine.prefill import ALIGNMENT_TOKENS, ChunkLength, Prefill

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
