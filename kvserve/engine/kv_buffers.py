"""Room in the buffers of keys and values: who makes it in time writes in place, else all that is there is copied."""

from collections.abc import Sequence

import mlx.core as mx

STEP_TOKENS = 256
"""Buffers that grow have a multiple of so many slots."""

GROWTH_SHARE = 32
"""A long one grows by this part of what it holds, so that an answer of any length copies its prompt a few times only;
the price is 3 % of memory."""

LARGE_BYTES = 2**21
"""Layers of short rows stay lazy, as mlx-lm has them: to wait for each costs running streams more than it saves. Of
others no moment has all of them twice."""


def num_slots(num_tokens: int) -> int:
    """How many slots a buffer gets that must hold so many tokens and had too few."""
    return (-(-num_tokens // STEP_TOKENS) + num_tokens // GROWTH_SHARE // STEP_TOKENS) * STEP_TOKENS


def with_room(array: mx.array, num_used: int, size: int) -> mx.array:
    """The first slots of (rows, heads, slots, width), copied once into a buffer of so many."""
    rows, heads, _, width = array.shape
    roomy = mx.zeros((rows, heads, size, width), array.dtype)
    roomy[..., :num_used, :] = array[..., :num_used, :]
    return roomy


def gathered(array: mx.array, keep: mx.array, start: int, end: int) -> mx.array:
    """These rows of (rows, heads, slots, width) without the slots before `start`, and with room for a few tokens behind
    `end`. Cut before they are gathered, as a view of what is gathered could not be written in place."""
    return mx.take(array[..., start : num_slots(end + 1), :], keep, axis=0)


def stacked(parts: Sequence[tuple[mx.array | None, int]], num_rows: Sequence[int], longest: int) -> mx.array:
    """Arrays of (rows, heads, slots, width), of which the first so many slots are used, below one another and
    right-aligned at `longest`, each copied once. Behind it is room for a few tokens: when rows come and go, all of them
    are copied again."""
    form = next(array for array, _ in parts if array is not None)
    _, heads, _, width = form.shape
    joined = mx.zeros((sum(num_rows), heads, num_slots(longest + 1), width), form.dtype)
    first = 0
    for (array, num_used), count in zip(parts, num_rows, strict=True):
        if array is not None and num_used:
            joined[first : first + count, :, longest - num_used : longest] = array[..., :num_used, :]
        first += count
    return joined


def settle(*arrays: mx.array) -> None:
    """Compute large copies at once, before those of the next layer: what they are copied from can leave meanwhile."""
    if sum(array.nbytes for array in arrays) >= LARGE_BYTES:
        mx.eval(arrays)
