"""Small GGUF files, written byte by byte from the format's description, and what their tensors say in float32.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; Q4_1 and Q8_0 as in ggml's `block_q4_1` and `block_q8_0`.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

type Array = np.ndarray[Any, Any]

ALIGNMENT = 32
F32, Q4_1, Q8_0 = 0, 3, 8
TEXTS = 200 * ["The quick brown fox jumps over 2 lazy dogs; it isn't 1,234.56 — naïve café, 東京!\n\n  def f(x):\n"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Shape:
    """Of a llama."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 96
    context: int = 256


def reference_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits apart, as transformers has it: what a converted one has to equal."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(CONTROL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    named = {"bos_token": CONTROL[1], "eos_token": CONTROL[2], "pad_token": CONTROL[2], "unk_token": CONTROL[0]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named)


def metadata_of(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> dict[str, Any]:
    """As llama.cpp's converter writes it for this tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda pair: pair[1])]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": shape.hidden // shape.heads,
        "llama.context_length": shape.context,
        "llama.vocab_size": len(tokens),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def shapes_of(shape: Shape, vocab_size: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Tensor name -> shape and type, as the SmolLM2 file has them: 4 bits, embeddings 8, norms as they are."""
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    found: dict[str, tuple[tuple[int, ...], int]] = {
        "token_embd.weight": ((vocab_size, hidden), Q8_0),
        "output_norm.weight": ((hidden,), F32),
    }
    for layer in range(shape.layers):
        rows = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        rows |= {"attn_output": (hidden, hidden), "ffn_down": (hidden, shape.feed_forward)}
        rows |= dict.fromkeys(("ffn_gate", "ffn_up"), (shape.feed_forward, hidden))
        found |= {f"blk.{layer}.{name}.weight": (size, Q4_1) for name, size in rows.items()}
        found |= {f"blk.{layer}.{name}.weight": ((hidden,), F32) for name in ("attn_norm", "ffn_norm")}
    return found


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]
) -> dict[str, Array]:
    """Write random tensors of these shapes and types; returns what each of them says in float32."""
    random = np.random.default_rng(0)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data, says = b"", {}
    for name, (shape, kind) in tensors.items():
        raw, says[name] = _tensor(random, shape, kind)
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + dimensions + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return says


def _tensor(random: np.random.Generator, shape: tuple[int, ...], kind: int) -> tuple[bytes, Array]:
    """Its bytes and what they say."""
    if kind == F32:
        plain = random.normal(1.0, 0.1, shape).astype(np.float32)
        return plain.tobytes(), plain
    num_blocks = int(np.prod(shape)) // 32
    scales = random.uniform(0.001, 0.01, (num_blocks, 1)).astype(np.float16)
    if kind == Q8_0:
        quants = random.integers(-127, 128, (num_blocks, 32)).astype(np.int8)
        raw = b"".join(scale.tobytes() + block.tobytes() for scale, block in zip(scales, quants, strict=True))
        return raw, (scales.astype(np.float32) * quants.astype(np.float32)).reshape(shape)
    least = random.uniform(-0.08, 0.0, (num_blocks, 1)).astype(np.float16)
    quants = random.integers(0, 16, (num_blocks, 32)).astype(np.uint8)
    packed = quants[:, :16] | (quants[:, 16:] << 4)
    rows = zip(scales, least, packed, strict=True)
    raw = b"".join(scale.tobytes() + low.tobytes() + block.tobytes() for scale, low, block in rows)
    return raw, (scales.astype(np.float32) * quants + least.astype(np.float32)).astype(np.float32).reshape(shape)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    kinds = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    kind, form = kinds[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)
