"""Text of any length for system prompts and files: plain sentences, the same for the same seed, no two seeds alike."""

import random

_SUBJECTS = (
    "The parser",
    "A worker",
    "Each report",
    "The index",
    "Every test",
    "A client",
    "The scheduler",
    "One folder",
)
_VERBS = ("reads", "keeps", "checks", "writes", "sorts", "counts", "returns", "names")
_OBJECTS = ("the old lines", "its own state", "a list of paths", "the next step", "all open files", "a short note")
_ENDINGS = ("before it starts", "once per run", "when asked", "without a copy", "in this order", "after a change")


def prose(num_chars: int, seed: int | str) -> str:
    """Sentences in paragraphs, `num_chars` characters of them; the last one may be cut."""
    rng = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < num_chars:
        sentence = " ".join(rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        parts.append(f"{sentence}.{rng.choice((' ', ' ', ' ', '\n'))}")
        length += len(parts[-1])
    return "".join(parts)[:num_chars]
