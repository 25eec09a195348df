"""Configurations of models that are public, as their config.json has them, less what says nothing of sizes."""

from typing import Any

BASE: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16"}

_YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

PUBLIC: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": BASE | {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-14B": BASE | {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3-4B-4bit": BASE | {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "quantization": {"group_size": 64, "bits": 4},
    },
    "Qwen3-30B-A3B": BASE | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "gemma-3-12b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
            "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    },
    "gpt-oss-20b": BASE | {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
        "rope_scaling": _YARN | {"rope_type": "yarn", "truncate": False},
    },
    "DeepSeek-V3": BASE | {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "vocab_size": 129280, "max_position_embeddings": 163840,
        "attention_bias": False, "tie_word_embeddings": False,
        "rope_scaling": _YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40},
    },
    "Qwen3-Next-80B-A3B": BASE | {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512, "mlp_only_layers": [],
        "full_attention_interval": 4, "vocab_size": 151936, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "attention_bias": False,
    },
}  # fmt: skip
