"""Plain arithmetic of the trial of families against the sources of the Metal kernels that it stands for, written once
more as loops in NumPy's float32. Called through the libraries' own functions."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.plain_kernels import PLAIN, are_needed, plain_kernels

type Floats = NDArray[np.float32]

pytestmark = [
    pytest.mark.long,  # to import both libraries' kernels takes seconds
    pytest.mark.skipif(not are_needed(), reason="with Metal the kernels themselves run"),
]

LIBRARIES = ("mlx_lm", "mlx_vlm")
DTYPES = (mx.float32, mx.bfloat16)
EPS = 1e-5
EXACT, ROUNDED = 1e-5, 2.0**-7
"""The largest difference as a share of the largest value: sums in another order, which may move a value in bfloat16 to
its neighbour."""


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with plain_kernels():
        yield


def kernel(library: str, name: str, module: str = "") -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{library}.kernels.{module or name}"), name)  # type: ignore[no-any-return]


def drawn(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def rounded(value: Any, dtype: mx.Dtype) -> Floats:
    """A value as the type has it."""
    return floats(mx.array(np.asarray(value, np.float32)).astype(dtype))


def rstd(values: Floats) -> np.float32:
    total = np.float32(0)
    for value in values.ravel():
        total += value * value
    return np.float32(1 / math.sqrt(total / values.size + EPS))


def sigmoid(value: Any) -> np.float32:
    return np.float32(1 / (1 + math.exp(-value)))


def is_same(got: mx.array, expected: Floats) -> bool:
    bound = EXACT if got.dtype == mx.float32 else ROUNDED
    return got.shape == expected.shape and bool(np.abs(floats(got) - expected).max() <= bound * np.abs(expected).max())


# --- BitNet ----------------------------------------------------------------------------------------------------------


def bitlinear(x: Floats, packed: NDArray[np.uint8], scale: float, shifts: Sequence[int] = (0, 2, 4, 6)) -> Floats:
    quarter, out = len(packed), np.zeros((len(x), 4 * len(packed)), np.float32)
    for row in range(len(x)):
        for byte in range(quarter):
            for i, shift in enumerate(shifts):
                total = sum(float(x[row, j]) * (((int(packed[byte, j]) >> shift) & 3) - 1) for j in range(x.shape[1]))
                out[row, byte + i * quarter] = total * scale
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", ["mlx_lm.models.bitlinear_layers", "mlx_vlm.models.bitnet.bitlinear"])
def test_two_bit_weights_are_unpacked_as_by_hand(module: str, dtype: mx.Dtype) -> None:
    """Multiplied by the scale or divided by it; with the fields of a byte in another order it is another product."""
    packed = np.random.default_rng(1).integers(0, 256, (3, 8), np.uint8)
    x, scale = drawn(2, 2, 5, 8, dtype=dtype), mx.array([1.75], dtype)
    for is_inverted in (False, True):
        layer = importlib.import_module(module).BitLinear(8, 12, bias=False, invert_weight_scales=is_inverted)
        layer.weight, layer.weight_scale = mx.array(packed), scale
        got = layer(x)
        [factor] = floats(1 / scale if is_inverted else scale)
        rows = floats(x).reshape(-1, 8)
        assert got.dtype == dtype
        assert is_same(got, bitlinear(rows, packed, factor).reshape(2, 5, 12))
        assert not is_same(got, bitlinear(rows, packed, factor, (2, 0, 4, 6)).reshape(2, 5, 12))
        assert not is_same(got, bitlinear(rows, packed, 1 / factor).reshape(2, 5, 12))


# --- Muse Spark ------------------------------------------------------------------------------------------------------


def routed(logits: Floats, bias: Floats, top_k: int) -> tuple[list[int], list[float]]:
    """Of one token, multiplied by 1.5, weights times 2."""
    scores = [sigmoid(np.float32(logit * 1.5)) for logit in logits]
    left, chosen = list(range(len(scores))), []
    for _ in range(top_k):
        chosen.append(max(left, key=lambda expert: (scores[expert] + bias[expert], -expert)))
        left.remove(chosen[-1])
    total = sum(scores[expert] for expert in chosen)
    return chosen, [float(scores[expert] / (total + EPS) * 2) for expert in chosen]


@pytest.mark.parametrize("library", LIBRARIES)
def test_experts_are_those_of_the_largest_biased_scores_the_first_of_equal_ones_first(library: str) -> None:
    """More experts than a group of threads, equal ones among them; weights are of scores without the bias."""
    logits, bias = drawn(3, 2, 3, 40), drawn(4, 40) * 0.2
    logits[..., 7], bias[7] = logits[..., 31], bias[31]
    logits[0, 0, 7] = logits[0, 0, 31] = 6.0
    logits[1, 1], none = mx.zeros((40,)), mx.zeros((40,))
    settings = {"top_k": 4, "multiplier": 1.5, "score_eps": EPS, "route_scale": 2.0}
    for given in (bias, none):
        experts, weights = kernel(library, "expert_routing")(logits, given, **settings)
        rows = [routed(row, floats(given), 4) for row in floats(logits).reshape(-1, 40)]
        assert (experts.dtype, weights.dtype) == (mx.uint32, mx.float32)
        assert experts.reshape(-1, 4).tolist() == [chosen for chosen, _ in rows]
        assert is_same(weights, np.array([shares for _, shares in rows], np.float32).reshape(2, 3, 4))
    assert experts[1, 1].tolist() == [0, 1, 2, 3], "all are equal"
    assert experts[0, 0, :2].tolist() == [7, 31], "two are equal"
    assert experts.reshape(-1, 4).tolist() != [
        routed(row, floats(bias), 4)[0] for row in floats(logits).reshape(-1, 40)
    ]


def combined(experts: Floats, weights: Floats, norm: Floats, dtype: mx.Dtype, order: Sequence[int]) -> Floats:
    out = np.zeros(experts.shape[-1], np.float32)
    for k in order:
        values = experts[k] * norm
        out = rounded(out + values * rstd(values) * rounded(weights[k], dtype), dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_of_experts_are_normed_and_added_in_their_order(library: str, dtype: mx.Dtype) -> None:
    """Each sum is rounded, so that bfloat16 shows the order; weights of another expert give another sum."""
    experts, weights, norm = drawn(5, 2, 3, 4, 40, dtype=dtype), mx.abs(drawn(6, 2, 3, 4)), drawn(7, 40, dtype=dtype)
    got = kernel(library, "post_expert_norm_combine")(experts, weights, norm_weight=norm, eps=EPS)

    def of(order: Sequence[int], turn: int = 0) -> Floats:
        pairs = zip(floats(experts).reshape(-1, 4, 40), np.roll(floats(weights), turn, -1).reshape(-1, 4), strict=True)
        return np.stack([combined(x, w, floats(norm), dtype, order) for x, w in pairs]).reshape(2, 3, 40)

    off = {order: int((floats(got) != of(order)).sum()) for order in ((0, 1, 2, 3), (3, 2, 1, 0))}
    assert got.dtype == dtype
    assert is_same(got, of(range(4)))
    assert not is_same(got, of(range(4), 1))
    assert dtype == mx.float32 or 10 * off[0, 1, 2, 3] < off[3, 2, 1, 0], off


def heads_of(row: Floats, num: int, scale: float, dtype: mx.Dtype) -> Floats:
    """The first heads, of 8 values each, of a row of qkvg."""
    heads = row.reshape(-1, 8)[:num]
    return np.stack([rounded(rounded(head * rstd(head), dtype) * np.float32(scale), dtype) for head in heads])


def turned(heads: Floats, place: int, dtype: mx.Dtype) -> Floats:
    out = heads.copy()
    for pair in range(4):
        angle = place * 10000.0 ** (-pair / 4)
        even, odd = heads[:, 2 * pair], heads[:, 2 * pair + 1]
        out[:, 2 * pair] = even * math.cos(angle) - odd * math.sin(angle)
        out[:, 2 * pair + 1] = even * math.sin(angle) + odd * math.cos(angle)
    return rounded(out, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_heads_of_q_and_k_are_normed_scaled_and_turned(library: str, dtype: mx.Dtype) -> None:
    """Four heads of q, two of k, then what neither reads; one offset for all rows, or one each. A place further it is
    another result."""
    qkvg = drawn(8, 2, 3, 2 * 6 * 8, dtype=dtype)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "eps": EPS, "query_scale": 5.5}

    def expected(num: int, scale: float, offsets: Sequence[int] | None) -> Floats:
        places = [None if offsets is None else offsets[b] + i for b in range(2) for i in range(3)]
        rows = floats(qkvg).reshape(6, -1)
        rows = rows if num == 4 else rows[:, 4 * 8 :]
        heads = [heads_of(row, num, scale, dtype) for row in rows]
        found = [own if at is None else turned(own, at, dtype) for own, at in zip(heads, places, strict=True)]
        return np.stack(found).reshape(2, 3, num, 8)

    tried: list[tuple[int | mx.array | None, tuple[int, int] | None]] = [
        (None, None),
        (11, (11, 11)),
        (mx.array([3, 40]), (3, 40)),
    ]
    for offset, offsets in tried:
        if offset is None:
            q, k = kernel(library, "qk_norm")(qkvg, **shape)
        else:
            q, k = kernel(library, "qk_norm_rope")(qkvg, **shape, rope_base=10000.0, offset=offset)
        assert q.dtype == k.dtype == dtype
        assert is_same(q, expected(4, 5.5, offsets)) and is_same(k, expected(2, 1.0, offsets))
        wrong = (1, 1) if offsets is None else (offsets[0], offsets[1] + 1)
        assert not is_same(q, expected(4, 5.5, wrong)) and not is_same(k, expected(2, 1.0, wrong))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_attention_says_is_normed_by_heads_and_gated(library: str, dtype: mx.Dtype) -> None:
    """A gate lies by tokens where attention's output lies by heads."""
    x, gate = drawn(9, 2, 4, 3, 8, dtype=dtype), drawn(10, 2, 3, 32, dtype=dtype)
    got = kernel(library, "rms_norm_sigmoid_gate")(x, gate, eps=EPS)

    def of(gates: Floats) -> Floats:
        out = np.zeros((2, 3, 4, 8), np.float32)
        for b, token, head in np.ndindex(2, 3, 4):
            values = floats(x)[b, head, token]
            for d in range(8):
                out[b, token, head, d] = values[d] * rstd(values) * sigmoid(gates[b, token, head * 8 + d])
        return out.reshape(2, 3, 32)

    assert got.dtype == dtype
    assert is_same(got, of(floats(gate)))
    assert not is_same(got, of(floats(gate)[:, ::-1]))


