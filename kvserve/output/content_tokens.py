"""Finds the tokens of an answer's content, for clients that ask for log-probabilities. It knows tokens as bytes and the
channel of each character, no wire forms.

A token counts as content if at least one of its characters does. It is reported once and whole, with its first content
character, since its likelihood is that of the whole token: parts in a tag, in formatting white space or behind a stop
string are not cut off. Tokens that share a character are reported with it, each with its own bytes. Tokens of
reasoning, tags and calls are not reported.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.core import ContentToken, TokenLogprobs
from kvserve.output.record import PieceKind

type TextBytes = Callable[[int], bytes]
type WrittenFrom = Callable[[int], Sequence[tuple[PieceKind, str]]]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A token and the run `[start, end)` of the answer's text that it writes, perhaps with other tokens."""

    token: int
    logprobs: TokenLogprobs
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _ContentRun:
    """The text's characters `[start, end)` are content; `content_start` content characters precede them."""

    start: int
    end: int
    content_start: int


class ContentTokens:
    """One answer's tokens: `add` each token as it is read, `take` the tokens of content that is sent."""

    def __init__(self, text_bytes: TextBytes, written_from: WrittenFrom | None) -> None:
        """`text_bytes` gives a token's bytes, `written_from` the channel of text (see `Record`); None: all text is
        content."""
        self._text_bytes = text_bytes
        self._written_from = written_from
        self._pending: list[tuple[int, TokenLogprobs]] = []
        self._begun = b""
        self._placed: deque[_Placed] = deque()
        self._runs: deque[_ContentRun] = deque()
        self._num_characters = self._num_known_characters = 0
        self._num_known_pieces = self._num_known_content = self._num_out = 0

    def add(self, token: int, logprobs: TokenLogprobs, text: str) -> None:
        """Add a token that completed `text`."""
        self._pending.append((token, logprobs))
        if text:
            self.complete(text)

    def complete(self, text: str) -> None:
        """Give `text` to the tokens without text."""
        for (token, logprobs), (start, end) in zip(self._pending, self._places(text), strict=True):
            place = self._num_characters
            self._placed.append(_Placed(token, logprobs, place + start, place + end))
        self._pending.clear()
        self._num_characters += len(text)

    def take(self, num_characters: int) -> tuple[ContentToken, ...]:
        """The tokens to report with the next characters of content, which are so many."""
        self._learn_where_text_went()
        self._num_out += num_characters
        told: list[ContentToken] = []
        while self._placed:
            placed = self._placed[0]
            offset = self._offset(placed)
            if offset is None and placed.end > self._num_known_characters:
                break
            if offset is not None and offset >= self._num_out:
                break
            self._placed.popleft()
            if offset is not None:
                told.append(self._content_token(placed, offset))
        return tuple(told)

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Where each unplaced token begins and ends, counted from the beginning of `text`; a token that begins another
        character reaches into the text behind."""
        places: list[tuple[int, int]] = []
        data = self._begun
        for token, _ in self._pending:
            piece = self._text_bytes(token)
            # A byte inside a character belongs to the one that was begun; else that one is over, whole or not.
            start = _num_characters(data, is_over=not _is_inside_character(piece))
            data += piece
            places.append((start, _num_characters(data, is_over=True)))
        whole, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[num_bytes:] if len(text) <= len(whole) else b""
        most = len(text) + bool(self._begun)
        if places:  # a decoder may say less of a first token, and more of what is no UTF-8
            places[-1] = (places[-1][0], most)
        return [(min(start, len(text)), min(end, most)) for start, end in places]

    def _learn_where_text_went(self) -> None:
        if self._written_from is None:
            self._learn("content", self._num_characters - self._num_known_characters)
            return
        written = self._written_from(self._num_known_pieces)
        self._num_known_pieces += len(written)
        for kind, text in written:
            self._learn(kind, len(text))

    def _learn(self, kind: PieceKind, num_characters: int) -> None:
        start = self._num_known_characters
        self._num_known_characters += num_characters
        if kind == "content":
            self._runs.append(_ContentRun(start, self._num_known_characters, self._num_known_content))
            self._num_known_content += num_characters

    def _offset(self, placed: _Placed) -> int | None:
        """The number of content characters before the token's first one; None without one."""
        while self._runs and self._runs[0].end <= placed.start:
            self._runs.popleft()
        if not self._runs or self._runs[0].start >= placed.end:
            return None
        run = self._runs[0]
        return run.content_start + max(0, placed.start - run.start)

    def _content_token(self, placed: _Placed, offset: int) -> ContentToken:
        return ContentToken(
            text_bytes=self._text_bytes(placed.token),
            logprob=placed.logprobs.logprob,
            top=tuple((self._text_bytes(token), logprob) for token, logprob in placed.logprobs.top),
            offset=offset,
        )


def _num_characters(data: bytes, *, is_over: bool) -> int:
    """The number of UTF-8 characters; an incomplete character counts if nothing more of it follows."""
    return len(codecs.utf_8_decode(data, "replace", is_over)[0])


def _is_inside_character(piece: bytes) -> bool:
    return bool(piece) and piece[0] & 0xC0 == 0x80
