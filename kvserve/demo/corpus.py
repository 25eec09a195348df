"""The text that the demo tokenizer learns its merges from: hand-written passages and seeded sentences.

It knows nothing of models or token ids. The text only has to be varied enough that common English, code, JSON, shell
and Markdown become whole tokens; other scripts stay bytes or short merges, as in any byte-level vocabulary.
"""

import json
import random
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent

Sentence = Callable[[random.Random], str]


@cache
def _words() -> dict[str, list[str]]:
    return tomllib.loads((FOLDER / "words.toml").read_text(encoding="utf-8"))


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


WRITERS: tuple[Sentence, ...] = (_statement, _statement, _advice, _bullet, _python, _record, _question)


def passages(seed: int = 0, num_sentences: int = 1000) -> Iterator[str]:
    """Yield the training text piece by piece; the same arguments always give the same pieces."""
    yield (FOLDER / "passages.txt").read_text(encoding="utf-8")
    rng = random.Random(seed)
    for _ in range(num_sentences):
        yield rng.choice(WRITERS)(rng)
