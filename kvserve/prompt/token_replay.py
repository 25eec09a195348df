"""Finds the parts of a rendered prompt that the model itself wrote, literally or in another spelling.

It knows pieces of text and a reader of their content, which is handed in, no token ids.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvserve.prompt.control import shown
from kvserve.prompt.cuts import Piece
from kvserve.prompt.memo import Memo
from kvserve.prompt.turn_layout import TurnLayout

type MessageParts = tuple[str, str, tuple[tuple[str, str], ...]]
"""Reasoning, content and calls (name, arguments), in a form that is equal for texts with the same meaning."""

MAX_MESSAGES_PER_TURN = 8
"""The most rendered messages of one answer: its reasoning, its text, and a message per call."""


class ReadsMessages(Protocol):
    """Reads turns; `key` is equal for readers that read alike."""

    @property
    def key(self) -> Hashable: ...

    def __call__(self, text: str) -> MessageParts:
        """The content of `text`, a whole assistant's message behind its header."""
        ...

    def ids(self, text: str, said: MessageParts) -> tuple[str, ...]:
        """The ids in such a text of its calls; "" for a call without one."""
        ...


@dataclass(frozen=True, slots=True)
class RememberingReader:
    """A reader that remembers each text's content."""

    says: ReadsMessages
    memo: Memo[MessageParts]

    @property
    def key(self) -> object:
        return self.says.key

    def __call__(self, text: str) -> MessageParts:
        key = (self.says.key, text)
        said = self.memo.get(key)
        if said is None:
            said = self.says(shown(text))
            self.memo.put(key, said, 3 * len(text) + 256)
        return said

    def ids(self, text: str, said: MessageParts) -> tuple[str, ...]:
        return self.says.ids(text, said)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece that may be an assistant's message; `text` is the text behind its `header`.

    Templates that write a whole tool loop as one message have a result and its answer in one piece, which begins with
    the token that ended the turn; that is a unit too, with all of its text. Units without another message between them
    share their `run`.
    """

    index: int
    run: int
    text: str
    header: str = ""


class ReplaySpan(NamedTuple):
    """The units `[start, stop)`."""

    start: int
    stop: int


def behind_header(text: str, layout: TurnLayout) -> str | None:
    """The text of a unit, None if it cannot be one."""
    for header in layout.headers:
        if text.startswith(header):
            return text[len(header) :]
    return text if layout.header and text.startswith((*layout.ends, *layout.joined)) else None


def find_units(pieces: Sequence[Piece], layout: TurnLayout) -> list[Unit]:
    """The assistant's messages among `pieces`, an open one at the end included."""
    units: list[Unit] = []
    run, in_run = -1, False
    for index, (token, body) in enumerate(pieces):
        if token in layout.ends:
            if in_run and body and not body.isspace():
                units.append(Unit(index, run, token + body))
            continue
        header = _header(token, body, layout, is_last=index == len(pieces) - 1)
        if header is None and in_run and token in layout.joined and body and not body.isspace():
            units.append(Unit(index, run, token + body))
            continue
        if header is not None:
            run += not in_run
            units.append(Unit(index, run, body[len(header) - len(token) :], header))
        in_run = header is not None
    return units


def _header(token: str, body: str, layout: TurnLayout, *, is_last: bool) -> str | None:
    """The header that a piece begins with, None if it is no assistant's message."""
    for header in layout.headers:
        rest = header.removeprefix(token)  # the header behind the token that begins the piece
        if not (header.startswith(token) and body.startswith(rest)):
            continue
        # The end of a result is no message if another one follows it.
        said = body[len(rest) :]
        if header == layout.header or (is_last if not said or said.isspace() else _is_answer(said, layout)):
            return header
    return None


def _is_answer(said: str, layout: TurnLayout) -> bool:
    return not layout.others or not said.lstrip().startswith(tuple(layout.others))


@dataclass(frozen=True, slots=True)
class ReplayPlaces:
    """The contents of a prompt's units: spans of units by slot and content.

    The k-th assistant's message of the conversation is searched in slot k if there are as many runs (or else units) as
    messages; else all spans are in slot 0 and searched in order.
    """

    spans: Mapping[tuple[int, MessageParts], Sequence[ReplaySpan]]
    is_aligned: bool

    @classmethod
    def of(cls, units: Sequence[Unit], num_messages: int, says: ReadsMessages) -> "ReplayPlaces":
        """The places of these units; each unit is read."""
        by_run = units and units[-1].run + 1 == num_messages
        by_unit = len(units) == num_messages
        found: dict[tuple[int, MessageParts], list[ReplaySpan]] = {}
        said = [says(unit.text) for unit in units]
        for start, unit in enumerate(units):
            slot = unit.run if by_run else start if by_unit else 0
            together: MessageParts = ("", "", ())
            for stop in range(start + 1, min(start + MAX_MESSAGES_PER_TURN, len(units)) + 1):
                joined = _together(together, said[stop - 1])
                if joined is None or units[stop - 1].run != unit.run:
                    break
                together = joined
                found.setdefault((slot, together), []).append(ReplaySpan(start, stop))
        return cls(found, bool(by_run or by_unit))

    def find(self, message: int, said: MessageParts, at_or_after: int) -> ReplaySpan | None:
        """The first span, from a unit on, with the content of the assistant's message with this number."""
        spans = self.spans.get((message if self.is_aligned else 0, said), ())
        first = bisect_left(spans, ReplaySpan(at_or_after, 0))
        return spans[first] if first < len(spans) else None


def _together(first: MessageParts, second: MessageParts) -> MessageParts | None:
    """The content of two messages together, None if one answer cannot have it: an answer has at most one text."""
    if (first[0] and second[0]) or (first[1] and second[1]):
        return None
    return first[0] or second[0], first[1] or second[1], first[2] + second[2]
