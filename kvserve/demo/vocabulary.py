"""Tokenizers of the demo families: a byte-level BPE trained on `corpus`, plus each family's control tokens.

It knows tokens and their roles (who ends a turn, what is hidden from decoded text), not weights or model shapes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvserve.demo.corpus import passages

VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The tokens of one family that are not text.

    `hidden` are dropped by `decode(skip_special_tokens=True)`; `visible` (thinking, tool markers) are kept, as in the
    real tokenizers. `ends` are the tokens that end an answer, the one a finished turn ends with first. `named` are
    those that a processor asks for by name.
    """

    hidden: tuple[str, ...]
    visible: tuple[str, ...]
    ends: tuple[str, ...]
    pad: str
    bos: str | None = None
    named: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def all(self) -> tuple[str, ...]:
        """Every control token in the order of its id."""
        return self.hidden + self.visible


QWEN = ControlTokens(
    hidden=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    visible=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ends=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
)
GLM = ControlTokens(
    hidden=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    visible=(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    ends=("<|user|>", "<|endoftext|>", "<|observation|>"),
    pad="<|endoftext|>",
)
GEMMA3 = ControlTokens(
    hidden=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
    visible=(),
    ends=("<end_of_turn>", "<eos>"),
    pad="<pad>",
    bos="<bos>",
)
GEMMA4 = ControlTokens(
    hidden=("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|think|>", "<|image>", "<image|>", "<|image|>"),
    visible=(
        "<|channel>",
        "<channel|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    ),
    ends=("<turn|>", "<eos>", "<|tool_response>"),
    pad="<pad>",
    bos="<bos>",
)
HARMONY = ControlTokens(
    hidden=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    visible=(),
    ends=("<|return|>", "<|endoftext|>", "<|call|>"),
    pad="<|endoftext|>",
)
LLAMA = ControlTokens(
    hidden=(
        "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    ),
    visible=(),
    ends=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    pad="<|finetune_right_pad_id|>",
    bos="<|begin_of_text|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A trained tokenizer and the ids that the model's configuration and weights need."""

    tokenizer: Tokenizer = field(repr=False)
    control: ControlTokens

    @property
    def num_rows(self) -> int:
        """Rows of the embedding: padded upwards like the real ones, so some ids decode to nothing."""
        return -(-self.tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def token_id(self, token: str) -> int:
        """The id of a token that exists."""
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)

    def end_ids(self) -> list[int]:
        """Ids that end an answer, the usual one first."""
        return [self.token_id(token) for token in self.control.ends]


@cache
def _trained_bpe(num_text_tokens: int) -> str:
    """The serialised byte-level BPE without control tokens; training takes about 0.1 s, so it is kept per size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_text_tokens,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(passages(), trainer)
    return str(tokenizer.to_str())


def train(control: ControlTokens, num_text_tokens: int) -> Vocabulary:
    """Build the vocabulary of a family: at most `num_text_tokens` tokens of text, then the control tokens.

    No normaliser is set, so that any text comes back exactly from `decode(encode(text))`.
    """
    tokenizer = Tokenizer.from_str(_trained_bpe(num_text_tokens))
    tokenizer.add_special_tokens(list(control.hidden))
    tokenizer.add_tokens(list(control.visible))
    if control.bos is not None:
        # The real gemma and llama tokenizers add it on encode as well, although their templates write it too.
        bos_id = tokenizer.token_to_id(control.bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{control.bos} $A", pair=f"{control.bos} $A $B", special_tokens=[(control.bos, bos_id)]
        )
    return Vocabulary(tokenizer, control)


def write_tokenizer(vocabulary: Vocabulary, directory: Path, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into an existing folder."""
    vocabulary.tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    control = vocabulary.control
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "bos_token": control.bos,
        "eos_token": control.ends[0],
        "pad_token": control.pad,
    }
    if control.named:
        config["extra_special_tokens"] = dict(control.named)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
