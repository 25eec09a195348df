"""Which of an answer's tokens its content was written with, for clients that ask how likely these were. It knows tokens
as bytes and where text went; nothing of wire forms or of how likely a token ought to be.

A token counts as content where at least one of its characters is. It is told once and whole, with the first of these
that goes out, for its likelihood is that of all of it: what of it lies in a tag, in formatting white space or behind a
stop string is not cut off. Tokens that share a character are told with it, each with its own bytes. Tokens of
reasoning, of tags and of calls are not told.
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
    """A token and the run `[start, end)` of the answer's text that it writes, also with others."""

    token: int
    logprobs: TokenLogprobs
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _ContentRun:
    """The text's characters `[start, end)` are content, `content_start` of which stand before them."""

    start: int
    end: int
    content_start: int


class ContentTokens:
    """One answer's tokens: `add` each one as it is read, `take` those of content that goes out."""

    def __init__(self, text_bytes: TextBytes, written_from: WrittenFrom | None) -> None:
        """`text_bytes` says what a token stands for, `written_from` where text went (see `Record`); None: all of it is
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
        """A token was read, and with it `text` was complete."""
        self._pending.append((token, logprobs))
        if text:
            self.complete(text)

    def complete(self, text: str) -> None:
        """The tokens that had no text yet have written `text`."""
        for (token, logprobs), (start, end) in zip(self._pending, self._places(text), strict=True):
            place = self._num_characters
            self._placed.append(_Placed(token, logprobs, place + start, place + end))
        self._pending.clear()
        self._num_characters += len(text)

    def take(self, num_characters: int) -> tuple[ContentToken, ...]:
        """The tokens that are told with the next characters of content, which are so many."""
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
        """Where each token that has no place yet begins and ends, counted from the beginning of `text`: one that begins
        another character reaches into what comes behind it."""
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
        """How much content stands before the first of the token's characters that is content; None without one."""
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
    """Characters of UTF-8; one that is not complete counts where nothing more of it comes."""
    return len(codecs.utf_8_decode(data, "replace", is_over)[0])


def _is_inside_character(piece: bytes) -> bool:
    return bool(piece) and piece[0] & 0xC0 == 0x80
