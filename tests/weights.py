"""A model's fingerprint as a test works it out, all files read, nothing remembered; and changes that it must show."""

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserve.engine import model_digest
from kvserve.engine.file_digest import FilePiece, file_digest, hash_piece, pieces
from kvserve.engine.fingerprint import libraries_of, model_fingerprint
from kvserve.engine.model_files import file_stamps


def fingerprint_of(folder: Path) -> str:
    """What `ModelDigest` finds in a folder that nobody changes meanwhile."""
    digests = {
        path: file_digest(
            stamp.num_bytes, [hash_piece(each, lambda _: None) for each in pieces(folder / path, stamp.num_bytes)]
        )
        for path, stamp in file_stamps(folder).items()
    }
    return model_fingerprint(digests, libraries_of(folder))


def change_byte(path: Path, place: int, flip: int = 1) -> None:
    """A byte that is another one, in a file whose size and time are those of before."""
    change(path, place, lambda held: bytes([held[0] ^ flip]), 1)


def change(path: Path, place: int, edit: Callable[[bytes], bytes], num_bytes: int) -> None:
    """Other bytes in the place of these, in a file whose size and time are those of before. The clock of the file
    system ticks before it returns: what else the test does is not within the same moment."""
    was = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        held = file.read(num_bytes)
        file.seek(place)
        file.write(edit(held))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    while path.stat().st_ctime_ns == was.st_ctime_ns:
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def turn_middle(path: Path, name: str) -> None:
    """The values in the middle of the tensors of this name get the other sign: 4 KiB at each end of each stay."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for tensor, place in header.items():
        if tensor.endswith(name):
            start, end = place["data_offsets"]
            assert end - start > 3 * 4096 and place["dtype"] in ("BF16", "F16", "F32"), place
            width = 4 if place["dtype"] == "F32" else 2

            def edit(held: bytes, width: int = width) -> bytes:
                turned = bytearray(held)
                for last in range(width - 1, len(turned), width):
                    turned[last] ^= 0x80
                return bytes(turned)

            change(path, 8 + length + start + 4096, edit, end - start - 8192)


@contextmanager
def digest_held_back() -> Iterator[threading.Event]:
    """Meanwhile a model's files are read in the background, once the yielded event is set, and none counts as just
    written."""
    event = threading.Event()

    def held(piece: FilePiece, told: Callable[[int], None], **how: bool) -> bytes:
        while not event.wait(0.01):
            told(0)
        return hash_piece(piece, told, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_digest, "AT_ONCE_BYTES", 0)
        patch.setattr(model_digest, "SETTLED_SECONDS", 0.0)
        patch.setattr(model_digest, "hash_piece", held)
        try:
            yield event
        finally:
            event.set()
