"""A tiny model of a second family that mlx-lm divides by layers only; qwen3_next, the other one, is one of the demo's.
It is here and not there because nothing but its pipeline is unlike what the demo's families have: latent attention, and
a state that is rotated by the position that an attention layer counts.
"""

import getpass
import hashlib
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from kvserve.demo import build
from kvserve.demo.families import TINY, Config, Family, ModelScale, dense
from kvserve.demo.vocabulary import QWEN
from kvserve.demo.weights import Array, draw_parameter

BAILING = "bailing_hybrid"

LIKE_DEMO = (
    ("word_embeddings", "embed_tokens"),
    ("attention.dense", "attention.o_proj"),
    (".query_layernorm", ".q_norm"),
    (".key_layernorm", ".k_norm"),
    (".expert_bias", ".e_score_correction_bias"),
)
"""Names of its parameters, and what the demo's families call what is drawn in the same way."""


def _configure(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    """Two groups of a recurrent and an attention layer."""
    return dense(scale, num_rows, context_length) | {
        "model_type": BAILING,
        "num_key_value_heads": scale.num_heads,
        "moe_intermediate_size": scale.intermediate_size // 2,
        "num_experts": scale.num_experts,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_group_size": scale.num_layers // 2,
        "group_norm_size": 2,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 2 * scale.head_dim,
        "q_lora_rank": 3 * scale.head_dim,
        "qk_rope_head_dim": scale.head_dim // 2,
        "qk_nope_head_dim": scale.head_dim,
        "v_head_dim": scale.head_dim,
        "use_qk_norm": True,
    }


FAMILY = Family(BAILING, _configure, QWEN, "BailingHybridForCausalLM", template="qwen3")


def _drawn(name: str, *given: Any) -> Array:
    for own, other in LIKE_DEMO:
        name = name.replace(own, other)
    return draw_parameter(name, *given)


@cache
def bailing_model() -> Path:
    """The folder of a model of four layers, built once per machine and state of these sources."""
    with mock.patch.dict(build.ALL_FAMILIES, {BAILING: FAMILY}), mock.patch.object(build, "draw_parameter", _drawn):
        arguments: dict[str, Any] = {"scale": TINY, "answer_tokens": None}
        digest = build.build_digest(BAILING, **arguments) + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        name = hashlib.sha256(digest.encode()).hexdigest()[:16]
        root = Path(tempfile.gettempdir()) / f"kvserve-test-models-{getpass.getuser()}"
        root.mkdir(mode=0o700, exist_ok=True)
        return build.build_model(BAILING, root / f"{BAILING}-{name}", **arguments)
