"""Prompts of a given length, no two of which begin alike, so that no cache of prefixes can answer for the model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.client import Message

_TEXT = """the of and to in is that it was for on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over did
down only way find use may water long little very after words called just where most know"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user says, and the ids that the model sees of it once the chat template is around it."""

    text: str
    ids: tuple[int, ...]


class Prompts:
    """Makes prompts for the model in a folder; the same calls in the same order give the same prompts."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._seeds = count()
        self._num_frame_tokens = len(self._encode_user(""))

    def make(self, num_tokens: int) -> Prompt:
        """A prompt of about `num_tokens` tokens, within two percent or ten tokens."""
        rng = random.Random(next(self._seeds))
        words = rng.choices(_WORDS, k=num_tokens)
        while len(ids := self._encode_user(text := " ".join(words))) > num_tokens:
            words = words[: max(1, len(words) - max(1, (len(ids) - num_tokens) // 2))]
        return Prompt(text, ids)

    def message(self, role: str, num_tokens: int) -> Message:
        """A message whose content alone has about `num_tokens` tokens."""
        return {"role": role, "content": self.make(num_tokens + self._num_frame_tokens).text}

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The model tokens of a conversation, the generation tail included."""
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False))

    def _encode_user(self, text: str) -> tuple[int, ...]:
        return self.encode([{"role": "user", "content": text}])


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    differing = (position for position, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
