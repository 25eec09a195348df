"""The folder of a model that is named as on the hub, downloaded when it is not on this machine. It loads nothing."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kvserve.errors import ModelLoadError

_HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt"]


def fetched_folder(model_path: str, note: Callable[[str], None]) -> Path:
    """The snapshot of a hub name, downloaded when absent. Raises ModelLoadError when there is no such name, or the hub
    cannot be reached."""
    try:
        try:
            return Path(snapshot_download(model_path, allow_patterns=_HUB_PATTERNS, local_files_only=True))
        except LocalEntryNotFoundError:
            note(f"{model_path} is not on this machine yet: downloading it from the hub.")
            return Path(snapshot_download(model_path, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"MODEL_PATH={model_path!r} is neither a local folder nor a model that could be fetched from the hub "
            f"({reason}). Check the name and the network, or give the path of a local folder."
        ) from error
