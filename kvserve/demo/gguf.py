"""The weights and the configuration of a llama in a GGUF file, written as mlx-lm loads them. It knows the format's
names and MLX's, nothing of where the file came from.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp's converter permutes the rows of q and
k for rotations of neighbouring pairs, which is mlx-lm's `rope_traditional`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvserve.errors import ModelLoadError

Precision = Literal["4-bit", "float32"]
"""`4-bit` is as the file has it: quantised layers stay quantised. `float32` has the same numbers, each written out."""

type Metadata = Mapping[str, Any]
type TellBytes = Callable[[int, int], None]
"""Takes how many bytes are done, and of how many."""

SHARD_BYTES = 2**27
"""So much is in memory beside the file: a file of weights is written before the next one begins."""

_GROUP_SIZE = 32
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(file: Path) -> tuple[dict[str, mx.array], Metadata]:
    """Tensors and metadata. Quantised tensors come as `weight`, `scales` and `biases`, as MLX computes with them.
    Raises ModelLoadError."""
    try:
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{file.name} is no GGUF file that can be read: {error}") from None
    arrays: dict[str, mx.array]
    arrays, metadata = loaded
    if metadata.get("general.architecture") != "llama":
        raise ModelLoadError(f"{file.name} holds a {metadata.get('general.architecture')!r}, no llama.")
    return arrays, metadata


def write_model(
    arrays: dict[str, mx.array],
    metadata: Metadata,
    folder: Path,
    precision: Precision,
    tell: TellBytes,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `config.json` and the weights, and empty `arrays` on the way. Raises ModelLoadError."""
    layers = _by_layer(arrays)
    quantised = {name: _bits(parts) for name, parts in layers.items() if "scales" in parts and precision == "4-bit"}
    config = _config(metadata, is_tied="lm_head" not in layers) | _quantisation(quantised)
    _write_json(folder / "config.json", config)
    stop = {name: _integer(metadata, f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", stop)
    arrays.clear()
    _write_weights(layers, folder, precision, tell, shard_bytes)


def _by_layer(arrays: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """MLX's name of a layer -> its weight, with scales and biases where it is quantised."""
    layers: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(_renamed(layer), {})[part] = array
    return dict(sorted(layers.items()))


def _renamed(layer: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)", layer)
    if match is None or match[2] not in _NAMES:
        raise ModelLoadError(f"The GGUF file has a tensor {layer!r}, which mlx-lm's llama has not.")
    return _NAMES[match[2]] if match[1] is None else f"model.layers.{match[1]}.{_NAMES[match[2]]}"


def _bits(parts: Mapping[str, mx.array]) -> int:
    return 32 * parts["weight"].shape[-1] // (_GROUP_SIZE * parts["scales"].shape[-1])


def _quantisation(bits_of: Mapping[str, int]) -> dict[str, Any]:
    """As mlx-lm reads it: what most layers have, and an entry for each that has something else."""
    if not bits_of:
        return {}
    usual = Counter(bits_of.values()).most_common(1)[0][0]
    others = {name: {"group_size": _GROUP_SIZE, "bits": bits} for name, bits in bits_of.items() if bits != usual}
    return {"quantization": {"group_size": _GROUP_SIZE, "bits": usual, **others}}


def _config(metadata: Metadata, *, is_tied: bool) -> dict[str, Any]:
    def whole(name: str) -> int:
        return _integer(metadata, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": whole("embedding_length"),
        "num_hidden_layers": whole("block_count"),
        "intermediate_size": whole("feed_forward_length"),
        "num_attention_heads": whole("attention.head_count"),
        "num_key_value_heads": whole("attention.head_count_kv"),
        "head_dim": whole("rope.dimension_count"),
        "max_position_embeddings": whole("context_length"),
        "vocab_size": whole("vocab_size"),
        "rms_norm_eps": float(_value(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(metadata, "llama.rope.freq_base")),
        "rope_traditional": True,
        "tie_word_embeddings": is_tied,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _integer(metadata: Metadata, key: str) -> int:
    return int(_value(metadata, key))


def _value(metadata: Metadata, key: str) -> Any:
    if key not in metadata:
        raise ModelLoadError(f"The GGUF file does not say {key}.")
    return metadata[key].item()


# --- weights ----------------------------------------------------------------------------------------------------------


def _write_weights(
    layers: dict[str, dict[str, mx.array]], folder: Path, precision: Precision, tell: TellBytes, shard_bytes: int
) -> None:
    """In files of about `shard_bytes`, each computed, written and let go before the next one."""
    sizes = {name: _num_bytes(parts, precision) for name, parts in layers.items()}
    shards = list(_shards(sizes, shard_bytes))
    weight_map: dict[str, str] = {}
    num_done, num_total = 0, sum(sizes.values())
    for number, names in enumerate(shards, 1):
        tell(num_done, num_total)
        written: dict[str, mx.array] = {}
        for name in names:
            written |= {f"{name}.{part}": array for part, array in _converted(layers.pop(name), precision).items()}
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        try:
            mx.save_safetensors(str(folder / file), written, {"format": "mlx"})
        except RuntimeError as error:
            raise ModelLoadError(f"{file} could not be written to {folder.parent}: {error}") from None
        weight_map |= dict.fromkeys(written, file)
        num_done += sum(sizes[name] for name in names)
        del written
        mx.clear_cache()
    tell(num_done, num_total)
    index = {"metadata": {"total_size": num_total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, size in sizes.items():
        if names and num_bytes + size > shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _num_bytes(parts: Mapping[str, mx.array], precision: Precision) -> int:
    if precision == "4-bit":
        return sum(array.nbytes for array in parts.values())
    width = _GROUP_SIZE * parts["scales"].shape[-1] if "scales" in parts else parts["weight"].shape[-1]
    return 4 * width * (parts["weight"].size // parts["weight"].shape[-1])


def _converted(parts: dict[str, mx.array], precision: Precision) -> dict[str, mx.array]:
    if precision == "4-bit":
        return parts
    if "scales" not in parts:
        return {"weight": parts["weight"].astype(mx.float32)}
    # A scale in half precision times a few bits is exact in float32, so this only rounds where the bias is added.
    scales, biases = (parts[name].astype(mx.float32) for name in ("scales", "biases"))
    return {"weight": mx.dequantize(parts["weight"], scales, biases, _GROUP_SIZE, _bits(parts))}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
