"""The tokenizer and the chat template in a GGUF file's metadata, written as transformers loads them. It knows
byte-level BPE as llama.cpp names its kinds, no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvserve.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4
"""Of `tokenizer.ggml.token_type`: tokens that no text is cut across; control tokens are no text besides."""

_NAMED = ("bos", "eos", "padding", "unknown")


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    """SmolLM's: each digit on its own, then words as GPT-2 cuts them."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS = {"smollm": _digits_apart}
"""By `tokenizer.ggml.pre`: how a text is cut before merges begin."""


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Raises ModelLoadError for a kind of
    tokenizer that is not known: a guess would read every prompt a little wrong."""
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise ModelLoadError(f"The GGUF file has a tokenizer of kind {kind!r} ({cut!r}), which cannot be converted.")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    for added, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        of_type = [token for token, its_type in zip(tokens, types, strict=True) if its_type == added]
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([AddedToken(token, special=is_special, normalized=False) for token in of_type])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    named = {name: tokens[number.item()] for name in _NAMED if (number := _id_of(metadata, name)) is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "bos_token": named.get("bos"),
        "eos_token": named.get("eos"),
        "pad_token": named.get("padding"),
        "unk_token": named.get("unknown"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _id_of(metadata: Mapping[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}_token_id")
