"""A model's `config.json`: read, and where in it what is asked for stands.

Standard library only, and every line must run under Python 3.9, for `start_checks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: models that see or hear have one of its own."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def own_context_limit(config: Mapping[str, Any]) -> int | None:
    """For how many tokens the model was made; None where the config does not say."""
    limit = text_config(config).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def expert_counts(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """How many experts a layer has, and how many of them a token passes through; None where there are none."""
    text = text_config(config)
    num_experts = next((text[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if text.get(k)), None)
    per_token = next((text[k] for k in ("num_experts_per_tok", "num_experts_per_token") if text.get(k)), None)
    return num_experts, per_token
