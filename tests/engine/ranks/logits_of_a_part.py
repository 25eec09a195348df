"""One rank of a ring, as a process of its own: what its part of each model says to the same tokens. Rank 0 writes it
down. What is planted in the last rank is a control."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvserve.engine.ranks.dividing import divide
from kvserve.engine.text_load import load_text
from kvserve.settings.model_config import read_config
from kvserve.settings.rank_env import rank_place

SWAPPED, STALE = "swapped heads", "stale"


def said_to(module: Any, prompt: Sequence[int], answer: Sequence[int], others: Any = None) -> mx.array:
    """Log-probabilities (answer, vocabulary) before each token of an answer: behind a prompt in one pass, then in
    passes of one token, with the caches of these `others` if there are any."""
    first, caches = _read(module, prompt)
    rows, caches = [first], others or caches
    for token in answer[:-1]:
        rows.append(_passed(module, [token], caches))
    return mx.stack(rows)


def _read(module: Any, prompt: Sequence[int]) -> tuple[mx.array, Any]:
    caches = make_prompt_cache(module)
    return _passed(module, prompt, caches), caches


def _passed(module: Any, ids: Sequence[int], caches: Any) -> mx.array:
    logits = module(mx.array([ids]), cache=caches)[0, -1].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits - mx.logsumexp(logits)


def _swap_heads(module: Any) -> None:
    """The first head of a layer asks what the second one should."""
    projection = next(layer.self_attn for layer in module.layers if hasattr(layer, "self_attn")).q_proj
    half = projection.weight.shape[0] // 2
    projection.weight = mx.concatenate([projection.weight[half:], projection.weight[:half]])


def main(todo: Path, out: Path) -> None:
    """`todo`: the folder of each model, prompt, answer and what is planted, in turn."""
    place = rank_place(os.environ)
    assert place is not None
    found = {}
    for number, (folder, prompt, answer, fault) in enumerate(json.loads(todo.read_text("utf-8"))):
        module, config = load_text(Path(folder), read_config(Path(folder)), is_lazy=True)
        divide(module, config, place)
        if fault == SWAPPED and not place.leads:
            _swap_heads(module)
        others = _read(module, prompt[::-1])[1] if fault == STALE else None
        found[str(number)] = said_to(module, prompt, answer, others if not place.leads else None)
    if place.leads:
        mx.savez(str(out), **found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
