"""The ids of pieces of a prompt, with the message starts and images in them, and their joining. It knows no text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.core import ImageSpan, MessageStart

_BYTES_PER_TOKEN = 8
"""Equal ids share one int object, which makes copying a long prompt fast."""


@dataclass(frozen=True, slots=True)
class PieceTokens:
    """The ids of a piece, and the message starts and images in it, counted from its own start."""

    ids: tuple[int, ...]
    starts: tuple[MessageStart, ...]
    images: tuple[ImageSpan, ...] = ()

    def num_bytes(self, text: str) -> int:
        """What it takes in memory, with the text that it is of."""
        return 4 * len(text) + _BYTES_PER_TOKEN * len(self.ids) + 256


def joined_ids(rows: Sequence[PieceTokens]) -> tuple[int, ...]:
    """The ids of all rows, by copying them in bulk."""
    ids: list[int] = []
    for row in rows:
        ids += row.ids
    return tuple(ids)


def joined_starts(rows: Sequence[PieceTokens]) -> Iterator[MessageStart]:
    """The starts of all rows, counted from the first one's start."""
    offset = 0
    for row in rows:
        for start in row.starts:
            yield MessageStart(offset + start.offset, start.is_user)
        offset += len(row.ids)


def joined_images(rows: Sequence[PieceTokens]) -> Iterator[ImageSpan]:
    """The images of all rows, likewise."""
    offset = 0
    for row in rows:
        for span in row.images:
            yield ImageSpan(offset + span.start, offset + span.end, span.digest)
        offset += len(row.ids)
