"""Loading a vision checkpoint: which half comes from where, each weight once.

mlx-lm's decoder is taken where it knows the family and its positions can be given to it, because its caches are the
ones that batches and snapshots are made for; else mlx-vlm's. mlx-vlm's other half supplies tower and processor. It is
loaded lazily, and what of it is not used is dropped before it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.utils import load_model

from kvserve.engine.borders import finding
from kvserve.engine.kv_buffers import arrays_in
from kvserve.engine.shapeless import compile_for_true_lengths
from kvserve.engine.text_load import causal_decoder, is_for_mlx_lm, load_text
from kvserve.engine.vision import CurrentPass, DeepLayer, ShiftedRope, VisionDecoder, masks_with_images
from kvserve.engine.vision_reader import ImageReader
from kvserve.engine.vision_tower import Tower, embedding_scale
from kvserve.errors import ModelLoadError
from kvserve.settings.model_config import text_config

type ImageRule = Literal["anywhere", "whole", "alone"]
"""Where a prefill may pause: anywhere, not inside an image, or nowhere: such rows are computed by themselves, anew."""


MAX_DISAGREEMENT = 1e-2


@dataclass(frozen=True, slots=True)
class VisionSupport:
    """The vision half of a model, whose own weights take `num_bytes`. `rule` is found out at load."""

    tower: Tower
    reader: ImageReader
    image_token: int
    model: Any
    num_bytes: int
    rule: ImageRule = "alone"

    @property
    def language(self) -> Any:
        """What is left of mlx-vlm's language model."""
        return self.model.language_model


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A loaded vision checkpoint; `vision` is None where only its decoder can be used, and `note` says why."""

    decoder: Any
    config: dict[str, Any]
    vision: VisionSupport | None
    note: str = ""


def is_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config describes a vision tower."""
    vision = config.get("vision_config")
    return isinstance(vision, dict) and bool(vision)


def load_vision(folder: Path, config: dict[str, Any]) -> VisionModel:
    """Load decoder and tower. Raises what the loaders raise for a decoder that neither of them can load."""
    found = finding(partial(_load_lazily, folder))
    if isinstance(found, Exception):
        return VisionModel(*load_text(folder, config), None, _no_images(found))
    (seeing, rotary), current = found, CurrentPass()
    has_positions = hasattr(seeing.language_model, "get_rope_index")
    if not is_for_mlx_lm(config) or (has_positions and rotary is None):
        mx.eval(seeing.parameters())
        decoder = causal_decoder(folder, config, seeing.language_model, current)
        return _with_vision(folder, config, seeing, decoder, instead=decoder)
    decoder, config = load_model(folder, lazy=False)
    seeing_decoder = VisionDecoder(decoder, current, has_positions=has_positions)
    error = finding(partial(_join, seeing, decoder, rotary, current, config))
    if error is not None:
        return VisionModel(decoder, config, None, _no_images(error))
    return _with_vision(folder, config, seeing, seeing_decoder, instead=decoder)


def _with_vision(
    folder: Path, config: dict[str, Any], seeing: Any, decoder: VisionDecoder, instead: Any
) -> VisionModel:
    """The checkpoint with its vision, or `instead` of its decoder where there can be none."""
    vision = finding(partial(_vision, folder, seeing, decoder))
    if isinstance(vision, Exception):
        return VisionModel(instead, config, None, _no_images(vision))
    return VisionModel(decoder, config, vision)


def _no_images(error: Exception) -> str:
    reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200]
    return f"The model sees no images, text is served: {reason}"


def _load_lazily(folder: Path) -> tuple[Any, Any]:
    """mlx-vlm's model, and how it turns three positions into angles. Raises for a checkpoint that describes a tower and
    lacks it, among others."""
    from mlx_vlm.utils import load_model as load_vlm

    compile_for_true_lengths()
    seeing = load_vlm(folder, lazy=True, trust_remote_code=False)
    return seeing, _rotary(seeing.language_model)


