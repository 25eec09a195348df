"""What a model's KV depends on, as one digest: weights, configuration, tokenizer, template and how KV is quantised.

Weights are tens of gigabytes, so of each tensor its place, type and shape and its first and last bytes are digested:
training, merging or quantising changes every tensor that it touches.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from kvserve.engine.quantised import KvSettings

FORMAT = b"kvserve model fingerprint, version 1"
EDGE_BYTES = 4096
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt")


def model_fingerprint(folder: Path) -> str:
    """A digest of a model folder (64 hex digits) that changes with anything its KV depends on."""
    digest = hashlib.sha256(FORMAT)
    small = {path for pattern in _SMALL_FILES for path in folder.glob(pattern)}
    for path in sorted(small):
        _add(digest, path.name.encode(), path.read_bytes())
    for path in sorted(folder.glob("model*.safetensors")):
        for part in _weight_parts(path):
            _add(digest, path.name.encode(), part)
    return digest.hexdigest()


def kv_fingerprint(fingerprint: str, kv: KvSettings) -> str:
    """A model's fingerprint together with what its KV depends on besides: rows of other settings are never mixed."""
    parts: tuple[str, ...] = ("off",)
    if kv.bits is not None:
        group_size = kv.group_size if kv.scheme == "uniform" else 0
        parts = (kv.scheme, str(kv.bits), str(group_size), str(kv.start))
    digest = hashlib.sha256(FORMAT)
    _add(digest, fingerprint.encode(), *(part.encode() for part in parts))
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", *fields: bytes) -> None:
    for value in fields:
        digest.update(struct.pack("<Q", len(value)))
        digest.update(value)


def _weight_parts(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file (eight bytes of length, JSON, data) and the edges of each tensor in it."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        yield header
        for name, tensor in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            for offset in sorted({start, max(start, end - EDGE_BYTES)}):
                file.seek(8 + length + offset)
                yield file.read(min(EDGE_BYTES, end - offset))
