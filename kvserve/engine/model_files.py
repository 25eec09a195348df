"""What lies on disk of a model: its folder in the hub's cache, whether its weights are whole, which files a model's
loaders may read, and what of each shows that it has changed. It reads headers and configurations only, loads nothing
and fetches nothing.

Read by mlx-lm 0.32, mlx-vlm 0.7 and transformers 5: `*.safetensors` and their index, which may name subfolders,
`config.json` and what it names (`model_file` with code of the model's own, manifests), `generation_config.json`,
`hf_quant_config.json`, configurations of processors and adapters, tokenizers in all their forms (`*.json`, `*.model`,
`*.txt`, `*.tiktoken`), templates, also in `additional_chat_templates`, adapters and offloaded experts in subfolders. As
such lists grow with each release, the rule is the other way round. Every file of the folder counts but

- what is hidden, documentation, logs and databases, and what kvserve itself keeps (see `_is_read`);
- in subfolders: weights in forms that no loader for MLX opens (`FOREIGN_SUFFIXES`), such as a trainer's.

Files that `config.json` names count wherever they are, and so do those that a JSON file names which it names. Links are
followed. What is left out can change no answer; a file too many costs one reading.
"""

import json
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError

from kvserve.errors import ModelLoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r"(model.*-)(\d+)-of-(\d+)(\.safetensors)")
_MAX_HEADER_BYTES = 2**28

HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt"]
"""What is downloaded of a model. The hub's library calls a snapshot that lacks other files incomplete, unless it is
told that only these are wanted."""


def cached_folder(hub_name: str) -> Path | None:
    """The folder of a hub name's snapshot, None where there is none; the network is never asked."""
    if _HUB_NAME.fullmatch(hub_name) is None:
        return None
    try:
        return Path(snapshot_download(hub_name, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def is_model_folder(folder: Path) -> bool:
    """Whether a folder looks like a model: a config and at least one file of weights."""
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def check_weights(folder: Path) -> None:
    """Raise ModelLoadError where weights are missing or shorter than their header says (a broken download)."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise _broken(folder, "it holds no weights (model*.safetensors)")
    if missing := _missing_parts({file.name for file in files}):
        raise _broken(folder, f"{missing[0]} is missing")
    for file in files:
        expected, actual = _expected_bytes(file), file.stat().st_size
        if expected is None:
            raise _broken(folder, f"{file.name} cannot be read")
        if actual < expected:
            raise _broken(folder, f"{file.name} has {actual:,} bytes instead of {expected:,}")


def weight_file_bytes(folder: Path) -> int:
    """About what a folder's weights will take in memory: the size of their files."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def weights_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a folder's files: it changes when the model is mended."""
    files = [path for path in sorted(folder.glob("*")) if path.is_file()]
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def _broken(folder: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"The model in {folder} could not be loaded: {what}. Download or convert it again.")


def _missing_parts(names: set[str]) -> list[str]:
    """Files that the names of others promise: `model-00001-of-00003.safetensors` is one of three."""
    promised = {
        f"{match[1]}{part:0{len(match[2])}}-of-{match[3]}{match[4]}"
        for name in names
        if (match := _PART.fullmatch(name))
        for part in range(1, int(match[3]) + 1)
    }
    return sorted(promised - names)


def _expected_bytes(file: Path) -> int | None:
    """The size that a safetensors file must have by its header; None if it has none."""
    read = _header(file)
    try:
        return None if read is None else read[0] + max((int(each["data_offsets"][1]) for each in read[1]), default=0)
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def _header(file: Path) -> tuple[int, list[Any]] | None:
    """Where the data of a safetensors file begins, and what its header says of each tensor; None if it has none."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header = json.loads(stream.read(length))
        return 8 + int(length), [tensor for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, AttributeError, struct.error):
        return None


def most_used_dtype(folder: Path) -> str | None:
    """The type of most tensors that are no packed numbers, as safetensors calls it (`BF16`); None without weights."""
    files = sorted(folder.glob("model*.safetensors"))
    headers = [read[1] for file in files[:1] if (read := _header(file)) is not None]
    counted = Counter(str(each.get("dtype")) for header in headers for each in header if isinstance(each, dict))
    floating = {dtype: number for dtype, number in counted.items() if dtype in ("F32", "F16", "BF16")}
    return max(floating, key=lambda dtype: floating[dtype]) if floating else None


def hub_models() -> list[tuple[str, Path]]:
    """Names and folders of the models in the hub's cache; the network is never asked."""
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, ValueError, OSError):
        return []
    names = sorted(each.repo_id for each in repositories if each.repo_type == "model")
    found = ((name, cached_folder(name)) for name in names)
    return [(name, folder) for name, folder in found if folder is not None and is_model_folder(folder)]


FOREIGN_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pickle", ".pkl", ".pt", ".pth"}
)
DOCUMENT_SUFFIXES = frozenset(
    {".gif", ".jpeg", ".jpg", ".lock", ".log", ".md", ".mp4", ".pdf", ".png", ".pyc", ".rst", ".svg", ".webp"}
)
_DOCUMENT = re.compile(r"(license|licence|notice|readme|copying|use_policy)[^.]*(\.txt)?", re.IGNORECASE)
_DATABASE = re.compile(r".*\.sqlite3?(-wal|-shm|-journal)?")

