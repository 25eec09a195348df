"""What a row draws behind each place of a draft, by the logits of one pass: its own processors and its own sampler, in
order, and only for as long as they draw what was drafted. So nobody sees a token that is not the row's, and nothing of
how it draws has to be taken back. It knows arrays, no caches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvserve.engine.sampling import LogitsProcessor, Sampler

type Draw = Callable[[mx.array, mx.array], mx.array]
"""What follows a token (1,), by logits (1, vocabulary): a token (1,), not computed."""


def draw(
    taken: mx.array, logits: mx.array, context: Any, processors: Sequence[LogitsProcessor], sampler: Sampler
) -> mx.array:
    """What follows `taken` (1,), by these logits (1, vocabulary): a token (1,), not computed. `context` is the row's
    TokenBuffer, which takes the token in. A row without processors draws many places (places, vocabulary) at once."""
    if processors:
        seen = context.update_and_fetch(taken)
        for processor in processors:
            logits = processor(seen, logits)
    return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def drawn_in_order(
    draw_next: Draw, pending: mx.array, draft: Sequence[int], logits: mx.array, has_failed: Callable[[], bool]
) -> list[int]:
    """The tokens that are drawn by logits (places, vocabulary), one after the other: those of the draft that are right,
    and the one that is drawn instead of the next, or behind all. A row that has failed draws no more."""
    drawn, taken = list[int](), pending
    for place in range(len(draft) + 1):
        token = int(draw_next(taken, logits[place : place + 1]).item())  # type: ignore[arg-type]
        drawn.append(token)
        if place == len(draft) or token != draft[place] or has_failed():
            break
        taken = mx.array([token], dtype=mx.uint32)
    return drawn


def right_of(all_drawn: Sequence[int], draft: Sequence[int]) -> list[int]:
    """The same of what was drawn at all places at once."""
    num_right = next((i for i, token in enumerate(draft) if token != all_drawn[i]), len(draft))
    return list(all_drawn[: num_right + 1])
