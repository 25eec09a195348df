"""One blob: the KV of a run of tokens, or a state behind them, as a safetensors file with its own checksum.

    8 bytes header length | JSON header, padded to 8 | tokens | the payload's tensors | SHA-256 of all bytes before it

It knows the form of the file and what names a blob, not what the tensors mean (format: the safetensors specification).
"""

import hashlib
import json
import struct
from collections.abc import Buffer, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NewType, cast, get_args

from kvserve.cache.records import BoundaryKind
from kvserve.cache.token_run import ID_BYTES, TokenRun
from kvserve.core import ImageSpan

FORMAT = "kvserve blob 2"
"""Changes whenever the meaning of a blob's bytes changes: older blobs are then not found."""

DIGEST_BYTES = 32
GATHERED_BYTES = 256 * 1024
"""Smaller arrays are copied together before they are hashed and written."""
MAX_HEADER_BYTES = 64 * 2**20
NO_PARENT = ""
PARTITION_MARK = "partition "
"""The parent of a prefix's first blob in a named partition is this and the partition's name, so that all blobs there
have other names. Without a partition every name is what it was before there were partitions."""


def parent_of_first(partition: str) -> str:
    """The parent of blobs that begin at the first token."""
    return PARTITION_MARK + partition if partition else NO_PARENT


def partition_of_first(parent: str) -> str | None:
    """The partition whose first blobs have this parent; None where the parent is a blob."""
    if parent == NO_PARENT:
        return ""
    return parent.removeprefix(PARTITION_MARK) if parent.startswith(PARTITION_MARK) else None


BlobName = NewType("BlobName", str)
BlobKind = Literal["segment", "checkpoint"]


class DamagedBlob(Exception):
    """A file that does not match its name: cut off, altered, of another format or another model."""


class OtherChecksum(DamagedBlob):
    """A file with other bytes than its checksum was made of."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as bytes: `dtype` as safetensors writes it (F32, BF16, ...), row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class BlobHead:
    """What a blob holds: the tokens `[tokens.start, tokens.end)` behind a position inside the segment `parent`.

    A checkpoint has no tokens of its own and is the state behind `tokens.start`. Its `base` is an earlier state on its
    path: of sliding windows it has only the rows since then. The name depends on the whole path, the model and `base`.
    """

    model: str
    kind: BlobKind
    parent: str
    tokens: TokenRun
    boundary: BoundaryKind
    base: str = NO_PARENT

    @cached_property
    def name(self) -> BlobName:
        digest = hashlib.sha256()
        images = repr([(span.start, span.end, span.digest) for span in self.tokens.images])
        fields = (FORMAT, self.model, self.kind, self.parent, str(self.tokens.start), images)
        bases = [self.base.encode()] if self.base else []  # whole ones have the names that they always had
        for field in (*(text.encode() for text in fields), self.tokens.ids, *bases):
            digest.update(struct.pack("<Q", len(field)))
            digest.update(field)
        return BlobName(digest.hexdigest()[:40])


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob whose bytes were verified; the tensors are views of what was read, `note` is the payload's own text."""

    head: BlobHead
    note: str
    tensors: tuple[Tensor, ...]


def num_bytes_of(data: Buffer) -> int:
    return memoryview(data).nbytes


