"""The table of model families: one row and one small function of configuration each.

It knows the configuration keys of the architectures as they stand in a Hugging Face `config.json`; not how weights
are drawn, how text becomes tokens, or where files go. A new family is one function, one row and one chat template.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvserve.demo.vocabulary import GEMMA3, GEMMA4, GLM, HARMONY, LLAMA, QWEN, DemoControlTokens
from kvserve.demo.weights import WeightStyle

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelScale:
    """The size of a demo model. `num_layers` is two or a multiple of four: attention is each fourth layer of a hybrid,
    or the second of two."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_experts: int = 4
    num_text_tokens: int = 1500
    sliding_window: int = 64


TINY = ModelScale()
# Deep rather than wide: a decode step takes 10 ms or more on two CPU cores because of its many small operations, so the
# rows of a batch share most of it, as on a GPU (8 cost about twice one), and prefill stays quick enough for 8k tokens.
SLOW = ModelScale(num_layers=32)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its configuration, its control tokens and the style of its weights.

    `configure(scale, num_rows, context_length)` returns the model's own keys; token ids are added by the builder. Its
    chat template is named like itself unless `template` says otherwise; `processor_files` make it one that sees.
    """

    name: str
    configure: Callable[[ModelScale, int, int], Config]
    control: DemoControlTokens
    architecture: str
    style: Callable[[ModelScale], WeightStyle] = field(default=lambda scale: WeightStyle())
    template: str | None = None
    processor_files: Mapping[str, Config] = field(default_factory=dict)


def dense(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    """The keys that every family has."""
    return {
        "hidden_size": scale.hidden_size,
        "intermediate_size": scale.intermediate_size,
        "num_hidden_layers": scale.num_layers,
        "num_attention_heads": scale.num_heads,
        "num_key_value_heads": scale.num_kv_heads,
        "head_dim": scale.head_dim,
        "vocab_size": num_rows,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _llama(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    rope_scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return dense(scale, num_rows, context_length) | {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": rope_scaling,
    }


def _qwen3(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    return dense(scale, num_rows, context_length) | {"model_type": "qwen3", "rope_theta": 1000000.0}


def _gated_delta(scale: ModelScale) -> Config:
    """Keys of the recurrent layers, which stand three to one beside the attention layers."""
    return {
        "full_attention_interval": min(4, scale.num_layers),
        "linear_num_value_heads": scale.num_heads,
        "linear_num_key_heads": scale.num_kv_heads,
        "linear_key_head_dim": scale.head_dim,
        "linear_value_head_dim": scale.head_dim,
        "linear_conv_kernel_dim": 4,
        "attention_bias": False,
    }


def _experts(scale: ModelScale) -> Config:
    return {
        "num_experts": scale.num_experts,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": scale.intermediate_size // 2,
        "shared_expert_intermediate_size": scale.intermediate_size // 2,
        "norm_topk_prob": True,
    }


def _qwen3_next(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    keys = {"model_type": "qwen3_next", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mlp_only_layers": []}
    return dense(scale, num_rows, context_length) | _gated_delta(scale) | _experts(scale) | keys


def qwen3_5(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    text = dense(scale, num_rows, context_length) | _gated_delta(scale)
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": "qwen3_5_text", "rope_parameters": rope},
    }


def _qwen3_5_moe(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    config = qwen3_5(scale, num_rows, context_length)
    text = config["text_config"] | _experts(scale) | {"model_type": "qwen3_5_moe_text"}
    return config | {"model_type": "qwen3_5_moe", "text_config": text}


def _gemma3(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    return dense(scale, num_rows, context_length) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scale.head_dim,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": scale.sliding_window,
        "sliding_window_pattern": 2,
    }


def gemma4(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    rope = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    text = dense(scale, num_rows, context_length) | {
        "model_type": "gemma4_text",
        "rope_parameters": rope,
        "layer_types": ["sliding_attention", "full_attention"] * (scale.num_layers // 2),
        "sliding_window": scale.sliding_window,
        "global_head_dim": 2 * scale.head_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
    }
    # Without an explicit null the vision loader adds a full-size audio tower.
    return {
        "model_type": "gemma4",
        "vocab_size": num_rows,
        "tie_word_embeddings": False,
        "text_config": text,
        "audio_config": None,
    }


def _gpt_oss(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    return dense(scale, num_rows, context_length) | {
        "model_type": "gpt_oss",
        "rope_theta": 150000,
        "layer_types": ["sliding_attention", "full_attention"] * (scale.num_layers // 2),
        "sliding_window": scale.sliding_window,
        "num_local_experts": scale.num_experts,
        "num_experts_per_tok": 2,
    }


def _glm4_moe_lite(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    return dense(scale, num_rows, context_length) | {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": scale.num_heads,
        "kv_lora_rank": 2 * scale.head_dim,
        "q_lora_rank": 3 * scale.head_dim,
        "qk_nope_head_dim": scale.head_dim,
        "qk_rope_head_dim": scale.head_dim // 2,
        "v_head_dim": scale.head_dim,
        "n_routed_experts": scale.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": scale.intermediate_size // 2,
        "first_k_dense_replace": 1,
        "rope_theta": 1000000.0,
    }


def gemma3_style(scale: ModelScale) -> WeightStyle:
    return WeightStyle(norm_offset=1.0, embedding_gain=scale.hidden_size**-0.5)


def gemma4_style(scale: ModelScale) -> WeightStyle:
    # Its attention does not divide by the root of the head's size.
    return WeightStyle(embedding_gain=scale.hidden_size**-0.5, query_key_gain=0.85)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3", _qwen3, QWEN, "Qwen3ForCausalLM"),
        Family("qwen3_5", qwen3_5, QWEN, "Qwen3_5ForConditionalGeneration"),
        Family("qwen3_5_moe", _qwen3_5_moe, QWEN, "Qwen3_5MoeForConditionalGeneration"),
        Family("qwen3_next", _qwen3_next, QWEN, "Qwen3NextForCausalLM"),
        Family("gemma3", _gemma3, GEMMA3, "Gemma3ForCausalLM", gemma3_style),
        Family("gemma4", gemma4, GEMMA4, "Gemma4ForConditionalGeneration", gemma4_style),
        Family("gpt_oss", _gpt_oss, HARMONY, "GptOssForCausalLM"),
        Family("glm4_moe_lite", _glm4_moe_lite, GLM, "Glm4MoeLiteForCausalLM"),
        Family("llama", _llama, LLAMA, "LlamaForCausalLM"),
    )
}
