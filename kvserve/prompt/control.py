"""Keeps control tokens that a client spells out plain text: only the template's own become tokens.

    client's text -> a mark in every spelling -> chat template -> ids, where marked spellings are plain text

It knows a tokenizer's added tokens and which of them a template writes, no messages. Marks are noncharacters of
Unicode, which texts for interchange do not hold; those that a client sends become U+FFFD.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from kvserve.prompt.images_text import EDGE
from kvserve.prompt.tokenizer import Tokenizer, without_surrogates

MARK = "\ufdd1"
"""Behind the first character of a spelling, so that no search finds the token, neither the template's nor ours."""

BEFORE, BEHIND = "\ufdd2", "\ufdd3"
"""Beside a spelling that ends or begins a text, until it is rendered: templates check how a text starts and ends."""

LIVE = "\ufdd4"
"""Before the template's own tokens, in their names of the second tokenizer."""

NOTHING = "\ufdd5"
"""Thinking that there is none of, where a template must be given some; it goes with what the template writes around."""

CALL = "\ufdd6"
"""Before the first name of calls whose words the template has no place for, until they stand before the calls."""

_MARKS = re.compile(f"[{MARK}-{CALL}]")
_PRIVATE = re.compile(f"[{EDGE}{MARK}-{CALL}]")
_ESCAPED = re.compile(r"(\\\\)|\\ufdd1")
"""Two backslashes, which Python shows of one, and the escape that it shows of a mark."""


def shown(text: str) -> str:
    """A text without the marks, as the client and the template wrote it."""
    return text if text.isascii() else _MARKS.sub("", text)


class _MarkedText(str):
    """A text whose marks are marks in what Python shows of it too, as some templates write lists and objects."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _ESCAPED.sub(lambda found: found[1] or MARK, super().__repr__())


def keeping_marks(text: str) -> str:
    """The same text, whose marks are kept however a template writes what it stands in."""
    return _MarkedText(text) if MARK in text else text


@dataclass(frozen=True, slots=True)
class Sample:
    """One template's source and rendering of a few short conversations, in which every word is a marker word.

    `user` is a user's message alone, `talk` has an answer too, `calls` ends with calls, `loop` has tools and results
    as well. "" is what the template does not write.
    """

    source: str
    user: str
    talk: str
    calls: str
    loop: str


def control_tokens(tokenizer: Tokenizer, sample: Sample | None, tags: Iterable[str]) -> frozenset[str]:
    """The added tokens with a meaning in the model's turns: special ones, those that end an answer, those that the
    template writes, and those of `tags`, which the readers of answers look for."""
    written = "\n".join(tags)
    if sample is not None:
        written = "\n".join((written, sample.source, sample.user, sample.talk, sample.calls, sample.loop))
    return frozenset(
        token.content
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.content.strip(" \t\r\n\u2581")  # runs of blanks are how text is written
        and (token.special or id in tokenizer.stop_token_ids or token.content in written)
    )


def spared_tags(
    tokenizer: Tokenizer, tokens: Collection[str], sample: Sample | None, tags: Iterable[str]
) -> frozenset[str]:
    """The tags that stay unmarked in an assistant's text: those of thinking and of calls.

    Clients send thinking and calls back inside the text, and templates look for the tags there. A tag that also
    surrounds a user's text, or has what ends an answer in it, is not spared: it would end the message.
    """
    if sample is None:
        return frozenset()
    stops = {tokenizer.decode([id]) for id in tokenizer.stop_token_ids} - {""}
    of_calls = {token for token in tokens if token in sample.calls and token not in sample.talk}
    known = {tag for tag in tags if any(token in tag for token in tokens)}
    ending = {tag for tag in known | of_calls if any(stop in tag for stop in stops)}
    return frozenset(tag for tag in (known | of_calls) - ending if tag not in sample.user)


class ControlTokens:
    """Distinguishes a client's spelling of control tokens from the template's. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tokens: Collection[str], spared: Collection[str] = ()) -> None:
        """`spared` are the tags that stay unmarked in an assistant's text."""
        self.tokens = frozenset(tokens)
        self.spared = frozenset(spared)
        self._tokenizer = tokenizer
        self._longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        either = _either(tokens)
        self._any = re.compile(either)
        in_json = {json.dumps(token, ensure_ascii=False)[1:-1] for token in tokens}
        self._any_in_json = re.compile(_either(in_json))
        self._starts = re.compile(f"(?={either}).", re.DOTALL)
        self._starts_in_answer = re.compile(f"({_either(spared)})|(?={either})(.)", re.DOTALL)
        self._edges = re.compile(f"{BEFORE}({either})|({either}){BEHIND}")

    @cached_property
    def sparing_none(self) -> "ControlTokens":
        """The same for a template that refuses an assistant's text with such a tag."""
        return ControlTokens(self._tokenizer, self.tokens)

    # --- before the template ------------------------------------------------------------------------------------------

    def marked(self, text: str) -> str:
        """A client's text with every spelling marked; the same text where there is none."""
        return self._marked(_without(_PRIVATE, text))

    def is_spelt_in_json(self, text: str) -> bool:
        """Whether something in a JSON text (not escaped to ASCII) would be marked."""
        return self._any_in_json.search(text) is not None or _without(_PRIVATE, text) is not text

    def marked_content(self, text: str) -> str:
        """The same for a message's whole text, which may hold marks of images. The template can still read a spelling
        at its start or end."""
        marked = self.marked_around_images(text)
        if marked is text or MARK not in marked:
            return marked
        start, end = len(marked) - len(marked.lstrip()), len(marked.rstrip())
        for token in self._longest_first:
            spelling = f"{token[0]}{MARK}{token[1:]}"
            if marked.startswith(spelling, start):
                first = start + len(spelling)
                return f"{marked[:start]}{token}{BEHIND}" + self._legible_end(marked[first:end]) + marked[end:]
        return self._legible_end(marked[:end]) + marked[end:]

    def marked_around_images(self, text: str) -> str:
        """The same for a part of a message's text: marks of images stay."""
        return self._marked(_without(_MARKS, text))

    def marked_answer(self, text: str) -> str:
        """The same for an assistant's text, which keeps the tags of thinking and of calls."""
        text = _without(_PRIVATE, text)
        if not self._any.search(text):
            return text
        return self._starts_in_answer.sub(lambda found: found[1] or found[2] + MARK, text)

    def _marked(self, text: str) -> str:
        return self._starts.sub(f"\\g<0>{MARK}", text) if self._any.search(text) else text

    def _legible_end(self, marked: str) -> str:
        for token in self._longest_first:
            spelling = f"{token[0]}{MARK}{token[1:]}"
            if marked.endswith(spelling):
                return marked.removesuffix(spelling) + BEFORE + token
        return marked

    # --- behind it ----------------------------------------------------------------------------------------------------

    def settled(self, text: str) -> str:
        """A rendered text with the mark inside every client's spelling."""
        if BEFORE not in text and BEHIND not in text:
            return text
        text = self._edges.sub(lambda found: self._starts.sub(f"\\g<0>{MARK}", found[1] or found[2]), text)
        return text.replace(BEFORE, "").replace(BEHIND, "")

    def encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The tokenizer's ids of a settled text, with marked spellings as plain text.

        `add_special_tokens` adds what the tokenizer itself puts around a text (BOS).
        """
        if MARK not in text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        before = self._tokenizer.encode("", add_special_tokens=True) if add_special_tokens else ()
        return before + self._plain.encode(*self._any.subn(f"{LIVE}\\g<0>", without_surrogates(text)))

    @cached_property
    def _plain(self) -> "_SecondTokenizer":
        return _SecondTokenizer.of(self._tokenizer.backend, self.tokens)


def spelt_ids(tokenizer: Tokenizer, text: str, tokens: Collection[str]) -> tuple[int, ...]:
    """The ids of a text of the server's own in which these added tokens are written in letters."""
    control = ControlTokens(tokenizer, tokens)
    return control.encode(control.marked(text))


