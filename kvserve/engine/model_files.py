"""What lies on disk of a model: its folder in the hub's cache, and whether its weights are whole.

It reads headers only, loads nothing and fetches nothing.
"""

import json
import re
import struct
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from kvserve.errors import ModelLoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r"(model.*-)(\d+)-of-(\d+)(\.safetensors)")
_MAX_HEADER_BYTES = 2**28


def cached_folder(hub_name: str) -> Path | None:
    """The folder of a hub name's snapshot, None where there is none; the network is never asked."""
    if _HUB_NAME.fullmatch(hub_name) is None:
        return None
    try:
        return Path(snapshot_download(hub_name, local_files_only=True))
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
    """The size that a safetensors file should have: eight bytes of length, a JSON header, data. None: unreadable."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header = json.loads(stream.read(length))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return None
    return 8 + int(length) + max(ends, default=0)