def _rotary(language: Any) -> Any:
    """How mlx-vlm turns three positions into angles, if in a way that can be applied elsewhere."""
    from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

    for layer in language.model.layers:
        rotary = getattr(getattr(layer, "self_attn", None), "rotary_emb", None)
        if isinstance(rotary, MRoPERotaryEmbedding):
            return rotary
    return None


def _join(seeing: Any, decoder: Any, rotary: Any, current: CurrentPass, config: Mapping[str, Any]) -> None:
    """Let mlx-lm's decoder see what mlx-vlm's half shows it. Raises for a decoder of another build than those known
    here."""
    _hook(decoder, rotary, current, config, num_deep_layers=_num_deep_layers(seeing))
    _share_decoder(seeing.language_model, decoder)
    mx.eval(seeing.parameters())


def _share_decoder(language: Any, decoder: Any) -> None:
    """Leave of mlx-vlm's language model what computes positions and embeddings, with the decoder's own weights."""
    ours, theirs = _inner(decoder), language.model
    for name in [name for name in language if name != "model"]:
        del language[name]
    for name in [name for name in theirs if not name.startswith("embed_tokens")]:
        del theirs[name]
    for name in list(theirs):
        theirs[name] = ours[name]


def _inner(decoder: Any) -> Any:
    """The part of an mlx-lm model that has the layers."""
    return getattr(decoder, "language_model", decoder).model


def _num_deep_layers(seeing: Any) -> int:
    vision = getattr(seeing.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _hook(decoder: Any, rotary: Any, current: CurrentPass, config: Mapping[str, Any], *, num_deep_layers: int) -> None:
    """Let the passes of an mlx-lm model see what the current pass shows."""
    inner = _inner(decoder)
    if rotary is not None:
        from mlx_vlm.models.rope_utils import apply_multimodal_rotary_pos_emb

        for layer in inner.layers:
            attention = getattr(layer, "self_attn", None)
            if attention is not None and hasattr(attention, "rope"):
                attention.rope = ShiftedRope(attention.rope, rotary, apply_multimodal_rotary_pos_emb, current)
                if not attention.rope.disagreement() <= MAX_DISAGREEMENT:
                    raise ModelLoadError("mlx-lm's decoder and mlx-vlm's turn positions into other angles")
    for index in range(num_deep_layers):
        inner.layers[index] = DeepLayer(inner.layers[index], index, current)
    if text_config(config).get("use_bidirectional_attention") == "vision":
        if not hasattr(inner, "_make_masks"):
            raise ModelLoadError("Its images see themselves in both directions, which mlx-lm's decoder cannot do.")
        inner._make_masks = masks_with_images(inner, current)


def _vision(folder: Path, seeing: Any, decoder: VisionDecoder) -> VisionSupport:
    from mlx_vlm.utils import load_processor

    image_token = _media_token(seeing.config, "image")
    if image_token is None:
        raise ModelLoadError("its config names no image token")
    processor = load_processor(folder, add_detokenizer=False, trust_remote_code=False)
    merge = getattr(seeing.config.vision_config, "spatial_merge_size", 1) if decoder.has_positions else None
    others = [token for kind in ("video", "audio") if (token := _media_token(seeing.config, kind)) is not None]
    reader = ImageReader(processor, folder, image_token, merge, others)
    scale = embedding_scale(lambda ids: seeing.get_input_embeddings(ids, None).inputs_embeds, decoder.embed)
    tower = Tower(seeing, image_token, _known_scale(scale, seeing))
    return VisionSupport(tower, reader, image_token, seeing, weight_bytes(seeing) - weight_bytes(seeing.language_model))


def weight_bytes(module: Any) -> int:
    """What a module's weights take."""
    return sum(array.nbytes for array in arrays_in(module.parameters()))


def _media_token(config: Any, kind: str) -> int | None:
    """Families call it by two names."""
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((token for name in names if isinstance(token := getattr(config, name, None), int)), None)


def _known_scale(measured: float, seeing: Any) -> float:
    """The measured scale, or the exact number that it stands for: half precision measures it inexactly."""
    exact = (1.0, float(getattr(seeing.language_model.model, "embed_scale", 1.0)))
    return next((scale for scale in exact if abs(measured / scale - 1) < 0.01), measured)
