"""What became of each character of an answer: its pieces in order, and the deltas that go out; decides nothing."""

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
    """A run of the answer's text. All pieces in order are the text that the model wrote, character by character.

    `call` is the source of one or more calls, `tag` a tag, `space` white space that only forms the page.
    """

    kind: PieceKind
    text: str


def random_call_id() -> str:
    """A call id of letters and digits only: clients drop or replace anything else."""
    return f"call{secrets.token_hex(12)}"


class Record:
    """Collects pieces for good and deltas until they are taken."""

    def __init__(self) -> None:
        self._written: list[tuple[PieceKind, str]] = []
        self._deltas: list[OutputDelta] = []
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []

    def write(self, kind: PieceKind, text: str) -> None:
        """Notes `text`; reasoning and content also go out."""
        if text:
            self._written.append((kind, text))
            if kind == "content":
                self._deltas.append(ContentDelta(text))
            elif kind == "reasoning":
                self._deltas.append(ReasoningDelta(text))

    def begin_call(self, call_id: str, name: str) -> str:
        """A call goes out; its arguments and its end follow before anything else is written. Returns its id."""
        self._call = ToolCallStart(call_id, name)
        self._deltas.append(self._call)
        return call_id

    def write_arguments(self, text: str) -> None:
        """A piece of the arguments of the call that has begun goes out."""
        if text:
            self._arguments.append(text)
            self._deltas.append(ToolCallPiece(text))

    def end_call(self, source: str, *, is_cut: bool) -> None:
        """Ends the call that has begun. `source` is what was written of it, "" where another call's source has it."""
        if self._call is None:
            raise ValueError("no call has begun")
        block = ToolCallBlock(self._call.call_id, self._call.name, "".join(self._arguments))
        self._deltas.append(ToolCallEnd(block, is_cut))
        self._call, self._arguments = None, []
        if source:
            self._written.append(("call", source))

    def add_call(self, call_id: str, name: str, arguments: str, source: str = "") -> None:
        """A whole call goes out."""
        self.begin_call(call_id, name)
        self.write_arguments(arguments)
        self.end_call(source, is_cut=False)

    def take_deltas(self) -> list[OutputDelta]:
        """The deltas since the last call, neighbours of one channel joined."""
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    def written_from(self, start: int) -> Sequence[tuple[PieceKind, str]]:
        """What was noted, in order, from the entry with this number on; an entry never changes."""
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
    """Neighbouring pieces of one channel, or of one call, as one: what arrived together goes out together."""
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
