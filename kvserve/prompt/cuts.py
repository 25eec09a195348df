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
        others = {token: _found_before(token, added) for token in wanted}
        safe = [token for token in wanted if _stands_alone(added[token], others[token], added, normalises=normalises)]
        hiding = {other for token in safe for other in others[token]}
        self.tokens = frozenset(_proved(tokenizer, safe, hiding))
        self._scan = _Scan(self.tokens, hiding)

    def cut(self, text: str) -> list[Piece]:
        """The pieces of `text` in order; joined they are the text again."""
        return self._scan.cut(text)


class _Scan:
    """Finds tokens from left to right and the longest first, as a tokenizer does. `hiding` ones that are no `tokens`
    are no cut, but hide what overlaps them."""

    def __init__(self, tokens: Iterable[str], hiding: Iterable[str]) -> None:
        self._tokens = frozenset(tokens)
        self._hides = not self._tokens.issuperset(hiding)
        longest_first = sorted(self._tokens.union(hiding), key=lambda token: (-len(token), token))
        any_of = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(f"({any_of})") if self._tokens else None

    def cut(self, text: str) -> list[Piece]:
        """The pieces of `text` in order."""
        parts = self._pattern.split(text) if self._pattern is not None else [text]
        pieces: list[Piece] = [("", parts[0])] if parts[0] else []
        pieces += zip(parts[1::2], parts[2::2], strict=True)
        return self._joined(pieces) if self._hides else pieces

    def _joined(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces without those that no cut begins."""
        joined: list[tuple[str, list[str]]] = []
        for token, body in pieces:
            if token in self._tokens:
                joined.append((token, [body]))
            elif joined:
                joined[-1][1].extend((token, body))
            else:
                joined.append(("", [token, body]))
        return [(token, "".join(bodies)) for token, bodies in joined]


def _changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    """Whether a normaliser may change a text; an empty list of them does not."""
    return normalizer is not None and _does_something(json.loads(normalizer.__getstate__()))


def _does_something(state: Mapping[str, object]) -> bool:
    steps = state.get("normalizers")
    return not isinstance(steps, list) or any(map(_does_something, steps))


def _found_before(token: str, added: Iterable[str]) -> frozenset[str]:
    """The tokens that hide an occurrence of this one if they are found first, and those that hide these."""
    found: set[str] = set()
    new = {token}
    while new:
        new = {other for other in added if any(other != each and _overlaps(other, each) for each in new)} - found
        found |= new
    return frozenset(found - {token})


def _stands_alone(
    cut: tokenizers.AddedToken,
    others: Iterable[str],
    added: Mapping[str, tokenizers.AddedToken],
    *,
    normalises: bool,
) -> bool:
    """Whether the text before the token neither depends on it nor decides that it is found, but by the plain tokens
    `others` that overlap it."""
    if cut.lstrip or cut.single_word or (cut.normalized and normalises):
        return False
    if (cut.content[0].isalnum() or cut.content[0] == "_") and any(token.single_word for token in added.values()):
        return False
    if not all(_is_found_alike(added[other], cut) for other in others):
        return False
    # Normalized tokens are searched after the others, so even another token that begins later precedes them.
    late = [other for other in added if cut.normalized and not added[other].normalized]
    return not any(_overlaps(cut.content, other) for other in late)


def _is_found_alike(other: tokenizers.AddedToken, cut: tokenizers.AddedToken) -> bool:
    """Whether both are found in one search, wherever their letters stand."""
    return other.normalized == cut.normalized and not (other.lstrip or other.rstrip or other.single_word)


def _overlaps(first: str, second: str) -> bool:
    """Whether an occurrence of `first` can overlap or contain one of `second` that begins inside it."""
    return second in first or any(second.startswith(first[start:]) for start in range(1, len(first)))


def _proved(tokenizer: Tokenizer, tokens: Sequence[str], hiding: Iterable[str]) -> list[str]:
    """The tokens whose cuts keep the ids, tried between all neighbours and behind the ends of other tokens."""
    scan = _Scan(tokens, hiding)
    found = sorted({*tokens, *hiding})
    lefts = (*_NEIGHBOURS, *found, *(other[:-1] for other in found))
    around = [(left, "word") for left in lefts] + [("word ", right) for right in _NEIGHBOURS]
    return [
        token
        for token in tokens
        if all(_is_cut_exactly(tokenizer, scan, f"x{left}{token}{right}") for left, right in around)
    ]


def _is_cut_exactly(tokenizer: Tokenizer, scan: _Scan, text: str) -> bool:
    pieces = [tokenizer.encode(token + body) for token, body in scan.cut(text)]
    return tokenizer.encode(text) == tuple(token for piece in pieces for token in piece)
