"""Tokenizers of the demo families: a byte-level BPE, trained on hand-written passages and seeded sentences, plus each
family's control tokens.

It knows tokens and their roles (who ends a turn, what is hidden from decoded text), not weights or model shapes.
"""

import json
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_MULTIPLE = 64
_FOLDER = Path(__file__).parent

type _Sentence = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class DemoControlTokens:
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


QWEN = DemoControlTokens(
    hidden=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    visible=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ends=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
)
GLM = DemoControlTokens(
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
GEMMA3 = DemoControlTokens(
    hidden=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"),
    visible=(),
    ends=("<end_of_turn>", "<eos>"),
    pad="<pad>",
    bos="<bos>",
)
GEMMA4 = DemoControlTokens(
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
HARMONY = DemoControlTokens(
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
LLAMA = DemoControlTokens(
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
    control: DemoControlTokens

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


def train(control: DemoControlTokens, num_text_tokens: int) -> Vocabulary:
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


# --- what the merges are learnt from ---------------------------------------------------------------------------------
#
# The text only has to be varied enough that common English, code, JSON, shell and Markdown become whole tokens; other
# scripts stay bytes or short merges, as in any byte-level vocabulary.


@cache
def _words() -> dict[str, list[str]]:
    return tomllib.loads((_FOLDER / "words.toml").read_text(encoding="utf-8"))


def _pick(rng: random.Random, kind: str) -> str:
    return rng.choice(_words()[kind])


def _statement(rng: random.Random) -> str:
    subject, verb, thing = _pick(rng, "subjects"), _pick(rng, "verbs"), _pick(rng, "objects")
    return f"{subject.capitalize()} {verb} {thing} {_pick(rng, 'clauses')}. "


def _advice(rng: random.Random) -> str:
    lead = rng.choice(("You should", "Do not", "Please", "Always", "You can", "It must", "They will", "We would"))
    return f"{lead} {_pick(rng, 'actions')} {_pick(rng, 'objects')}, {_pick(rng, 'clauses')}! "


def _bullet(rng: random.Random) -> str:
    lead = f"- `{_pick(rng, 'actions')}_{_pick(rng, 'names')}`"
    return f"{lead}: {_pick(rng, 'subjects')} {_pick(rng, 'verbs')} {_pick(rng, 'objects')}\n"


def _python(rng: random.Random) -> str:
    name, thing = _pick(rng, "names"), _pick(rng, "names")
    return (
        f"    def {_pick(rng, 'actions')}_{name}(self, {thing}: str) -> dict[str, int]:\n"
        f'        if {thing} is None:\n            raise ValueError("{thing} is missing")\n'
        f"        return self.{name}.{_pick(rng, 'actions')}({thing})\n\n"
    )


def _record(rng: random.Random) -> str:
    text, number, required = (_pick(rng, "names") for _ in range(3))
    row = {text: _pick(rng, "objects"), number: rng.randint(0, 2030), "required": [required]}
    return json.dumps(row, indent=rng.choice((None, None, 2))) + "\n"


def _question(rng: random.Random) -> str:
    lead = rng.choice(("What", "Why", "How", "Where", "When", "Which of them"))
    return f"{lead} is {_pick(rng, 'objects')} in {_pick(rng, 'subjects')}? "


_WRITERS: tuple[_Sentence, ...] = (_statement, _statement, _advice, _bullet, _python, _record, _question)


def passages(seed: int = 0, num_sentences: int = 1000) -> Iterator[str]:
    """Yield the training text piece by piece; the same arguments always give the same pieces."""
    yield (_FOLDER / "passages.txt").read_text(encoding="utf-8")
    rng = random.Random(seed)
    for _ in range(num_sentences):
        yield rng.choice(_WRITERS)(rng)
