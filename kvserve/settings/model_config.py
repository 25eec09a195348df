"""A model's `config.json`, read and nothing more.

Standard library only, and every line must run under Python 3.9, for `start_checks.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvserve.errors import ModelLoadError


def read_config(folder: Path) -> dict[str, Any]:
    """Raises ModelLoadError for a folder without a config that names its architecture."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json.") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} names no model_type: is this a model in Hugging Face format?")
    return config
