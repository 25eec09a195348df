"""Finds where messages begin in model tokens; the special tokens that open a message are learned once per model.

The positions only suggest checkpoints and need not be exact: a user who types such a token adds a position, a template
without special tokens has none.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile

from kvserve.core import Message, MessageStart, TextBlock
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer

_PROBE = (
    ("system", "Kiwi seven"),
    ("user", "Amber lake"),
    ("assistant", "Green stone"),
    ("user", "Violet moon"),
)

MAX_INDEXED_TOKENS = 2

_ROLE_TOKENS = ("<|system|>", "<|observation|>", "<|tool|>")


@dataclass(frozen=True, slots=True)
class MessageMarkers:
    """`openers` are the tokens that begin a message; in a user's message `user_header` and then text follow."""

    openers: frozenset[int]
    user_header: tuple[int, ...]
    special: frozenset[int]

    def message_starts(self, ids: Sequence[int]) -> tuple[MessageStart, ...]:
        """The offset of every message in a rendered prompt, in order, the generation tail included."""
        offsets = _offsets(ids, self.openers)
        return tuple(MessageStart(offset, self._is_user(ids, offset)) for offset in offsets)

    def _is_user(self, ids: Sequence[int], offset: int) -> bool:
        """Whether it is a user's own text: templates that write tool results as user messages open them with a special
        token."""
        end = offset + len(self.user_header)
        return tuple(ids[offset:end]) == self.user_header and end < len(ids) and ids[end] not in self.special


def _offsets(ids: Sequence[int], tokens: frozenset[int]) -> list[int]:
    """The positions of any of these tokens, in order. `index` searches 100k ids four times as fast as a loop, once for
    each token."""
    if len(tokens) > MAX_INDEXED_TOKENS:
        return [offset for offset, token in enumerate(ids) if token in tokens]
    return sorted(offset for token in tokens for offset in _offsets_of(ids, token))


def _offsets_of(ids: Sequence[int], token: int) -> Iterator[int]:
    offset = -1
    with suppress(ValueError):  # `index` finds no other one
        while True:
            yield (offset := ids.index(token, offset + 1))


def learn_markers(tokenizer: Tokenizer, template: ChatTemplate) -> MessageMarkers:
    """Render a short conversation and find the special tokens between its messages."""
    special = frozenset(tokenizer.backend.get_added_tokens_decoder())
    gaps = _gaps_in_both_modes(tokenizer, template, special)
    if len(gaps) < len(_PROBE) - 1:
        return MessageMarkers(frozenset(), (), special)
    to_assistant, to_user = gaps[-2], gaps[-1]
    opener = next((token for token in reversed(_shared(to_assistant, to_user)) if token in special), None)
    if opener is None:
        opener = _parting(to_assistant, to_user, special)
    if opener is not None:
        return MessageMarkers(frozenset({opener}), _from(to_user, {opener}), special)
    firsts = (next((token for token in gap if token in special), None) for gap in gaps)
    openers = {token for token in firsts if token is not None}
    if openers:  # the roles are tokens themselves: the probe met two of them, the others go by their usual names
        openers |= {token for name in _ROLE_TOKENS if (token := tokenizer.token_id(name)) is not None}
    return MessageMarkers(frozenset(openers), _from(to_user, openers), special)


def _parting(one: Sequence[int], other: Sequence[int], special: frozenset[int]) -> int | None:
    """The first special token that both gaps have and behind which they part: the roles differ there, whatever ends
    the messages before."""
    behind = {token: following for token, following in reversed(list(pairwise(other)))}
    shared = ((token, following) for token, following in pairwise(one) if token in special and token in behind)
    return next((token for token, following in shared if following != behind[token]), None)


def _gaps_in_both_modes(tokenizer: Tokenizer, template: ChatTemplate, special: frozenset[int]) -> list[tuple[int, ...]]:
    """The gaps, each without what only one of thinking on and off writes behind a message's text."""
    off, on = (_gaps(tokenizer, template, thinking=thinking) for thinking in (False, True))
    return [_without_words_of_one_mode(*modes, special) for modes in zip(off, on, strict=False)]


def _without_words_of_one_mode(off: tuple[int, ...], on: tuple[int, ...], special: frozenset[int]) -> tuple[int, ...]:
    """The gap from where both modes go on alike, unless a special token begins both alike: then they part behind it."""
    end = _shared(off[::-1], on[::-1])[::-1]
    return end if special.intersection(end) and not special.intersection(_shared(off, on)) else off


def _shared(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """What both begin with."""
    return tuple(pair[0] for pair in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _gaps(tokenizer: Tokenizer, template: ChatTemplate, *, thinking: bool) -> list[tuple[int, ...]]:
    """The ids between neighbouring probe texts, if all of them were rendered."""
    messages = tuple(Message(role, (TextBlock(text),)) for role, text in _PROBE)  # type: ignore[arg-type]
    text = template.render(messages, template.needed_tools, thinking=thinking).text
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    places = [text.find(words) for _, words in _PROBE]
    gaps = []
    for (_, words), place, following in zip(_PROBE, places, places[1:], strict=False):
        if place >= 0 and following >= 0:
            start, end = place + len(words), following
            pairs = zip(encoded.ids, encoded.offsets, strict=True)
            gaps.append(tuple(token for token, (left, _) in pairs if start <= left < end))
    return gaps


def _from(gap: Sequence[int], openers: set[int]) -> tuple[int, ...]:
    first = next((index for index, token in enumerate(gap) if token in openers), len(gap))
    return tuple(gap[first:])
