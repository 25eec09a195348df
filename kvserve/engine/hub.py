"""The folder of a model that is named as on the hub, downloaded when it is not on this machine, and what the hub
tells of one that nobody downloads. It loads nothing."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kvserve.engine.model_files import HUB_PATTERNS
from kvserve.errors import ModelLoadError
from kvserve.settings.model_config import read_config


def fetched_folder(model_path: str, note: Callable[[str], None]) -> Path:
    """The snapshot of a hub name, downloaded when absent. Raises ModelLoadError when there is no such name, or the hub
    cannot be reached."""
    try:
        return Path(snapshot_download(model_path, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        note(f"{model_path} is not on this machine yet: downloading it from the hub.")
    except (HFValidationError, OSError) as error:
        raise _unfetched(model_path, error) from error
    return download(model_path)


def download(name: str, endpoint: str | None = None) -> Path:
    """The snapshot of a hub name with every file that a server reads; those that are here are kept. How far it is shows
    on a terminal. Raises ModelLoadError."""
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, endpoint=endpoint))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unfetched(name, error) from error


def _unfetched(name: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"MODEL_PATH={name!r} is neither a local folder nor a model that could be fetched from the hub "
        f"({_reason(error)}). Check the name and the network, or give the path of a local folder."
    )


@dataclass(frozen=True, slots=True)
class HubModel:
    """What the hub tells of a model without its weights: its config, and the bytes of its files of weights."""

    config: dict[str, Any]
    weight_bytes: int


def look_at_hub(name: str, endpoint: str | None = None) -> HubModel:
    """Ask the hub for a model's config and the sizes of its files; nothing of it stays on this machine. Raises
    ModelLoadError where there is no such name, or the hub cannot be reached."""
    try:
        told = HfApi(endpoint=endpoint).model_info(name, files_metadata=True)
        with tempfile.TemporaryDirectory() as folder:
            hf_hub_download(name, "config.json", local_dir=folder, endpoint=endpoint)
            config = read_config(Path(folder))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{name!r} is neither on this machine nor could it be looked up on the hub ({_reason(error)}). Check the "
            "name and the network, or give the path of a local folder."
        ) from error
    files = told.siblings or ()
    return HubModel(config, sum(file.size or 0 for file in files if fnmatch(file.rfilename, "model*.safetensors")))


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
