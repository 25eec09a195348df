"""A picture made up on the spot, as a data URL: PNG by hand, so that the scripts need nothing but Python."""

import base64
import random
import struct
import zlib


def picture_url(side: int, seed: int) -> str:
    """A square of coloured tiles, `side` pixels wide, another one for another seed."""
    rng = random.Random(seed)
    num_tiles = max(1, side // 16)
    rows = bytearray()
    for _ in range(num_tiles):
        tiles = [rng.randbytes(3) for _ in range(num_tiles)]
        line = b"\0" + b"".join(tile * 16 for tile in tiles)[: 3 * side].ljust(3 * side, b"\xff")
        rows += line * 16
    rows = rows[: side * (3 * side + 1)].ljust(side * (3 * side + 1), b"\0")
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(rows))) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
