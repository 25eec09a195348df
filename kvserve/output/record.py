"""Records the channel of each character of an answer: its pieces in order, and the deltas to send."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Literal

from kvserve.core import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallBlock,
    ToolCallEnd,
    ToolCallPiece,
    ToolCallStart,
)

PieceKind = Literal["reasoning", "content", "call", "tag", "space"]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A run of the answer's text. All pieces in order are exactly the model's text.

    `call` is the source of one or more calls, `tag` a tag, `space` formatting white space.
    """

    kind: PieceKind
    text: str


def random_call_id() -> str:
    """A call id of letters and digits: clients drop or replace other characters."""
    return f"call{secrets.token_hex(12)}"


class Record:
    """Collects the pieces, and the deltas until they are taken."""

    def __init__(self) -> None:
        self._written: list[tuple[PieceKind, str]] = []
        self._deltas: list[OutputDelta] = []
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []

    def write(self, kind: PieceKind, text: str) -> None:
        """Record `text`; reasoning and content are also sent."""
        if text:
            self._written.append((kind, text))
            if kind == "content":
                self._deltas.append(ContentDelta(text))
            elif kind == "reasoning":
                self._deltas.append(ReasoningDelta(text))

    def begin_call(self, call_id: str, name: str) -> str:
        """Send a call's beginning; its arguments and its end must follow before anything else. Returns its id."""
        self._call = ToolCallStart(call_id, name)
        self._deltas.append(self._call)
        return call_id

    def write_arguments(self, text: str) -> None:
        """Send a piece of the current call's arguments."""
        if text:
            self._arguments.append(text)
            self._deltas.append(ToolCallPiece(text))

    def end_call(self, source: str, *, is_cut: bool) -> None:
        """End the current call. `source` is the model's text of it, "" if another call's source includes it."""
        if self._call is None:
            raise ValueError("no call has begun")
        block = ToolCallBlock(self._call.call_id, self._call.name, "".join(self._arguments))
        self._deltas.append(ToolCallEnd(block, is_cut))
        self._call, self._arguments = None, []
        if source:
            self._written.append(("call", source))

    def add_call(self, call_id: str, name: str, arguments: str, source: str = "") -> None:
        """Send a whole call."""
        self.begin_call(call_id, name)
        self.write_arguments(arguments)
        self.end_call(source, is_cut=False)

    def take_deltas(self) -> list[OutputDelta]:
        """The deltas since the last call, neighbours of one channel joined."""
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    def written_from(self, start: int) -> Sequence[tuple[PieceKind, str]]:
        """The entries from this number on, in order; an entry never changes."""
        return self._written[start:]

    @property
    def pieces(self) -> tuple[TextPiece, ...]:
        """All pieces so far; neighbours of one kind are joined, except calls."""
        pieces: list[TextPiece] = []
        for kind, group in groupby(self._written, key=lambda item: item[0]):
            texts = [text for _, text in group]
            pieces.extend(
                [TextPiece(kind, text) for text in texts] if kind == "call" else [TextPiece(kind, "".join(texts))]
            )
        return tuple(pieces)


def joined(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """The deltas with neighbouring pieces of one channel, or of one call, joined."""
    if len(deltas) < 2:
        return deltas
    result: list[OutputDelta] = []
    for _, neighbours in groupby(deltas, key=type):
        group = list(neighbours)
        texts = [delta.text for delta in group if not isinstance(delta, ToolCallStart | ToolCallEnd)]
        match group[0]:
            case ReasoningDelta():
                result.append(ReasoningDelta("".join(texts)))
            case ContentDelta():
                tokens = chain.from_iterable(delta.tokens for delta in group if isinstance(delta, ContentDelta))
                result.append(ContentDelta("".join(texts), tuple(tokens)))
            case ToolCallPiece():
                result.append(ToolCallPiece("".join(texts)))
            case ToolCallStart() | ToolCallEnd():
                result.extend(group)
    return result
