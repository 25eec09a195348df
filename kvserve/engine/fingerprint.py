"""What a model's KV and words depend on, as one digest: its files, the libraries that compute with them, and how KV is
quantised. Others read the files.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvserve.engine.quantised import KvSettings
from kvserve.engine.text_load import is_for_mlx_lm
from kvserve.engine.vision_load import is_vision

FORMAT = b"kvserve model fingerprint, version 2"
"""Raised with whatever is digested: KV and records under names of before are never looked at, and age out."""

LIBRARIES = ("mlx", "mlx-lm", "tokenizers", "transformers")
"""Another release of one of these may compute, tokenise or write a prompt in another way."""

SECOND_LIBRARIES = ("mlx-vlm",)
"""Compute with a model that sees, or whose text model mlx-lm does not have."""


def libraries_of(folder: Path) -> Mapping[str, str]:
    """The libraries that compute with a model, and their releases."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    names = (*LIBRARIES, *SECOND_LIBRARIES) if _needs_second(config) else LIBRARIES
    return {name: _release(name) for name in names}


def _needs_second(config: object) -> bool:
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return False
    return is_vision(config) or not is_for_mlx_lm(config)


def model_fingerprint(files: Mapping[Path, bytes], libraries: Mapping[str, str]) -> str:
    """A digest (64 hex digits) that changes with any byte of any of a model's files, with their names, and with the
    libraries. `files`: the digest of each."""
    digest = hashlib.sha256(FORMAT)
    for path, of_file in sorted(files.items()):
        _add(digest, str(path).encode("utf-8", "surrogateescape"), of_file)
    _add(digest, b"")  # no name: libraries follow
    for name, release in sorted(libraries.items()):
        _add(digest, name.encode(), release.encode())
    return digest.hexdigest()


def kv_fingerprint(fingerprint: str, kv: KvSettings, cut_tokens: int = 1, leaves: Sequence[str] = ()) -> str:
    """A model's fingerprint together with what its KV depends on besides: rows of other settings are never mixed, nor
    those that were cut at other places where that matters, nor leaves that are kept in other ways (`leaves`)."""
    parts: tuple[str, ...] = ("off",)
    if kv.bits is not None:
        group_size = kv.group_size if kv.scheme == "uniform" else 0
        parts = (kv.scheme, str(kv.bits), str(group_size), str(kv.start))
    if cut_tokens > 1:
        parts = (*parts, f"cut at {cut_tokens}")
    parts = (*parts, *leaves)
    digest = hashlib.sha256(FORMAT)
    _add(digest, fingerprint.encode(), *(part.encode() for part in parts))
    return digest.hexdigest()


def records_fingerprint(fingerprint: str, template: str | None) -> str:
    """A model's fingerprint together with the chat template that stands for its own, if one does: the words of what was
    read and written are that template's. KV is tokens', whoever put them together."""
    if template is None:
        return fingerprint
    digest = hashlib.sha256(FORMAT)
    _add(digest, fingerprint.encode(), template.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _add(digest: "hashlib._Hash", *fields: bytes) -> None:
    for value in fields:
        digest.update(struct.pack("<Q", len(value)))
        digest.update(value)
