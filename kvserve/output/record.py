"""What became of each character of an answer: its pieces in order, and the deltas that go out; decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from kvserve.core import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBlock, ToolCallDelta

PieceKind = Literal["reasoning", "content", "call", "tag", "space"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the answer's text. All pieces in order are the text that the model wrote, character by character.

    `call` is the source of one or more calls, `tag` a tag, `space` white space that only forms the page.
    """

    kind: PieceKind
    text: str


class Record:
    """Collects pieces for good and deltas until they are taken."""

    def __init__(self) -> None:
        self._written: list[tuple[PieceKind, str]] = []
        self._calls: list[tuple[int, Sequence[ToolCallBlock]]] = []
        self._num_taken = 0

    def write(self, kind: PieceKind, text: str) -> None:
        """Notes `text`; reasoning and content also go out."""
        if text:
            self._written.append((kind, text))

    def write_calls(self, source: str, calls: Sequence[ToolCallBlock]) -> None:
        """Notes the calls that `source` is."""
        self._calls.append((len(self._written), calls))
        self._written.append(("call", source))

    def take_deltas(self) -> list[OutputDelta]:
        """The deltas since the last call, neighbours of one channel joined."""
        calls = {index: blocks for index, blocks in self._calls if index >= self._num_taken}
        deltas: list[OutputDelta] = []
        visible = [
            (kind, index, text)
            for index, (kind, text) in enumerate(self._written[self._num_taken :], self._num_taken)
            if kind in ("reasoning", "content", "call")
        ]
        for kind, group in groupby(visible, key=lambda item: item[0]):
            if kind == "call":
                deltas.extend(ToolCallDelta(call) for _, index, _ in group for call in calls[index])
            else:
                joined = "".join(text for _, _, text in group)
                deltas.append(ReasoningDelta(joined) if kind == "reasoning" else ContentDelta(joined))
        self._num_taken = len(self._written)
        self._calls.clear()
        return deltas

    def written_from(self, start: int) -> Sequence[tuple[PieceKind, str]]:
        """What was noted, in order, from the entry with this number on; an entry never changes."""
        return self._written[start:]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces so far; neighbours of one kind are joined, except calls."""
        pieces: list[Piece] = []
        for kind, group in groupby(self._written, key=lambda item: item[0]):
            texts = [text for _, text in group]
            pieces.extend([Piece(kind, text) for text in texts] if kind == "call" else [Piece(kind, "".join(texts))])
        return tuple(pieces)
