"""Reads one answer as it is generated: tokens in, deltas out, up to the finish reason. It knows text, no wire form.

token -> detokenizer -> splitter (reasoning | content | call) -> stop strings, for content only
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    Finished,
    FinishReason,
    GenerationDone,
    OutputDelta,
    ReasoningDelta,
    TokenLogprobs,
    ToolCallEnd,
    Usage,
)
from kvserve.output.content_tokens import ContentTokens
from kvserve.output.record import TextPiece, joined
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner


class TokenText(Protocol):
    """Turns one answer's tokens into text."""

    def add(self, token: int) -> str:
        """The text that a token completes."""
        ...

    def finish(self) -> str:
        """The text held back."""
        ...


@dataclass(frozen=True, slots=True)
class SaidTokens:
    """The first `num_tokens` tokens of an answer, and `rest`: the part of the next token's text that belongs to it."""

    num_tokens: int
    rest: str = ""


@dataclass(slots=True, eq=False)
class AnswerReader:
    """The state of one answer. Without a splitter all text is content (a raw prompt has no channels). With
    `content_tokens` content deltas have their tokens."""

    detokenizer: TokenText
    scanner: StopScanner
    splitter: Splitter | None
    allows_many_calls: bool = True
    content_tokens: ContentTokens | None = None
    num_tokens: int = 0
    num_hidden_tokens: int = 0
    num_reasoning_tokens: int = 0
    first_token_at: float | None = None
    done: GenerationDone | None = None
    finish_reason: FinishReason | None = None
    has_calls: bool = False
    """Whether a call is complete; a call that the text's end cut cannot be run."""
    stop_string: str | None = None
    _has_reasoning: bool = False
    """Whether there is reasoning; tags without text between them do not count."""
    _num_content_characters: int = 0
    _texts: list[str] = field(default_factory=list)
    """The text of each token; kept only if the answer may end inside a token."""
    _ends_with_call: bool = False
    """Whether the answer ends with the one call that was allowed, and later text is ignored."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, with a stop string or with the one call that was allowed."""
        return self.stop_string is not None or (self.has_calls and not self.allows_many_calls)

    @property
    def num_completion_tokens(self) -> int:
        """The number of the answer's tokens, with the stop token that ended it, without tokens after a stop string."""
        return self.num_tokens + self.num_hidden_tokens

    def said_tokens(self) -> SaidTokens:
        """The answer in tokens: all tokens read; up to the stop string if one ended it; up to the end of the call, with
        the text that closes it, if the one allowed call ended it."""
        if self.splitter is None:
            return SaidTokens(self.num_tokens)
        if self.stop_string is not None:
            return self._tokens_of(_up_to_content(self.splitter.pieces, self._num_content_characters))
        call = _up_to_call(self.splitter.pieces) if self._ends_with_call else None
        if call is None or not self.splitter.closing:
            return SaidTokens(self.num_tokens)
        return self._tokens_of(call + self.splitter.closing)

    def _tokens_of(self, text: str) -> SaidTokens:
        """`text` in the answer's tokens, as far as the texts are equal."""
        ends = list(accumulate(map(len, self._texts)))
        num_whole = bisect_right(ends, _num_alike(text, "".join(self._texts)))
        start = ends[num_whole - 1] if num_whole else 0
        # The last token may only begin a character that the next one completes: count up to the first that ends here.
        return SaidTokens(bisect_left(ends, start) + 1 if start else 0, text[start:])

    def feed(self, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[OutputDelta]:
        """The deltas of these tokens; none after the answer's end. `content_tokens` needs `logprobs`, one for each
        token."""
        deltas: list[OutputDelta] = []
        for index, token in enumerate(tokens):
            if self.is_over:
                break
            self.first_token_at = self.first_token_at or time.monotonic()
            self.num_tokens += 1
            text = self.detokenizer.add(token)
            if self.content_tokens is not None:
                self.content_tokens.add(token, logprobs[index], text)
            if self.scanner.looks_for_any or not self.allows_many_calls:
                self._texts.append(text)
            deltas += self._split(text)
            if self.splitter is not None and self.splitter.in_reasoning:
                self.num_reasoning_tokens += 1
        self._ends_with_call = self.has_calls and not self.allows_many_calls
        return joined(deltas)

    def finish(self, done: GenerationDone) -> list[AnswerEvent]:
        """The deltas held back, and the end. An answer that was broken off (the server stops, the client left) gets no
        `Finished` and no end of a cut call: a client would take the answer for whole, or run the call."""
        self.done = done
        is_cut = done.reason != "stop" and not self.is_over
        self.num_hidden_tokens = 1 if done.reason == "stop" and not self.is_over else 0
        deltas = self._rest(is_cut) if not self.is_over else []
        if is_cut and done.reason not in ("length", "watchdog"):
            return [*joined([each for each in deltas if not (isinstance(each, ToolCallEnd) and each.is_cut)])]
        self.finish_reason = "length" if is_cut else "tool_calls" if self.has_calls else "stop"
        usage = Usage(
            num_prompt_tokens=done.num_prompt_tokens,
            num_cached_tokens=done.num_cached_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens if self._has_reasoning else 0,
            num_accepted_tokens=min(done.drafting.num_accepted_tokens, self.num_completion_tokens),
            num_rejected_tokens=done.drafting.num_drafted_tokens - done.drafting.num_accepted_tokens,
        )
        return [*joined(deltas), Finished(self.finish_reason, usage, self.stop_string)]

    def _rest(self, is_cut: bool) -> list[OutputDelta]:
        """The deltas that detokenizer, splitter and stop strings held back."""
        text = self.detokenizer.finish()
        if self.content_tokens is not None:
            self.content_tokens.complete(text)
        deltas = self._split(text)
        if self.splitter is not None and not self.is_over:
            deltas += self._scan(self.splitter.finish(cut=is_cut))
        if self.stop_string is None and (held := self.scanner.finish().text):
            deltas.append(self._content(held))
        return deltas

    def _split(self, text: str) -> list[OutputDelta]:
        if not text:
            return []
        return self._scan(self.splitter.feed(text) if self.splitter is not None else [ContentDelta(text)])

    def _scan(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        """Search content for stop strings; reasoning and calls pass unchanged."""
        kept: list[OutputDelta] = []
        for delta in deltas:
            if self.is_over:
                break
            if isinstance(delta, ContentDelta):
                scanned = self.scanner.feed(delta.text)
                self.stop_string = scanned.stop_string
                kept += [self._content(scanned.text)] if scanned.text else []
            else:
                held = self.scanner.finish().text
                kept += [self._content(held)] if held else []
                self._has_reasoning |= isinstance(delta, ReasoningDelta)
                self.has_calls = self.has_calls or (isinstance(delta, ToolCallEnd) and not delta.is_cut)
                kept.append(delta)
        self._num_content_characters += sum(len(delta.text) for delta in kept if isinstance(delta, ContentDelta))
        return kept

    def _content(self, text: str) -> ContentDelta:
        """The next content delta."""
        return ContentDelta(text, self.content_tokens.take(len(text)) if self.content_tokens is not None else ())


def _num_alike(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _up_to_call(pieces: Iterable[TextPiece]) -> str | None:
    """The text up to and with the first call; None without one."""
    text: list[str] = []
    for piece in pieces:
        text.append(piece.text)
        if piece.kind == "call":
            return "".join(text)
    return None


def _up_to_content(pieces: Iterable[TextPiece], num_characters: int) -> str:
    """The text before the content's character with this number, from zero; all text if there are fewer."""
    text: list[str] = []
    for piece in pieces:
        if piece.kind == "content":
            if num_characters < len(piece.text):
                text.append(piece.text[:num_characters])
                break
            num_characters -= len(piece.text)
        text.append(piece.text)
    return "".join(text)
