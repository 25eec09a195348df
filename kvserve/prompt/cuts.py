"""Cuts a text so that its pieces, tokenised one by one, have exactly the ids of the whole text.

A tokenizer first splits a text at its added tokens and then encodes each part alone, so a piece that begins with an
added token can be tokenised by itself. Exceptions are looked up in the tokenizer and then tried. It knows no templates
and no messages.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from kvserve.prompt.tokenizer import Tokenizer

type Piece = tuple[str, str]
"""The token that a piece begins with ("" at the start of a text) and what follows it."""

# A cut token between these must not change their ids: letters, marks that join, white space that flags could eat.
_NEIGHBOURS = ("", "a", "word ", " ", "\n", "\n\n", " \t ", "e\u0301", "\u6771", "\U0001fae0", "<", "<|", "1", "'s")


class Cutter:
    """Cuts texts at a set of added tokens, except those where a cut could change the ids."""

    def __init__(self, tokenizer: Tokenizer, tokens: Iterable[str]) -> None:
        added = {token.content: token for token in tokenizer.backend.get_added_tokens_decoder().values()}
        wanted = sorted({token for token in tokens if token in added})
        normalises = _changes_text(tokenizer.backend.normalizer)
        safe = [token for token in wanted if _stands_alone(added[token], added, normalises=normalises)]
        self.tokens = frozenset(_proved(tokenizer, safe))
        self._pattern = _pattern(self.tokens)

    def cut(self, text: str) -> list[Piece]:
        """The pieces of `text` in order; joined they are the text again."""
        return _cut(self._pattern, text)


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _cut(pattern: re.Pattern[str] | None, text: str) -> list[Piece]:
    parts = pattern.split(text) if pattern is not None else [text]
    pieces: list[Piece] = [("", parts[0])] if parts[0] else []
    pieces += zip(parts[1::2], parts[2::2], strict=True)
    return pieces


def _changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    """Whether a normaliser may change a text; an empty list of them does not."""
    return normalizer is not None and _does_something(json.loads(normalizer.__getstate__()))


def _does_something(state: Mapping[str, object]) -> bool:
    steps = state.get("normalizers")
    return not isinstance(steps, list) or any(map(_does_something, steps))


def _stands_alone(cut: tokenizers.AddedToken, added: dict[str, tokenizers.AddedToken], *, normalises: bool) -> bool:
    """Whether the text before the token neither decides that it is found nor depends on it."""
    if cut.lstrip or cut.single_word or (cut.normalized and normalises):
        return False
    if (cut.content[0].isalnum() or cut.content[0] == "_") and any(token.single_word for token in added.values()):
        return False
    others = [other for other in added if other != cut.content]
    # Normalized tokens are searched after the others, so even another token that begins later precedes them.
    late = [other for other in others if cut.normalized and not added[other].normalized]
    return not any(_overlaps(other, cut.content) for other in others) and not any(
        _overlaps(cut.content, other) for other in late
    )


def _overlaps(first: str, second: str) -> bool:
    """Whether an occurrence of `first` can overlap or contain one of `second` that begins inside it."""
    return second in first or any(second.startswith(first[start:]) for start in range(1, len(first)))


def _proved(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """The tokens whose cuts keep the ids, tried between all neighbours and behind the ends of other cut tokens."""
    pattern = _pattern(tokens)
    lefts = (*_NEIGHBOURS, *tokens, *(other[:-1] for other in tokens))
    around = [(left, "word") for left in lefts] + [("word ", right) for right in _NEIGHBOURS]
    return [
        token
        for token in tokens
        if all(_is_cut_exactly(tokenizer, pattern, f"x{left}{token}{right}") for left, right in around)
    ]


def _is_cut_exactly(tokenizer: Tokenizer, pattern: re.Pattern[str] | None, text: str) -> bool:
    pieces = [tokenizer.encode(token + body) for token, body in _cut(pattern, text)]
    return tokenizer.encode(text) == tuple(token for piece in pieces for token in piece)