def pack_blob(head: BlobHead, note: str, tensors: Sequence[Tensor]) -> list[Buffer]:
    """The parts of a blob's file, one after another. Only small tensors are copied, many into one part."""
    tokens = Tensor("U32", (len(head.tokens),), head.tokens.ids)
    named = [("tokens", tokens), *((f"{number:06}", tensor) for number, tensor in enumerate(tensors))]
    named.append(("sha256", Tensor("U8", (DIGEST_BYTES,), bytes(DIGEST_BYTES))))
    header: dict[str, object] = {"__metadata__": _metadata(head, note)}
    offset = 0
    for name, tensor in named:
        end = offset + num_bytes_of(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = list(_gathered([struct.pack("<Q", len(text)) + text, *(tensor.data for _, tensor in named[:-1])]))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def _gathered(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes in fewer parts. Hashing and writing each part releases the interpreter's lock and takes it again:
    dozens of small arrays would have the engine's thread hand it over as often."""
    small: list[Buffer] = []
    num_bytes = 0
    for part in parts:
        if num_bytes_of(part) >= GATHERED_BYTES:
            yield from (b"".join(small), part)
            small, num_bytes = [], 0
            continue
        small.append(part)
        num_bytes += num_bytes_of(part)
        if num_bytes >= GATHERED_BYTES:
            yield b"".join(small)
            small, num_bytes = [], 0
    yield b"".join(small)


def _metadata(head: BlobHead, note: str) -> dict[str, str]:
    return {
        "format": FORMAT,
        "model": head.model,
        "kind": head.kind,
        "parent": head.parent,
        "start": str(head.tokens.start),
        "boundary": head.boundary,
        **({"base": head.base} if head.base else {}),
        "images": json.dumps([(span.start, span.end, span.digest) for span in head.tokens.images]),
        "note": note,
    }


def unpack_blob(data: Buffer, name: BlobName, digest: bytes | None = None) -> Blob:
    """Verify a whole file against its digest and its name. `digest` was computed while the bytes before the file's own
    digest were read. Raises DamagedBlob."""
    view = memoryview(data).cast("B")
    if len(view) < 8 + DIGEST_BYTES:
        raise DamagedBlob("it is cut off")
    if (digest or hashlib.sha256(view[:-DIGEST_BYTES]).digest()) != bytes(view[-DIGEST_BYTES:]):
        raise OtherChecksum("its checksum is another")
    start, header = _header(view)
    try:
        tensors = [_tensor(view[start:], entry) for key, entry in header.items() if key != "__metadata__"]
        head = _head(header, bytes(tensors[0].data))
        note = str(header["__metadata__"]["note"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DamagedBlob(f"its header cannot be read ({type(error).__name__})") from error
    if head.name != name:
        raise DamagedBlob("it holds something else than its name says")
    return Blob(head, note, tuple(tensors[1:-1]))


def read_head(beginning: bytes, name: BlobName) -> BlobHead | int:
    """A file's head, from its first bytes, or how many bytes that takes. The payload is not read and not verified.

    Raises DamagedBlob for a file that does not match its name.
    """
    if len(beginning) < 8:
        return 8
    (length,) = struct.unpack("<Q", beginning[:8])
    if length > MAX_HEADER_BYTES:
        raise DamagedBlob("its header is too long")
    if len(beginning) < 8 + length:
        return int(8 + length)
    start, header = _header(memoryview(beginning))
    try:
        first, end = cast(list[int], header["tokens"]["data_offsets"])
        if len(beginning) < start + end:
            return int(start + end)
        head = _head(header, beginning[start + first : start + end])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedBlob(f"its header cannot be read ({type(error).__name__})") from error
    if head.name != name:
        raise DamagedBlob("it holds something else than its name says")
    return head


def _header(view: memoryview) -> tuple[int, dict[str, dict[str, object]]]:
    """The offset of the data, and the JSON before it."""
    (length,) = struct.unpack("<Q", view[:8])
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except ValueError as error:
        raise DamagedBlob("its header is no JSON") from error
    if length + 8 > len(view) or not isinstance(header, dict):
        raise DamagedBlob("its header is cut off")
    return 8 + length, header


def _tensor(data: memoryview, entry: dict[str, object]) -> Tensor:
    start, end = cast(list[int], entry["data_offsets"])
    if not 0 <= start <= end <= len(data):
        raise ValueError("a tensor lies outside of the file")
    return Tensor(str(entry["dtype"]), tuple(cast(list[int], entry["shape"])), data[start:end])


def _head(header: dict[str, dict[str, object]], ids: bytes) -> BlobHead:
    said = {key: str(value) for key, value in header["__metadata__"].items()}
    if said["format"] != FORMAT or len(ids) % ID_BYTES:
        raise ValueError("another format")
    where = said["model"], said["kind"], said["parent"], int(said["start"])
    return make_head(*where, ids, said["images"], said["boundary"], said.get("base", NO_PARENT))


def make_head(
    model: str, kind: str, parent: str, start: int, ids: bytes, images: str, boundary: str, base: str
) -> BlobHead:
    """A head from its written parts. Raises ValueError for parts that no head can have."""
    if kind not in get_args(BlobKind) or boundary not in get_args(BoundaryKind):
        raise ValueError(f"There is no {kind!r} at a {boundary!r}.")
    spans = tuple(ImageSpan(int(first), int(end), str(digest)) for first, end, digest in json.loads(images))
    run = TokenRun(start, ids, spans)
    return BlobHead(model, cast(BlobKind, kind), parent, run, cast(BoundaryKind, boundary), base)
