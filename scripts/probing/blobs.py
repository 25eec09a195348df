"""The files that kvserve keeps KV in, read and written by their form alone: safetensors with a checksum at the end.

A segment holds the rows of a run of tokens behind its parent, a checkpoint the states behind a place; one with a base
has of sliding windows only what came since that checkpoint. It knows bytes and names, not what the tensors mean.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probing.wire import Json, ProbeError

FORMAT = "kvserve blob 2"
SUFFIX = ".safetensors"
DIGEST_BYTES = 32
PARTITION_MARK = "partition "
"""What the first blob of a tenant stands on: this and a name, which is no blob."""

type RawTensor = tuple[str, list[int], bytes]
"""Type as safetensors writes it, shape, bytes."""


@dataclass(frozen=True, slots=True)
class BlobFile:
    """What one file says of itself; `ids` are the tokens `[start, start + len(ids))`, little-endian uint32."""

    path: Path
    kind: str
    parent: str
    start: int
    ids: bytes
    images: str
    boundary: str
    note: str
    num_bytes: int
    base: str

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)

    @property
    def stands_on(self) -> str:
        """The blob before it; empty where there is none."""
        return "" if self.parent.startswith(PARTITION_MARK) else self.parent

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // 4


def blob_name(
    model: str, kind: str, parent: str, start: int, ids: bytes, images: Sequence[Any] = (), base: str = ""
) -> str:
    """The name that stands for a path of tokens in one model's folder."""
    digest = hashlib.sha256()
    spans = repr([tuple(span) for span in images])
    fields = [*(text.encode() for text in (FORMAT, model, kind, parent, str(start), spans)), ids]
    for field in [*fields, base.encode()] if base else fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.hexdigest()[:40]


def model_folders(root: Path) -> list[Path]:
    """The folders of models that have blobs. Raises ProbeError where there is none."""
    found = (folder for folder in root.glob("*") if re.fullmatch("[0-9a-f]{32}", folder.name))
    folders = sorted(folder for folder in found if any(folder.glob(f"*{SUFFIX}")))
    if not folders:
        raise ProbeError(f"no blobs below {root}")
    return folders


def blobs_of(folder: Path) -> Iterator[BlobFile | str]:
    """Every blob of a model's folder, parents before children; of a file that is none, what is wrong with it."""
    found: list[BlobFile] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(read_blob(path)[0])
        except ValueError as error:
            yield f"{path}: {error}"
    yield from sorted(found, key=lambda blob: (blob.start, blob.kind != "segment"))


def read_blob(path: Path) -> tuple[BlobFile, list[RawTensor]]:
    """A whole file, verified against its checksum and its name. Raises ValueError for one that is not what it says."""
    data = path.read_bytes()
    if len(data) < 8 + DIGEST_BYTES or hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise ValueError("its checksum is another")
    (length,) = struct.unpack("<Q", data[:8])
    header: Json = json.loads(data[8 : 8 + length])
    said = header.pop("__metadata__")
    if said.get("format") != FORMAT:
        raise ValueError("another format")
    tensors = [
        (
            entry["dtype"],
            entry["shape"],
            data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
        )
        for entry in header.values()
    ]
    blob = BlobFile(
        path, said["kind"], said["parent"], int(said["start"]), tensors[0][2], said["images"], said["boundary"],
        said["note"], len(data), said.get("base", ""),
    )  # fmt: skip
    name = blob_name(said["model"], blob.kind, blob.parent, blob.start, blob.ids, json.loads(blob.images), blob.base)
    if name != blob.name or said["model"] != path.parent.name:
        raise ValueError("it holds something else than its name says")
    return blob, tensors[1:-1]


def write_blob(
    folder: Path, kind: str, parent: str, start: int, ids: bytes, note: str, tensors: Sequence[RawTensor]
) -> str:
    """Write a blob for a server to find; returns its name. The parts' order is tokens, tensors, checksum."""
    name = blob_name(folder.name, kind, parent, start, ids)
    metadata = {
        "format": FORMAT, "model": folder.name, "kind": kind, "parent": parent, "start": str(start),
        "boundary": "answer", "images": "[]", "note": note,
    }  # fmt: skip
    named: list[tuple[str, RawTensor]] = [("tokens", ("U32", [len(ids) // 4], ids))]
    named += [(f"{number:06}", tensor) for number, tensor in enumerate(tensors)]
    named.append(("sha256", ("U8", [DIGEST_BYTES], bytes(DIGEST_BYTES))))
    header: Json = {"__metadata__": metadata}
    offset = 0
    for key, (dtype, shape, data) in named:
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + b"".join(tensor[2] for _, tensor in named[:-1])
    scratch = folder / f"{name}.import.part"
    scratch.write_bytes(whole + hashlib.sha256(whole).digest())
    scratch.chmod(0o600)
    scratch.rename(folder / f"{name}{SUFFIX}")
    return name
