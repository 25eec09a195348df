"""What a server could at best have reused of a prompt, found out beside it: own rendering, own model, own bookkeeping.

It knows a model folder and what was sent and computed; nothing of the server's room for caches, which it judges.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, PreTrainedConfig

type Wire = dict[str, Any]
"""A message or a tool as it goes over the wire."""


@dataclass(frozen=True, slots=True)
class Convention:
    """How a family's template closes messages, and its switches as a server with default settings sets them.

    `ends` are the tokens that close a message. `is_cuttable`: every layer can be restored at any token, so that message
    ends do not matter. `keeping` keeps old thinking, `thinking` and `not_thinking` switch it for the next answer.
    `takes_tools`, `alternates`: whether the template writes tools, and whether it insists on user and assistant taking
    turns (neighbours of one role are then joined). `folds_system`: the system text is the beginning of the first user
    message and has no closing token of its own. `lead` stands before an answer's words in the template, but is the
    model's to write. `silence` stands before an answer without thinking in its own prompt and in no later one.
    """

    ends: tuple[str, ...]
    is_cuttable: bool = False
    keeping: Mapping[str, object] = field(default_factory=dict)
    thinking: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": True})
    not_thinking: Mapping[str, object] = field(default_factory=lambda: {"enable_thinking": False})
    takes_tools: bool = True
    alternates: bool = False
    folds_system: bool = False
    lead: str = ""
    silence: str = ""


CONVENTIONS: Mapping[str, Convention] = {
    "qwen3": Convention(("<|im_end|>",), is_cuttable=True, silence="<think>\n\n</think>\n\n"),
    "qwen3_5": Convention(("<|im_end|>",), keeping={"preserve_thinking": True}),
    "qwen3_5_vl": Convention(("<|im_end|>",), keeping={"preserve_thinking": True}),
    "gemma3": Convention(("<end_of_turn>",), takes_tools=False, alternates=True, folds_system=True),
    "glm4_moe_lite": Convention(("<|user|>", "<|observation|>"), is_cuttable=True, keeping={"clear_thinking": False}),
    "gpt_oss": Convention(
        ("<|end|>", "<|call|>", "<|return|>"),
        thinking={},
        not_thinking={"reasoning_effort": "low"},
        lead="<|channel|>final<|message|>",
    ),
    "qwen3, whole vocabulary": Convention(("<|im_end|>",), is_cuttable=True),
    "gemma3, whole vocabulary": Convention(
        ("<end_of_turn>",), is_cuttable=True, takes_tools=False, alternates=True, folds_system=True
    ),
    "gpt_oss, whole vocabulary": Convention(("<|end|>", "<|call|>", "<|return|>"), is_cuttable=True, thinking={}),
    "llama3_1, whole vocabulary": Convention(("<|eot_id|>", "<|eom_id|>"), is_cuttable=True),
    "deepseek_v3_1, whole vocabulary": Convention(
        ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
        is_cuttable=True,
        takes_tools=False,
        thinking={"thinking": True},
        not_thinking={"thinking": False},
    ),
}

RECORDED_FAMILIES = ("qwen3", "qwen3_5", "gemma3", "glm4_moe_lite")
"""On these recorded sessions are played: dense, hybrid, sliding window, latent attention."""

PLAYED_FAMILIES = (*RECORDED_FAMILIES, "qwen3_5_vl")
"""Without a model on one that sees too: text is to fare as well on it as on the text model."""

ECHO_MARK = "echo-5f0c1e"
"""Stands for an answer while a prompt is rendered around it."""


class Rendering:
    """A model's own chat template and tokenizer, as transformers reads them from its folder."""

    def __init__(self, folder: Path, convention: Convention) -> None:
        self.convention = convention
        # With a config handed in, tokenizer.json counts as it stands: of architectures that transformers knows it would
        # take its own rules of splitting instead.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
        self._ends = frozenset(self._tokenizer.convert_tokens_to_ids(list(convention.ends)))

    def ids(self, messages: Sequence[Wire], tools: Sequence[Wire], *, thinking: bool) -> list[int]:
        """The prompt's model tokens, the generation tail included."""
        return self._encode(self._text(messages, tools, thinking=thinking))

    def replays(
        self, messages: Sequence[Wire], tools: Sequence[Wire], emitted: Mapping[str, Sequence[int]], *, thinking: bool
    ) -> Iterator[list[int]]:
        """Every prompt that says the same: each echoed answer in the template's tokens or in those the model emitted.

        `emitted` are the ids of answers by their text, without a stop token. The first prompt has all of them.
        """
        echoes = [
            place
            for place, message in enumerate(messages)
            if message["role"] == "assistant" and message["content"] in emitted
        ]
        for choice in product((True, False), repeat=len(echoes)):
            replayed = [place for place, is_replayed in zip(echoes, choice, strict=True) if is_replayed]
            marked = [
                message | {"content": ECHO_MARK} if place in replayed else message
                for place, message in enumerate(messages)
            ]
            text = self._text(marked, tools, thinking=thinking)
            first, *rest = text.replace(self.convention.lead + ECHO_MARK, ECHO_MARK).split(ECHO_MARK)
            ids = self._encode(first)
            for place, following in zip(replayed, rest, strict=True):
                ids += [*emitted[messages[place]["content"]], *self._encode(following)]
            yield ids

    def silence(self, *, thinking: bool) -> list[int]:
        """What a server that replays an answer puts before it again, because it stood there."""
        return [] if thinking else self._encode(self.convention.silence)

    def _text(self, messages: Sequence[Wire], tools: Sequence[Wire], *, thinking: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [_as_template_reads(message) for message in self._joined(messages)],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.convention.keeping,
                **(self.convention.thinking if thinking else self.convention.not_thinking),
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        """The words of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def message_ends(self, ids: Sequence[int], messages: Sequence[Wire], tools: Sequence[Wire]) -> list[int]:
        """Offsets in a rendered prompt behind which a message is over, ascending."""
        ends = [offset + 1 for offset, token in enumerate(ids) if token in self._ends]
        if self.convention.folds_system and messages[0]["role"] == "system":
            asked = ({"role": "user", "content": said} for said in ("Amber lake", "Violet moon"))
            probes = [self.ids([messages[0], question], tools, thinking=False) for question in asked]
            ends.append(min(common_prefix(ids, probe) for probe in probes))
        return sorted(ends)

    def _joined(self, messages: Sequence[Wire]) -> list[Wire]:
        """Neighbours of one role as one message, for templates that want them to alternate."""
        joined: list[Wire] = []
        for message in messages:
            if self.convention.alternates and joined and joined[-1]["role"] == message["role"]:
                joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n\n{message['content']}"}
            else:
                joined.append(dict(message))
        return joined


class GreedyModel:
    """The same weights in this process: which tokens a greedy server emits, without asking it."""

    def __init__(self, folder: Path) -> None:
        self._module: Any = load_model(folder, lazy=False)[0]
        self.stops: frozenset[int] = frozenset(
            json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"]
        )

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The ids of the answer, the stop token included where there is one."""
        ids: list[int] = []
        for token, _ in generate_step(mx.array(list(prompt)), self._module, max_tokens=max_tokens):
            ids.append(int(token))
            if ids[-1] in self.stops:
                break
        return ids


class Computed:
    """Every token sequence that a server has computed since it knew nothing."""

    def __init__(self) -> None:
        self._sequences: list[np.ndarray] = []

    def add(self, ids: Sequence[int]) -> None:
        """A prompt with its answer."""
        self._sequences.append(np.asarray(ids))

    def longest_prefix(self, ids: Sequence[int]) -> int:
        """How many leading tokens of a prompt were computed before."""
        return max((common_prefix(ids, known) for known in self._sequences), default=0)


def common_prefix(ids: Sequence[int] | np.ndarray, others: Sequence[int] | np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(ids), len(others))
    differing = np.flatnonzero(np.asarray(ids[:length]) != np.asarray(others[:length]))
    return int(differing[0]) if len(differing) else length


def possible_reuse(prompt: Sequence[int], num_known_tokens: int, ends: Sequence[int], *, is_cuttable: bool) -> int:
    """How many tokens of a prompt a server can start from; its last token must always be computed."""
    known = min(num_known_tokens, len(prompt) - 1)
    return known if is_cuttable else max((end for end in ends if end <= known), default=0)


def _as_template_reads(message: Wire) -> Wire:
    """Templates walk over the arguments of a call, so these are given as an object; clients send JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return message | {"tool_calls": parsed}
