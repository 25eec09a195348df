"""Tiny models of every family of mlx-lm and mlx-vlm, with random weights: their configurations and their files.

A configuration is what all families have in small sizes (`SIZES`), what a field's type says where it has no default,
and the few keys of `family_keys.toml` that a family needs besides. It knows the libraries, nothing of the server.
"""

import importlib
import json
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx_lm.models
import mlx_vlm.models
from mlx.utils import tree_flatten

type Library = Literal["mlx-lm", "mlx-vlm"]
type Keys = dict[str, Any]

LIBRARIES: tuple[Library, ...] = ("mlx-lm", "mlx-vlm")

VOCABULARY = 1000
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "dim", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "block_ff_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers_", "moe_layer_freq_", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "vocabulary_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"), 4096),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 32),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 2),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 16),
    **dict.fromkeys(("index_topk",), 8),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv_kernel_size"), 4),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 1e-5),
    "rope_theta": 10000.0,
}
"""By the names that the libraries' families use for them."""

VISION_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width", "vision_dim", "text_hidden_size", "out_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "layers", "n_layers", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "projection_dim"), 64),
    **dict.fromkeys(("image_size",), 56),
    **dict.fromkeys(("patch_size",), 14),
}

OWN_KEYS: dict[str, Keys] = tomllib.loads(Path(__file__).with_name("family_keys.toml").read_text("utf-8"))
"""By library, or `both`, and family."""

EMPTY: Mapping[type, Any] = {list: [], dict: {}, int: 2, float: 1.0, bool: False, str: ""}


def module_of(library: Library, family: str) -> Any:
    """The library's module of a family. Raises ImportError."""
    return importlib.import_module(f"{'mlx_lm' if library == 'mlx-lm' else 'mlx_vlm'}.models.{family}")


def modules(library: Library) -> list[str]:
    """All modules in which the library keeps models, by name."""
    package = mlx_lm.models if library == "mlx-lm" else mlx_vlm.models
    [folder] = package.__path__
    names = (
        (path.stem for path in Path(folder).glob("*.py"))
        if library == "mlx-lm"
        else (path.parent.name for path in Path(folder).glob("*/__init__.py"))
    )
    return sorted(name for name in names if not name.startswith("_"))


def families(library: Library) -> list[str]:
    """The modules that hold a model which writes text, token by token."""
    out = {name for name, _ in left_out(library)}
    return [name for name in modules(library) if name not in out]


def why(library: Library, family: str) -> str:
    """What is known of a family that does not come out like the others."""
    return str(_own_keys(library, family).get("why", ""))


def has_plain_kernels(library: Library, family: str) -> bool:
    """Whether it calls kernels of Metal for which the library has no other code (`plain_kernels.py`)."""
    return bool(_own_keys(library, family).get("plain_kernels", False))


SHARED = "no model by itself: code that families share, or a pipeline"


def left_out(library: Library) -> list[tuple[str, str]]:
    """The other modules, and what they are: shared code, or models that write no text."""
    named = [(name, own["out"]) for name, own in OWN_KEYS.get(library, {}).items() if "out" in own]
    shared = [(name, SHARED) for name in modules(library) if not _has_model(library, name)]
    return sorted(dict(shared + named).items())


def _has_model(library: Library, name: str) -> bool:
    classes = ("Model", "ModelArgs") if library == "mlx-lm" else ("Model", "ModelConfig")
    try:
        return all(hasattr(module_of(library, name), each) for each in classes)
    except (ImportError, SystemExit):  # a family whose own package is not installed
        return True


def config_of(library: Library, family: str) -> Keys:
    """A tiny `config.json` of a family."""
    module, own = module_of(library, family), _own_keys(library, family)
    classes = module.ModelArgs if library == "mlx-lm" else module.ModelConfig
    nested_class = next((found for name in ("TextArgs", "TextConfig") if (found := getattr(module, name, None))), None)
    model_type = own.get("model_type", family)
    text = {**SIZES, **own.get("text", {})}
    config = {**_required(classes), **text, "model_type": model_type, **own.get("top", {})}
    nested = {**_required(nested_class), **text, "model_type": f"{model_type}_text", **own.get("nested", {})}
    config["text_config"] = nested
    if library == "mlx-vlm" and hasattr(module, "VisionConfig") and own.get("has_vision", True):
        vision = _required(module.VisionConfig)
        vision = {key: family if key == "model_type" else value for key, value in vision.items()}
        config["vision_config"] = {**vision, **VISION_SIZES, **own.get("vision", {})}
    for key in own.get("without", ()):
        config.pop(key, None)
        nested.pop(key, None)
    return config


def _own_keys(library: Library, family: str) -> Keys:
    own: Keys = {}
    for table in (OWN_KEYS["both"], OWN_KEYS[library]):
        for key, value in table.get(family, {}).items():
            own[key] = own.get(key, {}) | value if isinstance(value, dict) else value
    return own


def _required(arguments: Any) -> Keys:
    """Values by type for the fields that have no default."""
    if arguments is None or not is_dataclass(arguments):
        return {}
    return {
        field.name: _empty(field.type)
        for field in fields(arguments)
        if field.default is MISSING and field.default_factory is MISSING
    }


def _empty(kind: Any) -> Any:
    text = kind if isinstance(kind, str) else str(kind)
    return next((value for of, value in EMPTY.items() if of is kind or f"{of.__name__}" in text.lower()), None)


def write_model(folder: Path, library: Library, family: str) -> Path:
    """A folder with a tiny model of random weights, without a tokenizer. Raises what the library raises."""
    config = config_of(library, family)
    model = _new_model(library, module_of(library, family), config)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _drawn(name, array) for name, array in _parameters(model)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _new_model(library: Library, module: Any, config: Keys) -> Any:
    config = json.loads(json.dumps(config))
    if library == "mlx-lm":
        return module.Model(module.ModelArgs.from_dict(config))
    from mlx_vlm.utils import update_module_configs

    for name in ("vision_config", "audio_config"):
        config.setdefault(name, {})  # as mlx-vlm does
    arguments = module.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    return module.Model(update_module_configs(arguments, module, config, parts))


def _parameters(model: Any) -> Iterator[tuple[str, mx.array]]:
    """All parameters, or those of the language model where there is more than that."""
    everything: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    has_text = any(name.startswith("language_model.") for name, _ in everything)
    yield from ((name, array) for name, array in everything if name.startswith("language_model.") or not has_text)


def _drawn(name: str, array: mx.array) -> mx.array:
    """Random values of a parameter: wide enough for old tokens to matter, the same for the same name."""
    key = mx.random.key(zlib.crc32(name.encode()))
    if array.dtype == mx.uint8:
        return _four_ternary(array.shape, key)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim < 2:
        return (array.astype(mx.float32) + 0.1 * noise).astype(mx.float32)
    return noise * (1.4 * array.shape[-1] ** -0.5)


def _four_ternary(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Bytes of four weights of two bits each, 0 to 2 for -1 to 1, as BitNet's are."""
    weights = mx.random.randint(0, 3, (4, *shape), key=key).astype(mx.uint8)
    return weights[0] | weights[1] << 2 | weights[2] << 4 | weights[3] << 6
