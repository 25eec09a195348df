"""Loading a text model: with mlx-lm where it knows the architecture, else mlx-vlm's language model, which may be the
only one that does. It knows the libraries' loaders and no family's name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes, load_model

from kvserve.engine.borders import finding
from kvserve.engine.logits_error import logits_error
from kvserve.engine.shapeless import compile_for_true_lengths
from kvserve.engine.vision import CurrentPass, VlmDecoder
from kvserve.errors import ModelLoadError

NUM_TRIED_TOKENS = 16

MAX_ERROR = 0.25
"""How far a token's logits may be from themselves when others follow: a tie in a mixture of experts stays below it, a
model that looks ahead does not."""


def is_for_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has the architecture, as a model and not as a helper of one."""
    try:
        _get_classes(dict(config))
    except (ValueError, AttributeError):
        return False
    except SystemExit:  # a module that ends the process where a package of its own is not installed
        return False
    return True


def is_for_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm has the architecture, as a model and not as a helper of one."""
    from mlx_vlm.utils import get_model_and_args

    try:
        module, _ = get_model_and_args(dict(config))
    except (ValueError, KeyError, ImportError):
        return False
    return str(module.__name__).startswith("mlx_vlm.models.")


def load_text(folder: Path, config: dict[str, Any], *, is_lazy: bool = False) -> tuple[Any, dict[str, Any]]:
    """A decoder and its config; `is_lazy`: mlx-lm's weights are not read yet.

    Raises what the loaders raise, and ModelLoadError for a model that writes no text."""
    compile_for_true_lengths()
    if is_for_mlx_lm(config) or not is_for_mlx_vlm(config):
        return load_model(folder, lazy=is_lazy)
    return _load_with_mlx_vlm(folder, config), config


def _load_with_mlx_vlm(folder: Path, config: Mapping[str, Any]) -> VlmDecoder:
    from mlx_vlm.utils import load_model as load_vlm

    language = getattr(load_vlm(folder, lazy=True, trust_remote_code=False), "language_model", None)
    if language is None:
        raise ModelLoadError(f"{_named(folder, config)} writes no text: it has no language model.")
    mx.eval(language.parameters())
    return causal_decoder(folder, config, language, CurrentPass())


def refuse_own_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a model that brings code: mlx-vlm would run it, whatever it is told to trust."""
    if config.get("model_file") is not None:
        raise ModelLoadError(f"{_named(folder, config)} brings code of its own (model_file), which is not run.")


def causal_decoder(folder: Path, config: Mapping[str, Any], language: Any, current: CurrentPass) -> VlmDecoder:
    """The decoder of `vlm_decoder`. Raises ModelLoadError where it looks ahead."""
    decoder = vlm_decoder(language, current)
    if looks_ahead(decoder):
        raise ModelLoadError(
            f"{_named(folder, config)} writes no text token by token: what it says of a token depends on later ones."
        )
    return decoder


def _named(folder: Path, config: Mapping[str, Any]) -> str:
    return f"The model in {folder} ({config['model_type']})"


def vlm_decoder(language: Any, current: CurrentPass) -> VlmDecoder:
    """mlx-vlm's language model, told every position where it can be: what it works out itself it keeps on the module,
    which all rows share. Raises what its first passes raise."""
    counts_images = hasattr(language, "get_rope_index")
    decoder = VlmDecoder(language, current, has_positions=counts_images)
    error = finding(decoder.adopt_caches)
    if error is not None and counts_images:  # inherited, and its layers take other positions
        decoder, error = VlmDecoder(language, current, has_positions=False), None
        decoder.adopt_caches()
    if error is not None:
        raise error
    return decoder


def looks_ahead(decoder: VlmDecoder) -> bool:
    """Whether later tokens change what a model says of an earlier one, as in encoders and diffusion models."""
    tokens = [1 + 37 * place % 89 for place in range(NUM_TRIED_TOKENS)]
    half = NUM_TRIED_TOKENS // 2
    alone = decoder(mx.array([tokens[:half]]), decoder.make_cache())
    among = decoder(mx.array([tokens]), decoder.make_cache())
    if among.shape[1] != NUM_TRIED_TOKENS:
        return False
    return not logits_error(among[0, half - 1], alone[0, -1]) <= MAX_ERROR