def stream_of(branch: Floats, stream: Floats, shares: tuple[Floats, Floats], post: Floats, dtype: mx.Dtype) -> Floats:
    """Of one token; post is 1 where nothing is scaled."""
    values = rounded(rounded(post, dtype) * branch, dtype)
    normed = rounded(values * rstd(values), dtype)
    return shares[0] * stream + shares[1] * normed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_branch_is_normed_added_to_the_stream_and_normed_again(library: str, dtype: mx.Dtype) -> None:
    """With and without a scale, and a norm behind it, which alone says the same; the stream stays in float32."""
    branch, stream = drawn(11, 2, 3, 40, dtype=dtype), drawn(12, 2, 3, 40)
    alpha, beta, post, weight = (drawn(seed, 40) for seed in (13, 14, 15, 16))
    norm = type("Norm", (), {"weight": weight.astype(dtype), "eps": EPS})()
    add = kernel(library, "norm_add_norm")
    for scale, next_norm in ((None, norm), (post, norm), (post, None)):
        got, normed = add(branch, stream, alpha=alpha, beta=beta, post_weight=scale, post_eps=EPS, next_norm=next_norm)
        own = np.ones(40, np.float32) if scale is None else floats(scale)
        pairs = list(zip(floats(branch).reshape(-1, 40), floats(stream).reshape(-1, 40), strict=True))
        a, b = floats(alpha), floats(beta)
        expected = np.stack([stream_of(*pair, (a, b), own, dtype) for pair in pairs])
        swapped = np.stack([stream_of(*pair, (b, a), own, dtype) for pair in pairs])
        assert got.dtype == mx.float32
        bound = EXACT if dtype == mx.float32 else ROUNDED
        assert np.abs(floats(got).reshape(-1, 40) - expected).max() <= bound * np.abs(expected).max()
        assert not is_same(got, swapped.reshape(2, 3, 40))
        if next_norm is None:
            assert normed is None
            continue
        after = np.stack([row * rstd(row) * floats(norm.weight) for row in floats(got).reshape(-1, 40)])
        assert normed.dtype == dtype and is_same(normed, after.reshape(2, 3, 40))
        alone = kernel(library, "pre_norm", "norm_add_norm")(got, norm, dtype=dtype)
        assert mx.array_equal(alone, normed)


# --- where it stands -------------------------------------------------------------------------------------------------


def in_place() -> dict[tuple[str, str], Any]:
    return {place: getattr(importlib.import_module(place[0]), place[1]) for place in PLAIN}


def test_every_kernel_is_put_back_and_with_metal_none_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library had before it has again after the trial."""
    before = in_place()
    with plain_kernels():
        assert all(kernel is not before[place] for place, kernel in in_place().items())
    assert in_place() == before
    monkeypatch.setattr("benchmarks.plain_kernels.are_needed", lambda: False)
    with plain_kernels():
        assert in_place() == before
