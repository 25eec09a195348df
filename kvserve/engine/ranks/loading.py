"""What the ranks of one model make sure of before the first pass: that they start with the same settings, that each has
loaded its part, and that all have found the same about it.
"""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvserve.core.rank_place import RankPlace
from kvserve.engine.engine_settings import EngineSettings
from kvserve.engine.kv_size import KvSize, largest
from kvserve.engine.memory import memory_bytes
from kvserve.engine.model import LoadedModel
from kvserve.engine.quantised import KvSettings
from kvserve.engine.ranks.alike import on_all, refuse_unlike
from kvserve.engine.ranks.dividing import divide
from kvserve.engine.ranks.group import join
from kvserve.engine.ranks.pipeline_probe import refuse_broken, refuse_quantised
from kvserve.engine.ranks.place import Ranks
from kvserve.engine.ranks.rank_link import Ears
from kvserve.engine.text_load import is_for_mlx_lm, load_text
from kvserve.engine.vision_load import VisionModel, is_vision
from kvserve.errors import ModelLoadError

NO_IMAGES = "Over several ranks the model sees no images."


SHARED = ("max_kv_size", "max_concurrent_requests", "prefill_step_size", "kv", "drafts")
"""Settings that steer what is in a pass."""

NUM_GLIMPSES, GLIMPSE_BYTES = 64, 4096
"""Of each file of weights: where nothing outlives the process its weights are compared by no more than that."""


def joined(place: RankPlace, settings: EngineSettings, ears: Ears) -> tuple[Ranks, EngineSettings]:
    """The other ranks, with the same settings, and these: all count with the memory of the smallest machine.
    Raises ModelLoadError."""
    ranks = join(place, ears)
    shared = {name: repr(getattr(settings, name)) for name in SHARED}
    refuse_unlike(ranks, "settings", {**shared, "disk cache": _disk_mode(settings)})
    return ranks, replace(settings, machine_bytes=min(ranks.gathered("memory", memory_bytes())))


def _disk_mode(settings: EngineSettings) -> str:
    return "none" if settings.disk is None else "scratch" if settings.disk.is_ephemeral else "folder"


def with_other_parts(ranks: Ranks, model: LoadedModel) -> LoadedModel:
    """A rank's model with what counts of the other parts: whether one that has other layers keeps states, and the
    sizes of the largest, as a row that one of them has no room for is nobody's."""
    if ranks.is_alone:
        return model
    own = {"has_states": not model.layout.is_cuttable, "weights": model.weight_bytes, "sizes": asdict(model.sizes)}
    parts = ranks.gathered("parts", own)
    return replace(
        model,
        has_states_elsewhere=ranks.span is not None and any(part["has_states"] for part in parts),
        weight_bytes=max(part["weights"] for part in parts),
        sizes=largest([KvSize(**part["sizes"]) for part in parts]),
    )


def refuse_unlike_look(ranks: Ranks, model: LoadedModel) -> None:
    """Raises ModelLoadError where the ranks have found other things about a model's caches. In a pipeline each has
    other layers, whose caches are what they are."""
    support = model.cache_support
    kinds = [[form.kind, form.depends_on_cuts] for form in model.leaf_forms or ()] if ranks.span is None else []
    allows = [support.can_batch, support.can_keep, support.can_pad, support.cut_tokens]
    found = {"vocabulary": model.vocab_size, "forms": kinds, "support": allows, "trouble": model.leaf_trouble}
    refuse_unlike(ranks, "look at the caches", found)


def read_part(ranks: Ranks, kv: KvSettings, folder: Path, config: dict[str, Any]) -> VisionModel:
    """This rank's part of a model, once all ranks have theirs. Raises ModelLoadError where one of them has not, and for
    a pipeline that cannot serve."""
    refuse_unlike(ranks, "model files", on_all(ranks, lambda: glimpsed(folder)))
    part = on_all(ranks, lambda: _part(ranks, folder, config))
    refuse_unlike(ranks, "way to divide the model", {"has whole layers": ranks.span is not None})
    if ranks.span is not None:
        refuse_quantised(kv)
        refuse_broken(ranks, part.decoder, ranks.span)
    return part


def glimpsed(folder: Path) -> dict[str, str]:
    """What tells a model from another one without reading all of it: its config, and of each file of weights the size
    and a little of it, from places all over it. Raises OSError."""
    files = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    return {file.name: _glimpse(file) for file in files}


def _glimpse(file: Path) -> str:
    digest, num_bytes = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as opened:
        if num_bytes <= NUM_GLIMPSES * GLIMPSE_BYTES:
            digest.update(opened.read())
        else:
            for number in range(NUM_GLIMPSES):
                opened.seek(number * (num_bytes - GLIMPSE_BYTES) // (NUM_GLIMPSES - 1))
                digest.update(opened.read(GLIMPSE_BYTES))
    return f"{num_bytes} bytes, {digest.hexdigest()[:16]}"


def _part(ranks: Ranks, folder: Path, config: dict[str, Any]) -> VisionModel:
    if ranks.place is None or not is_for_mlx_lm(config):
        raise ModelLoadError(f"Only mlx-lm divides models, and it does not know the family {config['model_type']}.")
    module, config = load_text(folder, config, is_lazy=True)
    ranks.span = divide(module, config, ranks.place)
    return VisionModel(module, config, None, NO_IMAGES if is_vision(config) else "")
