"""Plain arithmetic in the place of Metal kernels for which mlx-lm and mlx-vlm have no other code, so that their
families are tried where there is no Metal.

It knows the sources of these kernels and nothing of the server, which never sees it. What a library does around a
kernel runs as it is. Each function says what the source computes, with its roundings; sums are MLX's own in float32, in
another order than a threadgroup's.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

type Arithmetic = Callable[..., Sequence[mx.array]]
"""A kernel's inputs, in order, and its template's values, by name -> its outputs, in any shape of as many values."""


def are_needed() -> bool:
    """Whether this machine has no Metal."""
    return not mx.metal.is_available()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Let both libraries compute with plain arithmetic what they have kernels for alone. With Metal nothing changes.

    Raises ImportError and AttributeError for a library in which a kernel has another place.
    """
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), arithmetic in PLAIN.items() if are_needed() else ():
            patch.setattr(importlib.import_module(module), name, _called_as_a_kernel(arithmetic))
        yield


def _called_as_a_kernel(arithmetic: Arithmetic) -> Callable[..., list[mx.array]]:
    """What is called like the result of `mx.fast.metal_kernel`; how its threads lie says nothing here."""

    def call(
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        outputs = arithmetic(*inputs, **dict(template))
        wanted = zip(outputs, output_shapes, output_dtypes, strict=True)
        return [output.reshape(shape).astype(dtype) for output, shape, dtype in wanted]

    return call


def _float(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _rstd(values: mx.array, eps: mx.array) -> mx.array:
    """1 : the root of the mean square of the last axis, (..., 1)."""
    return mx.rsqrt(mx.sum(values * values, axis=-1, keepdims=True) / values.shape[-1] + eps)


# --- BitNet ----------------------------------------------------------------------------------------------------------


def bitlinear_matmul(
    x: mx.array, packed: mx.array, scale: mx.array, *, invert_weight_scales: bool, in_features: int, **_: Any
) -> Sequence[mx.array]:
    """x (rows, in) times weights of two bits each, 0 to 2 for -1 to 1, and one scale: the four in a byte of packed
    (out / 4, in) belong to outputs that lie a quarter of all apart."""
    bits = [(packed.reshape(-1, in_features) >> shift) & 3 for shift in (0, 2, 4, 6)]
    weights = _float(mx.concatenate(bits)) - 1
    return [_float(x) @ weights.T * _float(1 / scale[0] if invert_weight_scales else scale[0])]


# --- Muse Spark ------------------------------------------------------------------------------------------------------


def expert_routing(
    logits: mx.array, bias: mx.array, multiplier: mx.array, eps: mx.array, scale: mx.array, *, E: int, K: int
) -> Sequence[mx.array]:
    """The K of E experts with the largest biased sigmoid, the first of equal ones first, and their weights: sigmoids
    without the bias, as shares of their sum."""
    x = _float(logits).reshape(-1, E) * multiplier
    rest = 1 / (1 + mx.exp(mx.abs(x)))
    scores = mx.where(x < 0, rest, 1 - rest)
    biased, experts = scores + bias, mx.arange(E)
    winners, chosen = [], []
    for _ in range(K):
        winner = mx.min(mx.where(biased == mx.max(biased, axis=-1, keepdims=True), experts, E), axis=-1, keepdims=True)
        winners.append(winner)
        chosen.append(mx.sum(mx.where(experts == winner, scores, 0), axis=-1, keepdims=True))
        biased = mx.where(experts == winner, -mx.inf, biased)
    total = sum(chosen, start=mx.array(0.0))
    return [mx.concatenate(winners, axis=-1), mx.concatenate(chosen, axis=-1) / (total + eps) * scale]


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, norm_weight: mx.array, eps: mx.array, *, T: mx.Dtype, D: int, K: int, **_: Any
) -> Sequence[mx.array]:
    """A token's K outputs of experts, each scaled and normed, added with their weights in order, each sum in T."""
    values = _float(experts).reshape(-1, K, D) * _float(norm_weight)
    normed = values * _rstd(values, eps) * _float(weights.astype(T)).reshape(-1, K, 1)
    added = mx.zeros((normed.shape[0], D))
    for k in range(K):
        added = _float((added + normed[:, k]).astype(T))
    return [added]


def qk_norm(qkvg: mx.array, scale: mx.array, eps: mx.array, **shape: Any) -> Sequence[mx.array]:
    """The heads of q and k, which begin a row of qkvg, normed; q is scaled after it was rounded."""
    heads = _normed_heads(qkvg, scale, eps, **shape)
    return [heads[:, : shape["HQ"]], heads[:, shape["HQ"] :]]


def qk_norm_rope(
    qkvg: mx.array,
    scale: mx.array,
    eps: mx.array,
    offset: mx.array,
    seq_len: mx.array,
    log2_base: mx.array,
    *,
    OFFSET_STRIDE: int,
    **shape: Any,
) -> Sequence[mx.array]:
    """`qk_norm`, then neighbours are turned by their places: those of a row begin at its offset, one for all or one
    each. Places are counted without a sign."""
    heads = _normed_heads(qkvg, scale, eps, **shape)
    num_rows, half = heads.shape[0], shape["D"] // 2
    row = mx.arange(num_rows)
    places = (row % seq_len + offset[row // seq_len * OFFSET_STRIDE]).astype(mx.uint32)
    theta = _float(places)[:, None, None] * mx.power(2.0, -(_float(mx.arange(half)) / half) * log2_base)
    cos, sin = mx.cos(theta), mx.sin(theta)
    even, odd = heads[..., ::2], heads[..., 1::2]
    turned = mx.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(heads.shape)
    return [turned[:, : shape["HQ"]], turned[:, shape["HQ"] :]]


def _normed_heads(qkvg: mx.array, scale: mx.array, eps: mx.array, *, T: mx.Dtype, D: int, HQ: int, HK: int) -> mx.array:
    """(rows, HQ + HK, D) in float32, of values that T has."""
    values = _float(qkvg.reshape(-1, 2 * (HQ + HK), D)[:, : HQ + HK])
    normed = _float((values * _rstd(values, eps)).astype(T))
    return mx.concatenate([_float((normed[:, :HQ] * scale).astype(T)), normed[:, HQ:]], axis=1)


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, eps: mx.array, **_: Any) -> Sequence[mx.array]:
    """What attention says, (B, H, L, D), normed by heads, times the sigmoid of its gate (B, L, H * D)."""
    values = _float(x.transpose(0, 2, 1, 3))
    sigmoid = 1 / (1 + mx.exp(-_float(gate).reshape(values.shape)))
    return [values * _rstd(values, eps) * sigmoid]


def norm_add(
    branch: mx.array,
    stream: mx.array,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array,
    post_eps: mx.array,
    *,
    T: mx.Dtype,
    POST_SCALE: bool,
    **_: Any,
) -> Sequence[mx.array]:
    """A branch in T, scaled where POST_SCALE says so, normed and rounded, added to the stream in float32: a share of
    each."""
    values = _float(branch)
    if POST_SCALE:
        values = _float((_float(post_weight.astype(T)) * values).astype(T))
    normed = _float((values * _rstd(values, post_eps)).astype(T))
    return [_float(alpha) * _float(stream) + _float(beta) * normed]


def norm_add_norm(*inputs: mx.array, **template: Any) -> Sequence[mx.array]:
    """`norm_add`, and the sum normed for what reads it: the last two inputs are this norm's weight and its eps."""
    [stream] = norm_add(*inputs[:-2], **template)
    return [stream, *pre_norm(stream, *inputs[-2:])]


def pre_norm(stream: mx.array, weight: mx.array, eps: mx.array, **_: Any) -> Sequence[mx.array]:
    """The stream normed in float32 and scaled."""
    values = _float(stream)
    return [values * _rstd(values, eps) * _float(weight)]


_MUSE_SPARK: Mapping[tuple[str, str], Arithmetic] = {
    ("expert_routing", "_routing_kernel"): expert_routing,
    ("norm_add_norm", "_norm_add_norm_kernel"): norm_add_norm,
    ("norm_add_norm", "_norm_add_kernel"): norm_add,
    ("norm_add_norm", "_pre_norm_kernel"): pre_norm,
    ("post_expert_norm_combine", "_expert_combine_kernel"): post_expert_norm_combine,
    ("qk_norm", "_qk_norm_kernel"): qk_norm,
    ("qk_norm_rope", "_qk_norm_rope_kernel"): qk_norm_rope,
    ("rms_norm_sigmoid_gate", "_norm_gate_kernel"): rms_norm_sigmoid_gate,
}
"""By module of a library's `kernels` and name in it."""

PLAIN: Mapping[tuple[str, str], Arithmetic] = {
    ("mlx_lm.models.bitlinear_layers", "_bitlinear_kernel"): bitlinear_matmul,
    ("mlx_vlm.models.bitnet.bitlinear", "_bitlinear_kernel"): bitlinear_matmul,
    **{
        (f"{library}.kernels.{module}", name): arithmetic
        for library in ("mlx_lm", "mlx_vlm")
        for (module, name), arithmetic in _MUSE_SPARK.items()
    },
}
"""By module and name in it, where the library looks for the kernel at each call."""
