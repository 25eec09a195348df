"""Seeded random weights for a demo model: which distribution each parameter gets, and how an answer finds its end.

It knows parameter names and shapes, not families. Everything is float32 and drawn with NumPy per parameter name, so
the same arguments give the same bytes, whatever MLX does with its own random state.

Two dimensions of the residual stream are reserved: `CONSTANT` holds the same value for every token and `CLOSING` marks
the few tokens after which an answer ends. No layer reads or writes them; only the output head reads them, where they
act as a bias per token. So control tokens stay improbable and answers end at any temperature, at no cost in speed.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

CONSTANT, CLOSING, NUM_RESERVED = 0, 1, 2
RESERVED_VALUE = 4.0
LOGIT_SPREAD = 3.0
IMPROBABLE, LIKELY, CERTAIN = -8.0, 1.8, 30.0
# What a head weight of one on CONSTANT adds to a logit; measured 0.9 to 1.4 over the families.
LOGITS_PER_WEIGHT = 1.2


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """Token ids that get a bias in the head: not to be said, said often, and `end_id`, said after any of `closing_ids`.

    `closing_share` is the part of all said tokens that should be closing ones, one over the length of an answer.
    """

    improbable_ids: tuple[int, ...]
    likely_ids: tuple[int, ...]
    end_id: int
    closing_ids: tuple[int, ...]
    closing_share: float


@dataclass(frozen=True, slots=True)
class WeightStyle:
    """What a family's arithmetic asks of its weights.

    `norm_offset` is added to every norm weight by the model itself (1 in gemma3, else 0); `embedding_gain` undoes a
    scaling of the embeddings; `query_key_gain` is the norm weight of queries and keys, so that attention is sharp
    enough for old tokens to matter. `is_tied`: the embeddings are the head too.
    """

    norm_offset: float = 0.0
    embedding_gain: float = 1.0
    query_key_gain: float = 1.8
    is_tied: bool = False


def _normal(rng: np.random.Generator, shape: tuple[int, ...], gain: float) -> Array:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)


def _linear(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return _normal(rng, shape, shape[-1] ** -0.5)


def _query_key(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return _normal(rng, shape, style.query_key_gain * shape[-1] ** -0.5)


def _residual_writer(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    weight = _normal(rng, shape, 2.0 * shape[-1] ** -0.5)
    weight[..., :NUM_RESERVED, :] = 0
    return weight


def _residual_writer_bias(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    bias = _normal(rng, shape, 0.1)
    bias[..., :NUM_RESERVED] = 0
    return bias


def _bias(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return _normal(rng, shape, 0.1)


def _plain_norm(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return np.full(shape, 1.0 - style.norm_offset, np.float32)


def _block_norm(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    weight = _plain_norm(rng, shape, style)
    weight[:NUM_RESERVED] = -style.norm_offset
    return weight


def _query_key_norm(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return np.full(shape, style.query_key_gain - style.norm_offset, np.float32)


def _ones(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return np.ones(shape, np.float32)


def _decay(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    """log(A) of a gated delta layer, from a memory of a few tokens to one of some hundreds."""
    return rng.uniform(np.log(0.003), np.log(3.0), shape).astype(np.float32)


def _sink(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle) -> Array:
    return _normal(rng, shape, 0.5)


Draw = Callable[[np.random.Generator, tuple[int, ...], WeightStyle], Array]

# The first row whose ending fits the parameter's name decides.
RULES: tuple[tuple[tuple[str, ...], Draw], ...] = (
    ((".A_log",), _decay),
    ((".dt_bias", ".layer_scalar"), _ones),
    ((".sinks", ".e_score_correction_bias"), _sink),
    ((".q_norm.weight", ".k_norm.weight"), _query_key_norm),
    (("layernorm.weight",), _block_norm),
    (("norm.weight",), _plain_norm),
    (("o_proj.weight", "out_proj.weight", "down_proj.weight"), _residual_writer),
    (("o_proj.bias", "out_proj.bias", "down_proj.bias"), _residual_writer_bias),
    ((".bias",), _bias),
    (("q_proj.weight", "k_proj.weight", "q_b_proj.weight"), _query_key),
    ((".weight",), _linear),
)
TOWER_PREFIXES = ("vision_tower.", "multi_modal_projector.", "embed_vision.")
LATENT_NORMS = ("kv_a_layernorm.weight", "q_a_layernorm.weight")


def draw_parameter(name: str, shape: tuple[int, ...], style: WeightStyle, roles: TokenRoles, seed: int) -> Array:
    """The float32 value of one parameter.

    Raises:
        KeyError: no rule covers the name, so a new architecture cannot be filled with nonsense silently.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.startswith(TOWER_PREFIXES):
        return _tower(rng, shape, name)
    if name.endswith("embed_tokens.weight"):
        return _tied(rng, shape, style, roles) if style.is_tied else _embedding(rng, shape, style, roles)
    if name.endswith("lm_head.weight"):
        return _head(rng, shape, roles)
    if name.endswith(LATENT_NORMS):
        return _plain_norm(rng, shape, style)
    for endings, draw in RULES:
        if name.endswith(endings):
            return draw(rng, shape, style)
    raise KeyError(name)


def _embedding(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle, roles: TokenRoles) -> Array:
    weight = _normal(rng, shape, 1.0)
    weight[:, CONSTANT] = RESERVED_VALUE
    weight[:, CLOSING] = 0
    weight[list(roles.closing_ids), CLOSING] = RESERVED_VALUE
    return weight * np.float32(style.embedding_gain)


def _tied(rng: np.random.Generator, shape: tuple[int, ...], style: WeightStyle, roles: TokenRoles) -> Array:
    """Embeddings that are the head too: small beside what the layers write, or every token would say itself again."""
    weight = _normal(rng, shape, 0.5)
    weight[:, :NUM_RESERVED] = 0
    weight[list(roles.improbable_ids)] *= np.float32(0.02)
    return weight * np.float32(style.embedding_gain)


def _tower(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> Array:
    """A parameter of a vision tower, whose names differ from family to family: by its number of axes."""
    if name.endswith("bias"):
        return _normal(rng, shape, 0.1)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    if "pos" in name:
        return _normal(rng, shape, 0.5)
    return _normal(rng, shape, math.prod(shape[1:]) ** -0.5)


def _head(rng: np.random.Generator, shape: tuple[int, ...], roles: TokenRoles) -> Array:
    weight = _normal(rng, shape, LOGIT_SPREAD * shape[-1] ** -0.5)
    weight[:, :NUM_RESERVED] = 0
    weight[list(roles.improbable_ids), :] = 0
    weight[list(roles.improbable_ids), CONSTANT] = IMPROBABLE
    weight[list(roles.likely_ids), CONSTANT] = LIKELY
    if roles.closing_ids:
        ratio = roles.closing_share * len(roles.likely_ids) / len(roles.closing_ids)
        weight[list(roles.closing_ids), CONSTANT] = LIKELY + math.log(ratio) / LOGITS_PER_WEIGHT
    weight[roles.end_id, CLOSING] = CERTAIN
    return weight
