"""How the tests' tiny models compute recurrent layers: the very numbers of mlx-lm's own loop, in less time.

Without a kernel mlx-lm computes the gated delta rule in ten small operations for each token, which took most of a
prefill of a tiny hybrid: 0.2 ms a token. NumPy does the same operations on the same numbers in the same order, so the
results are the same to the bit, wherever a prompt is cut. It stands in only where that was found to be so (MLX may add
in another order elsewhere), for float32 and for more than a few tokens; `make full` computes with mlx-lm's loop.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta

from tests.laws import IS_FULL

type Arguments = tuple[Any, ...]

FEW_TOKENS = 4
"""Fewer of a step are not worth to be waited for."""

_ops = gated_delta.gated_delta_ops


def by_token(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As mlx-lm's `gated_delta_ops`: q and k (B, T, Hk, Dk), v (B, T, Hv, Dv), g and beta (B, T, Hv), state (B, Hv,
    Dv, Dk), mask (B, T); returns (B, T, Hv, Dv) and the new state."""
    given = [each for each in (q, k, v, g, beta, state) if each is not None]
    if q.shape[1] < FEW_TOKENS or g.ndim != 3 or any(each.dtype != mx.float32 for each in given) or not _is_same():
        return _ops(q, k, v, g, beta, state, mask)
    return _by_token(q, k, v, g, beta, state, mask)


def _by_token(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    (num_rows, num_tokens, num_key_heads, width), (num_heads, value_width) = q.shape, v.shape[-2:]
    shape = (num_tokens, width, num_rows, num_heads, value_width)

    def wide(array: mx.array) -> Any:
        """(T, Dk, B * Hv * Dv), of what each key head has and each width of values shares."""
        each = np.repeat(np.asarray(array), num_heads // num_key_heads, axis=2).transpose(1, 3, 0, 2)
        return np.broadcast_to(each[..., None], shape).reshape(num_tokens, width, -1)

    def flat(array: Any) -> Any:
        """(T, B * Hv * Dv), of what each head has and each width of values shares."""
        each = array.swapaxes(0, 1)[..., None]
        return np.broadcast_to(each, (num_tokens, *shape[2:])).reshape(num_tokens, -1)

    queries, keys, decays, rates = wide(q), wide(k), flat(np.asarray(g)), flat(np.asarray(beta))
    values = np.asarray(v).swapaxes(0, 1).reshape(num_tokens, -1)
    is_real = flat(np.broadcast_to(np.asarray(mask)[..., None], g.shape)) if mask is not None else None
    held = np.zeros((width, values.shape[1]), np.float32)
    if state is not None:
        held[:] = np.asarray(state).transpose(3, 0, 1, 2).reshape(width, -1)
    product, change, out = np.empty_like(held), np.empty(held.shape[1], np.float32), np.empty_like(values)
    for token in range(num_tokens):
        before = held.copy() if is_real is not None and not is_real[token].all() else None
        np.multiply(held, decays[token], out=held)
        np.multiply(held, keys[token], out=product)
        np.add.reduce(product, axis=0, out=change)
        np.subtract(values[token], change, out=change)
        np.multiply(change, rates[token], out=change)
        np.multiply(keys[token], change, out=product)
        np.add(held, product, out=held)
        np.multiply(held, queries[token], out=product)
        np.add.reduce(product, axis=0, out=out[token])
        if before is not None and is_real is not None:
            np.copyto(held, before, where=~is_real[token])
    answer = out.reshape(num_tokens, *shape[2:]).swapaxes(0, 1)
    return mx.array(answer), mx.array(held.reshape(shape[1:]).transpose(1, 2, 3, 0))


def example(num_rows: int, num_tokens: int, *, is_masked: bool = False) -> Arguments:
    """Arguments of a tiny model's shapes."""
    draw = np.random.default_rng(num_tokens)

    def drawn(*shape: int) -> mx.array:
        return mx.array(draw.normal(size=(num_rows, *shape)).astype(np.float32))

    q, k, v, state = *(drawn(num_tokens, 2, 16) for _ in range(2)), drawn(num_tokens, 4, 16), drawn(4, 16, 16)
    g, beta = (mx.sigmoid(drawn(num_tokens, 4)) for _ in range(2))
    mask = mx.arange(num_tokens)[None] >= mx.arange(num_rows)[:, None] if is_masked else None
    return q, k, v, g, beta, state, mask


def are_equal(arguments: Arguments, compute: Callable[..., tuple[mx.array, mx.array]]) -> bool:
    """Whether this comes to the numbers of mlx-lm's loop, to the bit."""
    pairs = zip(compute(*arguments), _ops(*arguments), strict=True)
    return all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)


@cache
def _is_same() -> bool:
    return are_equal(example(2, 8), _by_token)


def stand_in() -> None:
    """From now on recurrent layers are computed so in this process, but in `make full`. Idempotent."""
    if not IS_FULL:
        gated_delta.gated_delta_ops = by_token
