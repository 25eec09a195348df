"""Prompts that a seed makes, each another one, all reproducible. It knows no model."""

import random

WORDS = ("ships", "sails", "wind", "harbour", "storm", "rope", "mast", "island", "gull", "captain", "map", "compass")
WORDS += ("tide", "anchor", "deck", "chart", "lantern", "barrel", "cook", "letter", "promise", "morning", "river")
WORDS += ("stone", "garden", "window", "winter", "bread", "candle", "clock", "mirror", "bridge")


def seeded_text(seed: int, number: int, num_words: int) -> str:
    """So many words, in sentences."""
    chance = random.Random(f"{seed} {number}")
    words = [chance.choice(WORDS) for _ in range(num_words)]
    sentences = [" ".join(words[first : first + 9]).capitalize() for first in range(0, num_words, 9)]
    return ". ".join(sentences) + "."


def seeded_ids(seed: int, number: int, num_tokens: int, vocab_size: int) -> list[int]:
    """So many ids of a vocabulary."""
    chance = random.Random(f"{seed} {number} ids")
    return [chance.randrange(vocab_size) for _ in range(num_tokens)]
