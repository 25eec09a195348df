"""How a model is divided over ranks: by mlx-lm's `shard()` each has a part of every layer; where there is none, by its
pipeline each has some of the layers whole. It knows mlx-lm's ways of it, and nothing of rows.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from kvserve.core.rank_place import LayerSpan, RankPlace
from kvserve.engine.borders import described, finding
from kvserve.errors import ModelLoadError


def divide(module: Any, config: dict[str, Any], place: RankPlace) -> LayerSpan | None:
    """Keep this rank's part of a model that was loaded lazily: see `keep_part`. Raises ModelLoadError where it cannot
    be divided."""
    span = keep_part(module, config, place.size, mx.distributed.init(strict=True))
    mx.eval(module.parameters())
    return span


def keep_part(module: Any, config: Mapping[str, Any], num_ranks: int, group: Any) -> LayerSpan | None:
    """Leave of a model's lazy arrays the part of one rank of `group`: a part of every layer (None), or these layers.
    Raises ModelLoadError where it cannot be divided."""
    if hasattr(module, "shard"):
        _shard(module, config, num_ranks, group)
        return None
    if hasattr(getattr(module, "model", None), "pipeline"):
        return _keep_layers(module, num_ranks, group)
    raise ModelLoadError(
        f"A model of the family {config.get('model_type')} cannot be divided over {num_ranks} ranks: mlx-lm has "
        "neither shard() nor pipeline() for it. Start one rank, or choose another model."
    )


def _shard(module: Any, config: Mapping[str, Any], num_ranks: int, group: Any) -> None:
    text = config.get("text_config") or config
    for key in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        if isinstance(number := text.get(key), int) and number % num_ranks:
            raise ModelLoadError(f"This model cannot be divided over {num_ranks} ranks: its {key} is {number}.")
    error = finding(lambda: module.shard(group))
    if error is not None:
        raise ModelLoadError(f"This model cannot be divided over {num_ranks} ranks: {described(error)}")


def _keep_layers(module: Any, num_ranks: int, group: Any) -> LayerSpan:
    num_layers = len(module.layers)
    if num_layers < num_ranks:
        raise ModelLoadError(f"This model cannot be divided over {num_ranks} ranks: it has {num_layers} layers.")
    error = finding(lambda: module.model.pipeline(group))
    if error is not None:
        raise ModelLoadError(f"This model cannot be divided over {num_ranks} ranks: {described(error)}")
    return LayerSpan(module.model.start_idx, module.model.end_idx, num_layers)


def compute_alone(module: Any) -> None:
    """Let a part of a pipeline compute without the others: what its caches hold is seen so, what it says is nothing."""
    module.model.pipeline_rank, module.model.pipeline_size = 0, 1
