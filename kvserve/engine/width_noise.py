"""How far the logits of a pass over several tokens are from those of passes over one: nothing with some libraries,
rounding with others, as matrices of another height have another kernel. Then a greedy answer with drafts may part from
the one without where two tokens are nearly as likely. It knows arrays and a model's module, no request.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from kvserve.engine.kv_buffers import held_arrays
from kvserve.engine.pass_costs import MAX_PASS_TOKENS

NUM_TOKENS = 256
WIDTHS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class WidthNoise:
    """Passes of `width` tokens beside plain steps: the largest difference of a logit, and after how many of
    `num_tokens` tokens another one is the likeliest."""

    width: int
    max_difference: float
    num_other: int
    num_tokens: int


def find_width_noise(
    module: Callable[..., Any],
    new_caches: Callable[[], list[Any]],
    num_tokens: int = NUM_TOKENS,
    max_seconds: float = math.inf,
    clock: Callable[[], float] = perf_counter,
    widths: Sequence[int] = WIDTHS,
    min_tokens: int = MAX_PASS_TOKENS,
) -> tuple[WidthNoise, ...]:
    """Put a greedy answer of so many tokens through the model one by one, and in passes of these widths. Where the
    first `min_tokens` are the same to the bit in every width the others are not computed, nor are they where they would
    take longer than `max_seconds` with those before."""
    began_at = clock()
    token, step_caches, stepped = mx.array([[1]]), new_caches(), list[mx.array]()
    caches = {width: new_caches() for width in widths}
    found = {width: WidthNoise(width, 0.0, 0, 0) for width in widths}
    for num_done in range(MAX_PASS_TOKENS, num_tokens + 1, MAX_PASS_TOKENS):
        tokens, stepped = [], []
        for _ in range(MAX_PASS_TOKENS):
            logits = module(token, cache=step_caches)[0, -1]
            mx.eval(logits, held_arrays(step_caches))
            tokens.append(int(token.item()))  # type: ignore[arg-type]
            stepped.append(logits)
            token = mx.argmax(logits)[None, None]
        expected = mx.stack(stepped).astype(mx.float32)
        for width in widths:
            passed = _passed(module, caches[width], tokens, width).astype(mx.float32)
            found[width] = _with(found[width], passed, expected)
        seconds_each = (clock() - began_at) / num_done
        is_enough = num_done >= min_tokens and not is_noisy(found.values())
        if is_enough or seconds_each * (num_done + MAX_PASS_TOKENS) > max_seconds:
            break
    return tuple(found.values())


def is_noisy(noises: Iterable[WidthNoise]) -> bool:
    """Whether passes of any width have other logits than single steps."""
    return any(noise.max_difference != 0 for noise in noises)


def agreeing_width(noises: Sequence[WidthNoise]) -> int:
    """The widest pass whose logits, and those of all narrower ones, are those of plain steps to the bit."""
    width = 1
    for noise in sorted(noises, key=lambda each: each.width):
        if noise.max_difference > 0:
            break
        width = noise.width
    return width


def widths_between(noises: Sequence[WidthNoise], max_width: int) -> tuple[int, ...]:
    """Those up to the agreeing one, and to the widest that there may be, that were not tried."""
    tried = {noise.width for noise in noises}
    return tuple(width for width in range(2, 1 + min(agreeing_width(noises), max_width)) if width not in tried)


def told(noises: Sequence[WidthNoise], *, is_exact: bool) -> str:
    """What a person reads of it."""
    if not is_noisy(noises):
        return "Drafts: passes of several tokens have the logits of single steps, to the bit."
    worst = max(noises, key=lambda each: each.max_difference)
    said = (
        f"Drafts: logits of a pass of {worst.width} tokens are up to {worst.max_difference:.1e} from those of single "
        f"steps; another token is the likeliest after {worst.num_other} of {worst.num_tokens}{_cut_short(worst)}."
    )
    width = agreeing_width(noises)
    return f"{said} So a pass has at most {width} tokens." if is_exact and width > 1 else said


def _cut_short(noise: WidthNoise) -> str:
    return f" ({NUM_TOKENS} would take too long beside the load)" if noise.num_tokens < NUM_TOKENS else ""


def _passed(module: Callable[..., Any], caches: list[Any], tokens: Sequence[int], width: int) -> mx.array:
    """Logits (tokens, vocabulary) of passes of so many tokens."""
    parts = []
    for start in range(0, len(tokens), width):
        parts.append(module(mx.array([list(tokens[start : start + width])]), cache=caches)[0])
        mx.eval(parts[-1], held_arrays(caches))
    return mx.concatenate(parts)


def _with(noise: WidthNoise, found: mx.array, expected: mx.array) -> WidthNoise:
    difference = mx.where(found == expected, 0, mx.abs(found - expected)).max()
    is_other = mx.argmax(found, axis=-1) != mx.argmax(expected, axis=-1)
    return WidthNoise(
        noise.width,
        max(noise.max_difference, float(difference.item())),  # type: ignore[arg-type]
        noise.num_other + int(is_other.sum().item()),  # type: ignore[arg-type]
        noise.num_tokens + len(found),
    )