@dataclass(frozen=True, slots=True)
class _SecondTokenizer:
    """The model's tokenizer with other names for control tokens: their usual names are plain text.

    It shares the first one's vocabulary. `real_ids` maps the ids of added tokens here to the model's.
    """

    backend: tokenizers.Tokenizer
    real_ids: dict[int, int]
    control_ids: frozenset[int]
    mark_id: int | None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, tokens: Collection[str]) -> "_SecondTokenizer":
        second = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            second.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            second.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())
        names = [LIVE + token.content if token.content in tokens else token.content for _, token in added]
        renamed = [_renamed(token, name) for name, (_, token) in zip(names, added, strict=True)]
        second.add_tokens([*renamed, tokenizers.AddedToken(MARK, normalized=False)])
        new_ids = [second.token_to_id(name) for name in (*names, MARK)]
        real_ids = {new: id for new, (id, _) in zip(new_ids, added, strict=False) if new is not None}
        control_ids = frozenset(id for id, token in added if token.content in tokens)
        return cls(second, real_ids, control_ids, new_ids[-1])

    def encode(self, text: str, num_live: int) -> tuple[int, ...]:
        """The ids of a text with `num_live` tokens under this tokenizer's names.

        Some vocabularies hold control tokens as plain tokens too and could join one from its characters: then every
        spelling is cut at its mark.
        """
        ids = self._ids(text.replace(MARK, ""))
        if sum(id in self.control_ids for id in ids) > num_live:
            ids = self._ids(text)
        return ids

    def _ids(self, text: str) -> tuple[int, ...]:
        found: Sequence[int] = self.backend.encode(text, add_special_tokens=False).ids
        return tuple(self.real_ids.get(id, id) for id in found if id != self.mark_id)


def _renamed(token: tokenizers.AddedToken, name: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _either(words: Collection[str]) -> str:
    """A pattern that matches the longest of them; it matches nothing if there are none.

    Words with a common beginning are grouped: vocabularies have hundreds, and every `<` of a text may begin one.
    """
    groups: dict[str, list[str]] = {}
    for word in sorted(words, key=lambda word: (-len(word), word)):
        groups.setdefault(word[:2], []).append(re.escape(word[2:]))
    either = "|".join(f"{re.escape(start)}(?:{'|'.join(rests)})" for start, rests in groups.items())
    return f"(?:{either})" if groups else "(?!)"


def _without(private: re.Pattern[str], text: str) -> str:
    """A client's text without these marks."""
    return text if text.isascii() or not private.search(text) else private.sub("\ufffd", text)
