"""Which stretches of a rendered prompt the model itself wrote, word for word or in other spelling.

It knows pieces of text and a reader of what they say, which is handed in; it never looks at token ids.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvserve.prompt.cuts import Piece
from kvserve.prompt.turn_layout import TurnLayout

type MessageParts = tuple[str, str, tuple[tuple[str, str], ...]]
"""Reasoning, content and calls (name, arguments), in a form that is equal for texts that say the same."""

MAX_MESSAGES_PER_TURN = 8
"""How many rendered messages one answer is looked for in: its reasoning, its text, and then a message per call."""


class ReadsMessages(Protocol):
    """Reads turns; `key` is equal for readers that read alike."""

    @property
    def key(self) -> Hashable: ...

    def __call__(self, text: str) -> MessageParts:
        """What `text`, a whole assistant's message behind its header, says."""
        ...

    def ids(self, text: str, said: MessageParts) -> tuple[str, ...]:
        """The ids that the calls of such a text, which says this, are written with; "" for one without."""
        ...


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece that may be an assistant's message: `text` is what stands behind the header.

    Templates that write a whole tool loop as one message have a result and the answer to it in one piece, which begins
    with the token that ended the turn; that is a unit too, with all of its text. Units without another message between
    them share their `run`.
    """

    index: int
    run: int
    text: str


class ReplaySpan(NamedTuple):
    """The units `[start, stop)`."""

    start: int
    stop: int


def behind_header(text: str, layout: TurnLayout) -> str | None:
    """The text of a unit, None for what cannot be one."""
    if layout.header and text.startswith(layout.header):
        return text[len(layout.header) :]
    return text if layout.header and text.startswith(tuple(layout.ends)) else None


def find_units(pieces: Sequence[Piece], layout: TurnLayout) -> list[Unit]:
    """The assistant's messages among `pieces`, an open one at the end included."""
    units: list[Unit] = []
    run, in_run = -1, False
    header = layout.header
    for index, (token, body) in enumerate(pieces):
        if token in layout.ends:
            if in_run and body and not body.isspace():
                units.append(Unit(index, run, token + body))
            continue
        rest = header.removeprefix(token)  # what the header says behind the token that the piece begins with
        is_answer = header.startswith(token) and bool(header) and body.startswith(rest)
        if is_answer:
            run += not in_run
            units.append(Unit(index, run, body[len(rest) :]))
        in_run = is_answer
    return units


@dataclass(frozen=True, slots=True)
class ReplayPlaces:
    """Where what is said in a prompt: spans of units by their slot and what they say.

    The k-th assistant's message of the conversation is looked for in slot k if there are as many runs (or else units)
    as messages; else all spans are in slot 0 and looked through in order.
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
        """The first span that says what the assistant's message with this number does, from a unit on."""
        spans = self.spans.get((message if self.is_aligned else 0, said), ())
        first = bisect_left(spans, ReplaySpan(at_or_after, 0))
        return spans[first] if first < len(spans) else None


def _together(first: MessageParts, second: MessageParts) -> MessageParts | None:
    """What two messages say together, None where that is more than one answer can: each has one text at most."""
    if (first[0] and second[0]) or (first[1] and second[1]):
        return None
    return first[0] or second[0], first[1] or second[1], first[2] + second[2]