MEMORY_FILE, CACHES_FILE = "weights-seen.json", "caches-seen.json"
"""What kvserve remembers of models; a cache folder may be a model's folder."""

OURS = re.compile(r"(records-)?[0-9a-f]{32}")
"""Folders of KV and of records."""

MAX_NAMING_BYTES = 2**20
"""A JSON file that is larger names no files; it is a vocabulary."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Which file it is and when it was changed last. The time of its last change of any kind (`ctime_ns`) cannot be
    set by a program, so a change shows even where the time of the contents was set back."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileStamp":
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


type FileStamps = Mapping[Path, FileStamp]
"""The files of a model by their way from its folder (a way from `/` where they lie outside)."""


def file_stamps(folder: Path) -> FileStamps:
    """The files that loaders may read, as they are now. What cannot be looked at is not there for a loader either."""
    found: dict[Path, FileStamp] = {}
    for path in _below(folder, set()):
        _add(found, folder, path)
    for path in _named(folder):
        _add(found, folder, path)
    return dict(sorted(found.items()))


def differing(one: FileStamps, other: FileStamps) -> Path | None:
    """A file that is not the same in both; None where all are."""
    return next((path for path in sorted({*one, *other}) if one.get(path) != other.get(path)), None)


def stamp_of(path: Path) -> FileStamp | None:
    """The stamp of a file, None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # a link that leads nowhere, a name that can be no file's
        return None
    return FileStamp.of(status) if stat.S_ISREG(status.st_mode) else None


def _add(found: dict[Path, FileStamp], folder: Path, path: Path) -> None:
    if (stamp := stamp_of(path)) is not None:
        found[path.relative_to(folder) if path.is_relative_to(folder) else path] = stamp


def _below(folder: Path, seen: set[tuple[int, int]], *, is_top: bool = True) -> Iterator[Path]:
    """The files of a folder and of those in it; each folder once, for links may lead in a circle."""
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    for entry in entries:
        path = folder / entry.name
        if os.path.isdir(path):
            if not (entry.name.startswith((".", "__pycache__")) or OURS.fullmatch(entry.name)):
                yield from _below(path, seen, is_top=False)
        elif _is_read(path, is_top=is_top):
            yield path


def _is_read(path: Path, *, is_top: bool) -> bool:
    name, suffix = path.name, path.suffix.lower()
    if name.startswith((".", MEMORY_FILE, CACHES_FILE)) or _DATABASE.fullmatch(name) or _DOCUMENT.fullmatch(name):
        return False
    return suffix not in DOCUMENT_SUFFIXES and (is_top or suffix not in FOREIGN_SUFFIXES)


def _named(folder: Path) -> Iterator[Path]:
    """The files that `config.json` names, and those that these name."""
    seen: set[Path] = set()
    todo = [folder / "config.json"]
    while todo:
        naming = todo.pop()
        for text in _texts(_json(naming)):
            for path in (folder / text, naming.parent / text):
                if path not in seen and stamp_of(path) is not None:
                    seen.add(path)
                    todo += [path] if path.suffix == ".json" else []
                    yield path


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes()) if path.stat().st_size <= MAX_NAMING_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value that is not a name of a field."""
    todo = [value]
    while todo:
        match todo.pop():
            case str(text) if text:
                yield text
            case list(values):
                todo += values
            case dict(fields):
                todo += fields.values()
