"""Runs of model tokens in a form that compares at memory speed; knows tokens and images, nothing of caches.

Positions are absolute: a token has the same offset in every sequence that shares its prefix. An image's token is
identified by (content digest, index inside the image), because two images of one size have equal ids.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvserve.core import ImageSpan, TokenSequence

ID_BYTES = 4

type TokenKey = int | tuple[int, str, int]
"""What identifies a token at its place: its id or, inside an image, (id, digest, index)."""

_end_of = attrgetter("end")


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens `[start, end)` of a sequence: little-endian uint32 ids, and the images that touch them, not clipped."""

    start: int
    ids: bytes
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self)

    def part(self, start: int, end: int) -> "TokenRun":
        """The tokens `[start, end)`, which must lie inside this run."""
        return TokenRun(start, self.packed(start, end), touching(self.images, start, end))

    def packed(self, start: int, end: int) -> bytes:
        """The ids of `[start, end)` as bytes."""
        return self.ids[(start - self.start) * ID_BYTES : (end - self.start) * ID_BYTES]

    def key_at(self, position: int) -> TokenKey:
        """The identity of one token."""
        token = int.from_bytes(self.packed(position, position + 1), "little")
        for span in touching(self.images, position, position + 1):
            return token, span.digest, position - span.start
        return token


def pack(tokens: TokenSequence, start: int = 0, end: int | None = None) -> TokenRun:
    """The tokens `[start, end)` of a sequence. Raises OverflowError for an id outside of uint32."""
    end = len(tokens) if end is None else end
    ids = array("I", tokens.ids if (start, end) == (0, len(tokens)) else tokens.ids[start:end])
    if ids.itemsize != ID_BYTES:
        raise OverflowError("The platform's unsigned int has not four bytes.")
    if sys.byteorder == "big":
        ids.byteswap()
    return TokenRun(start, ids.tobytes(), touching(tokens.images, start, end))


def join(runs: Sequence[TokenRun]) -> TokenRun:
    """Runs that follow one another as one run."""
    images = dict.fromkeys(span for run in runs for span in run.images)
    return TokenRun(runs[0].start, b"".join(run.ids for run in runs), tuple(images))


def touching(images: tuple[ImageSpan, ...], start: int, end: int) -> tuple[ImageSpan, ...]:
    """The spans (in order, disjoint) that share at least one token with `[start, end)`."""
    if not images:
        return ()
    first = bisect_right(images, start, key=_end_of)
    last = first
    while last < len(images) and images[last].start < end:
        last += 1
    return images[first:last]


def image_around(images: tuple[ImageSpan, ...], offset: int) -> ImageSpan | None:
    """The image that a cut at `offset` would divide, if there is one."""
    return next((span for span in touching(images, offset, offset + 1) if span.start < offset), None)


def common_end(one: TokenRun, other: TokenRun, start: int, limit: int) -> int:
    """The first position in `[start, limit)` where the two differ, else `limit`; both must cover that range."""
    end = start + _num_equal_ids(one.packed(start, limit), other.packed(start, limit))
    if one.images or other.images:
        end = min(end, _image_difference(list(_clipped(one, start, end)), list(_clipped(other, start, end)), end))
    return end


def _num_equal_ids(one: bytes, other: bytes) -> int:
    if one == other:
        return len(one) // ID_BYTES
    low, high = 0, len(one) // ID_BYTES  # equal below `low`, different somewhere below `high`
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _clipped(run: TokenRun, start: int, end: int) -> Iterator[tuple[int, int, int, str]]:
    """Images within `[start, end)` as (first position, position behind the last, where the image begins, digest)."""
    for span in touching(run.images, start, end):
        yield max(span.start, start), min(span.end, end), span.start, span.digest


def _image_difference(one: list[tuple[int, int, int, str]], other: list[tuple[int, int, int, str]], limit: int) -> int:
    for (start, end, *identity), (other_start, other_end, *other_identity) in zip(one, other, strict=False):
        if start != other_start or identity != other_identity:
            return min(start, other_start)
        if end != other_end:
            return min(end, other_end)
    rest = one[len(other) :] or other[len(one) :]
    return rest[0][0] if rest else limit
