"""Short prompts that wait together are prefilled in one padded pass, which reads the weights once for all of them.

A long chunk keeps the processor busy by itself, so that nothing is won by company; behind a deep row more is copied
than the weights are large.
"""

import time
from collections.abc import Sequence

from kvserve.engine.model import LoadedModel
from kvserve.engine.padded_pass import padded_pass
from kvserve.engine.prefill import ChunkLength, Prefill

SHORT_TOKENS = 128
"""A row with more of them to its next stop computes alone."""

NUM_COPIES = 3
"""How often the KV of a row that does not compute alone is read or written for it: into the batch and out of it."""


def companions(
    first: Prefill, prefills: Sequence[Prefill], model: LoadedModel, chunk_length: ChunkLength, max_seconds: float
) -> list[Prefill]:
    """`first` and those that are best computed with it, each to its next stop, in the order in which they came."""
    group = [first]
    if not model.cache_support.can_pad or not _is_short(first):
        return group
    for prefill in prefills:
        if prefill is not first and _is_short(prefill):
            grown = [*group, prefill]
            if _is_worth_it(grown, model) and chunk_length.fits(_num_padded_tokens(grown), max_seconds):
                group = grown
    return group


def step_together(group: Sequence[Prefill], model: LoadedModel, chunk_length: ChunkLength) -> int:
    """Compute every row to its next stop and wait for it; returns how many prompt tokens that were.

    Whatever the model raises leaves the rows as they were.
    """
    chunks = [prefill.tokens[prefill.num_done : prefill.num_done + prefill.num_to_stop] for prefill in group]
    started = time.perf_counter()
    caches = padded_pass(model.module, [prefill.caches for prefill in group], chunks)
    num_tokens = sum(len(chunk) for chunk in chunks)
    chunk_length.measured(num_tokens, time.perf_counter() - started)
    for prefill, own, chunk in zip(group, caches, chunks, strict=True):
        prefill.caches = own
        prefill.advance(len(chunk))
    return num_tokens


def _is_short(prefill: Prefill) -> bool:
    return 0 < prefill.num_to_stop <= SHORT_TOKENS and not prefill.is_alone


def _num_padded_tokens(group: Sequence[Prefill]) -> int:
    return len(group) * max(prefill.num_to_stop for prefill in group)


def _is_worth_it(group: Sequence[Prefill], model: LoadedModel) -> bool:
    """Whether padding is at most every second token, and what is copied less than the weights that are not read."""
    num_tokens = len(group) * max(prefill.num_done + prefill.num_to_stop for prefill in group)
    num_copied_bytes = NUM_COPIES * num_tokens * model.sizes.per_token
    is_dense = _num_padded_tokens(group) <= 2 * sum(prefill.num_to_stop for prefill in group)
    return is_dense and num_copied_bytes <= (len(group) - 1) * model.active_weight_bytes
