"""The path to a blob in the shared cache: what another server says of the blobs before it, what of that our own tokens
prove, and how much of it is worth reading. Pure; nothing that is said of tokens is believed.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvserve.cache.disk_blob import BlobHead, BlobName, make_head
from kvserve.cache.token_run import TokenRun, image_around

CHECK_BYTES = 16
MAX_BLOBS = 16_384
MAX_BLOB_BYTES = 2**34
"""No file of a blob comes near to that."""

MIN_GAIN_TOKENS = 16


class StrangePath(Exception):
    """What is there is no path, or was altered."""


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """A blob as a path names it: the tokens `[start, end)`, and the bytes of its file."""

    name: BlobName
    kind: str
    parent: str
    start: int
    end: int
    boundary: str
    base: str
    num_bytes: int

    def proved(self, model: str, run: TokenRun) -> BlobHead | None:
        """The head, where our own tokens give this very name; None where they do not."""
        if not 0 <= self.start <= self.end <= run.end or (self.kind == "checkpoint") != (self.start == self.end):
            return None
        part = run.part(self.start, self.end)
        try:
            head = make_head(
                model, self.kind, self.parent, self.start, part.ids, _images_of(part), self.boundary, self.base
            )
        except ValueError:
            return None
        return head if head.name == self.name else None


def _images_of(part: TokenRun) -> str:
    return json.dumps([(span.start, span.end, span.digest) for span in part.images])


def blob_of(head: BlobHead, num_bytes: int) -> RemoteBlob:
    """What a path says of one of our own blobs."""
    tokens = head.tokens
    return RemoteBlob(head.name, head.kind, head.parent, tokens.start, tokens.end, head.boundary, head.base, num_bytes)


def packed(path: Sequence[RemoteBlob]) -> bytes:
    """A path as bytes, its checksum first."""
    rows = [
        [each.name, each.kind, each.parent, each.start, each.end, each.boundary, each.base, each.num_bytes]
        for each in path
    ]
    body = json.dumps(rows, separators=(",", ":")).encode()
    return _check_of(body) + body


def _check_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECK_BYTES).digest()


def unpacked(data: object) -> list[RemoteBlob]:
    """Raises StrangePath."""
    if not isinstance(data, bytes) or _check_of(data[CHECK_BYTES:]) != data[:CHECK_BYTES]:
        raise StrangePath("its checksum is another")
    try:
        rows = json.loads(data[CHECK_BYTES:])
        found = [
            RemoteBlob(BlobName(str(name)), str(kind), str(parent), int(s), int(e), str(bound), str(base), int(size))
            for name, kind, parent, s, e, bound, base, size in rows
        ]
    except (ValueError, TypeError) as error:
        raise StrangePath("it cannot be read") from error
    if len(found) > MAX_BLOBS or any(
        not 0 < each.num_bytes <= MAX_BLOB_BYTES or len(each.name) != 40 for each in found
    ):
        raise StrangePath("it names what cannot be")
    return found


@dataclass(frozen=True, slots=True)
class RemoteGoal:
    """What is worth reading: the prefix `[0, end)` is there with these blobs, in this order."""

    end: int
    blobs: tuple[RemoteBlob, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.blobs)


def remote_goals(
    path: Sequence[RemoteBlob], common: int, run: TokenRun, known: Collection[str], *, needs_checkpoints: bool
) -> Iterator[RemoteGoal]:
    """Every place that a row could start from if the blobs up to it were read; those that are `known` here are not. Our
    tokens are the path's up to `common`; the last one of the prompt is always computed."""
    limit = min(common, run.end - 1)
    if (image := image_around(run.images, limit)) is not None:
        limit = image.start
    missing, states = list[RemoteBlob](), {each.name: each for each in path if each.kind == "checkpoint"}
    left_at = used_ends(path)
    for blob in path:
        if blob.kind == "checkpoint":
            is_start = needs_checkpoints and blob.end <= limit and image_around(run.images, blob.end) is None
            if is_start and (chain := _chain(blob, states)) is not None:
                yield RemoteGoal(blob.end, (*missing, *(each for each in chain if each.name not in known)))
        elif blob.start < limit:
            missing += [blob] if blob.name not in known else []
            if not needs_checkpoints:
                yield RemoteGoal(min(left_at[blob.name], limit), tuple(missing))


def used_ends(path: Sequence[RemoteBlob]) -> dict[BlobName, int]:
    """Where the path leaves each of its segments: at the start of the next one."""
    segments = [each for each in path if each.kind == "segment"]
    starts = [*(each.start for each in segments[1:]), segments[-1].end] if segments else []
    return {each.name: start for each, start in zip(segments, starts, strict=True)}


def _chain(state: RemoteBlob, states: dict[BlobName, RemoteBlob]) -> list[RemoteBlob] | None:
    """A state and those whose windows it continues, the whole one first; None where one is not on the path."""
    chain = [state]
    while chain[-1].base:
        base = states.get(BlobName(chain[-1].base))
        if base is None or base in chain:
            return None
        chain.append(base)
    return chain[::-1]


def saved_seconds(
    num_tokens: int, num_bytes: int, prefill_rate: float | None, bandwidth: float | None, latency: float
) -> float:
    """Prefill time less reading time; what was never measured is taken for worth it."""
    if prefill_rate is None or bandwidth is None:
        return float(num_tokens)
    return num_tokens / prefill_rate - latency - num_bytes / bandwidth
