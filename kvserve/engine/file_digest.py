"""Digests of whole files, in pieces so that several threads can read one file. It knows bytes, not models."""

import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 64 * 2**20
"""Part of what a digest means: another length gives other digests."""

READ_BYTES = 2**20
UNREADABLE = bytes(32)
"""The digest of a file that this user may not read: no loader of ours reads it either."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The bytes `[start, end)` of a file."""

    path: Path
    start: int
    end: int


def pieces(path: Path, num_bytes: int) -> Iterator[FilePiece]:
    """The pieces of a file of so many bytes, in order; none of an empty one."""
    for start in range(0, num_bytes, PIECE_BYTES):
        yield FilePiece(path, start, min(start + PIECE_BYTES, num_bytes))


def hash_piece(piece: FilePiece, told: Callable[[int], None], *, spares_cache: bool = False) -> bytes:
    """The SHA-256 of a piece, or of as much of it as there is. `told` hears of every few bytes that were read, and may
    raise. `spares_cache`: no loader is about to read the file, so the system need not keep its pages.

    Raises OSError; the digest of a file that may not be read is that of nothing.
    """
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    try:
        file = piece.path.open("rb", buffering=0)
    except PermissionError:
        return UNREADABLE
    with file:
        if spares_cache:
            _keep_no_pages(file.fileno())
        file.seek(piece.start)
        num_left = piece.end - piece.start
        while num_left and (num_read := file.readinto(memoryview(buffer)[: min(num_left, READ_BYTES)])):
            digest.update(memoryview(buffer)[:num_read])
            num_left -= num_read
            told(num_read)
        if spares_cache:
            _drop_pages(file.fileno(), piece)
    return digest.digest()


def file_digest(num_bytes: int, piece_digests: Sequence[bytes]) -> bytes:
    """A file's digest from those of its pieces."""
    return hashlib.sha256(struct.pack("<Q", num_bytes) + b"".join(piece_digests)).digest()


def _keep_no_pages(descriptor: int) -> None:
    """macOS reads past its cache where it is asked to, and uses what is in it already."""
    if (no_cache := getattr(fcntl, "F_NOCACHE", None)) is not None:
        fcntl.fcntl(descriptor, no_cache, 1)


def _drop_pages(descriptor: int, piece: FilePiece) -> None:
    """Linux gives back pages that no process has mapped."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, piece.start, piece.end - piece.start, os.POSIX_FADV_DONTNEED)
