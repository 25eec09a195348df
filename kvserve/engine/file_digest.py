"""Digests of whole files, in pieces so that several threads can read one file, and those of files that were read once,
by what shows a change of each. It knows bytes, not models.

What is remembered is one small file below the cache folder; it holds numbers and digests, no names and no words. It may
vanish at any time: what is not remembered is read again. A file that does not add up is worth nothing.
"""

import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from kvserve.engine.checked_file import CheckedFile, DamagedFile
from kvserve.engine.model_files import MEMORY_FILE, OURS, FileStamp

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


FORMAT = 1
UNUSED_SECONDS = 180 * 86_400.0
"""What no model had for so long is forgotten."""

REFRESH_SECONDS = 86_400.0
"""That something is used is written down once a day."""

MAX_ENTRIES = 5_000
DIGEST_BYTES = 32
_writing = threading.Lock()
"""Of this process; another one's may take away what was just added, which is then read again."""


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    used_at: float


class DigestMemory:
    """Safe for several threads. `report` hears of what went wrong, `note` of what is worth knowing."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since the epoch."""
        self._folder = folder
        self._file = CheckedFile(folder / MEMORY_FILE, FORMAT, "files")
        self._report = report
        self._note = note
        self._clock = clock

    def find(self, stamps: Iterable[FileStamp]) -> dict[FileStamp, bytes]:
        """The digests of those of these files that are remembered."""
        entries = self._read()
        found = {stamp: entries[stamp].digest for stamp in stamps if stamp in entries}
        if any(self._clock() - entries[stamp].used_at > REFRESH_SECONDS for stamp in found):
            self.remember(found)
        return found

    def remember(self, digests: Mapping[FileStamp, bytes]) -> None:
        """Write these down, and forget what was not used for long. A disk that does not take it is reported."""
        now = self._clock()
        with _writing:
            if not self._file.path.exists() and _holds_kept(self._folder):
                self._note(
                    "A model is known by every byte of its files now: what earlier releases kept in "
                    f"{self._folder} is not used any more, and leaves with age."
                )
            entries = self._read() | {stamp: _Entry(digest, now) for stamp, digest in digests.items()}
            fresh = {stamp: entry for stamp, entry in entries.items() if now - entry.used_at <= UNUSED_SECONDS}
            newest = sorted(fresh.items(), key=lambda item: item[1].used_at)[-MAX_ENTRIES:]
            try:
                self._write(dict(newest))
            except OSError as error:
                if self._folder.is_dir():  # else KV has no place either, which is said there
                    self._report(f"What the weights are cannot be noted, the next start reads them again: {error}")

    def _read(self) -> dict[FileStamp, _Entry]:
        """The entries of the file; none where it cannot be read or believed."""
        try:
            return {
                FileStamp(*(int(number) for number in row[:5])): _Entry(_digest_of(row[5]), float(row[6]))
                for row in self._file.read()
            }
        except (DamagedFile, ValueError, LookupError, TypeError, OverflowError):
            return {}

    def _write(self, entries: Mapping[FileStamp, _Entry]) -> None:
        self._file.write([[*astuple(stamp), entry.digest.hex(), entry.used_at] for stamp, entry in entries.items()])


def _holds_kept(folder: Path) -> bool:
    """Whether there are folders of KV or records."""
    return folder.is_dir() and any(OURS.fullmatch(path.name) for path in folder.iterdir())


def _digest_of(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError("no digest")
    return digest
