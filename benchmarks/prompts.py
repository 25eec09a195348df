"""Prompts of a given length, no two of which begin alike, so that no cache of prefixes can answer for the model."""

import random
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from transformers import AutoTokenizer

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

    def make(self, num_tokens: int) -> Prompt:
        """A prompt of about `num_tokens` tokens, within two percent or ten tokens."""
        rng = random.Random(next(self._seeds))
        words = rng.choices(_WORDS, k=num_tokens)
        while len(ids := self._encode(text := " ".join(words))) > num_tokens:
            words = words[: max(1, len(words) - max(1, (len(ids) - num_tokens) // 2))]
        return Prompt(text, tuple(ids))

    def _encode(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))
