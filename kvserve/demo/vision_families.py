"""The table of vision families: a text family's configuration with a tiny tower, and the files of its processor.

It knows the configuration keys of mlx-vlm's architectures and of image processors; not how weights are drawn or where
files go. A new family is one function, one row and, where no text family's template writes images, one template.
"""

from dataclasses import replace

from kvserve.demo.families import (
    Config,
    Family,
    ModelScale,
    dense,
    gemma3_style,
    gemma4,
    gemma4_style,
    qwen3_5,
)
from kvserve.demo.vocabulary import GEMMA3, GEMMA4, GLM, QWEN, DemoControlTokens, Vocabulary

PATCH = 8
"""Pixels of a patch's side; two by two patches make a token, three by three in gemma4."""

_TOWER_WIDTH = 32
_MEAN = [0.5, 0.5, 0.5]

QWEN_VL = replace(QWEN, hidden=(*QWEN.hidden, "<|video_pad|>"))
GLM_VL = replace(GLM, hidden=(*GLM.hidden, "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"))
GEMMA3_VL = replace(
    GEMMA3,
    hidden=(*GEMMA3.hidden, "<image_soft_token>"),
    named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
)
GEMMA4_VL = replace(
    GEMMA4,
    hidden=(*GEMMA4.hidden, "<|video|>", "<|audio|>"),
    named={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"},
)


def _qwen_tower(scale: ModelScale, model_type: str, deepstack: list[int]) -> Config:
    return {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": _TOWER_WIDTH,
        "intermediate_size": 2 * _TOWER_WIDTH,
        "out_hidden_size": scale.hidden_size,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": deepstack,
    }


def _qwen3_5_vl(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    config = qwen3_5(scale, num_rows, context_length)
    # The real one turns a quarter of each head; a tiny head has too few pairs in a quarter for three coordinates.
    rope = {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    config["text_config"] |= {"rope_parameters": rope}
    return config | {"vision_config": _qwen_tower(scale, "qwen3_5", [])}


def _qwen3_vl(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": dense(scale, num_rows, context_length) | rope | {"model_type": "qwen3_vl_text"},
        "vision_config": _qwen_tower(scale, "qwen3_vl", [0, 1]),
    }


def _gemma3_vl(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    text = dense(scale, num_rows, context_length) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scale.head_dim,
        "rope_theta": 1e6,
        "rope_global_base_freq": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": scale.sliding_window,
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 64,
    }
    tower = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 2,
        "hidden_size": _TOWER_WIDTH,
        "intermediate_size": 2 * _TOWER_WIDTH,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "image_size": 16 * PATCH,
    }
    # mlx-vlm reads this family's answer from the embedding table, whatever else the folder holds.
    return {
        "model_type": "gemma3",
        "vocab_size": num_rows,
        "hidden_size": scale.hidden_size,
        "mm_tokens_per_image": 64,
        "text_config": text,
        "vision_config": tower,
    }


def _gemma4_vl(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    config = gemma4(scale, num_rows, context_length)
    config["text_config"] |= {"use_bidirectional_attention": "vision", "tie_word_embeddings": True}
    tower = {
        "model_type": "gemma4_vision",
        "hidden_size": _TOWER_WIDTH,
        "intermediate_size": 2 * _TOWER_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": PATCH,
        "pooling_kernel_size": 3,
        "default_output_length": 70,
        "position_embedding_size": 128,
    }
    # mlx-vlm's decoder reads its answer from the embedding table, whatever the config says.
    return config | {"tie_word_embeddings": True, "hidden_size": scale.hidden_size, "vision_config": tower}


def _glm4v(scale: ModelScale, num_rows: int, context_length: int) -> Config:
    text = dense(scale, num_rows, context_length) | {
        "model_type": "glm4v_text",
        "attention_bias": True,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }
    tower = {
        "model_type": "glm4v",
        "depth": 2,
        "hidden_size": _TOWER_WIDTH,
        "intermediate_size": 2 * _TOWER_WIDTH,
        "out_hidden_size": scale.hidden_size,
        "num_heads": 2,
        "patch_size": PATCH,
        "image_size": 8 * PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {"model_type": "glm4v", "hidden_size": scale.hidden_size, "text_config": text, "vision_config": tower}


# --- ids and processors -----------------------------------------------------------------------------------------------

_IDS: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen": (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ),
    "gemma3": (
        ("image_token_index", "<image_soft_token>"),
        ("boi_token_index", "<start_of_image>"),
        ("eoi_token_index", "<end_of_image>"),
    ),
    "gemma4": (
        ("image_token_id", "<|image|>"),
        ("video_token_id", "<|video|>"),
        ("audio_token_id", "<|audio|>"),
        ("boi_token_id", "<|image>"),
        ("eoi_token_id", "<image|>"),
    ),
    "glm": (
        ("image_token_id", "<|image|>"),
        ("video_token_id", "<|video|>"),
        ("vision_start_token_id", "<|begin_of_image|>"),
        ("vision_end_token_id", "<|end_of_image|>"),
    ),
}


def media_ids(control: DemoControlTokens, vocabulary: Vocabulary) -> Config:
    """The keys of a vision model's config that name the tokens of images."""
    wanted = {QWEN_VL: "qwen", GEMMA3_VL: "gemma3", GEMMA4_VL: "gemma4", GLM_VL: "glm"}[control]
    return {key: vocabulary.token_id(token) for key, token in _IDS[wanted]}


def _patches(kind: str, processor: str) -> Config:
    return {
        "image_processor_type": kind,
        "processor_class": processor,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 2048 * (2 * PATCH) ** 2},
        "image_mean": _MEAN,
        "image_std": _MEAN,
    }


_QWEN_FILES = {"preprocessor_config.json": _patches("Qwen2VLImageProcessor", "Qwen3VLProcessor")}
_GLM_FILES = {"preprocessor_config.json": _patches("Glm4vImageProcessor", "Glm4vProcessor")}
_GEMMA3_FILES: dict[str, Config] = {
    "preprocessor_config.json": {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 16 * PATCH, "width": 16 * PATCH},
        "image_mean": _MEAN,
        "image_std": _MEAN,
        "do_pan_and_scan": False,
    },
    "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 64},
}
_GEMMA4_FILES: dict[str, Config] = {
    "processor_config.json": {
        "processor_class": "Gemma4Processor",
        "image_processor": {"patch_size": PATCH, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        # Unused here, but mlx-vlm makes one; with its own settings it warns.
        "feature_extractor": {"feature_size": 32},
    },
}

VISION_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "qwen3_5_vl",
            _qwen3_5_vl,
            QWEN_VL,
            "Qwen3_5ForConditionalGeneration",
            template="qwen3_5",
            processor_files=_QWEN_FILES,
        ),
        Family(
            "qwen3_vl",
            _qwen3_vl,
            QWEN_VL,
            "Qwen3VLForConditionalGeneration",
            template="qwen3_5",
            processor_files=_QWEN_FILES,
        ),
        Family(
            "gemma3_vl",
            _gemma3_vl,
            GEMMA3_VL,
            "Gemma3ForConditionalGeneration",
            lambda scale: replace(gemma3_style(scale), is_tied=True),
            template="gemma3",
            processor_files=_GEMMA3_FILES,
        ),
        Family(
            "gemma4_vl",
            _gemma4_vl,
            GEMMA4_VL,
            "Gemma4ForConditionalGeneration",
            lambda scale: replace(gemma4_style(scale), is_tied=True),
            template="gemma4",
            processor_files=_GEMMA4_FILES,
        ),
        Family("glm4v", _glm4v, GLM_VL, "Glm4vForConditionalGeneration", processor_files=_GLM_FILES),
    )
}
