"""Whether a pipeline of mlx-lm's carries rows to every rank, found by two passes at the start: a prompt, of which only
the caches are computed, and a step of a batch.

Every rank describes a pass before any computes it, so that what raises in one leaves no other in a collective. Caches
are of classes that are known here: the look at others tries passes of its own, which no other rank would be in.
"""

import re
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from kvserve.core.rank_place import LayerSpan, RankPlace
from kvserve.engine.kv_buffers import entering, held_arrays
from kvserve.engine.logits_error import logits_error
from kvserve.engine.quantised import KvSettings
from kvserve.engine.ranks.alike import on_all
from kvserve.engine.ranks.place import Ranks
from kvserve.errors import ModelLoadError

NUM_TOKENS = 16
NUM_COMPARED = 997
"""Logits that the ranks tell each other."""

MAX_ERROR = 0.01
"""How far the logits of two ranks may be apart that compute the head from one hidden state, on unlike processors."""

SERVED = (KVCache, ArraysCache)

_STEP = re.compile(r'label ="(\w+)"')


def refuse_quantised(kv: KvSettings) -> None:
    """Raises ModelLoadError where KV is to be quantised: a pipeline's send hangs on plain keys."""
    if kv.bits is not None:
        raise ModelLoadError(f"KV_BITS={kv.bits} cannot be used where layers are divided over ranks: set KV_BITS=OFF.")


def refuse_broken(ranks: Ranks, module: Any, span: LayerSpan) -> None:
    """Raises ModelLoadError, on every rank, where the parts are not the whole, keep what is not served where layers are
    divided, or do not hand on what they compute."""
    _refuse_gaps(ranks.gathered("layers", [span.start, span.end]), span.num_layers)
    caches = on_all(ranks, lambda: _served(make_prompt_cache(module), span))
    prompt = mx.array([[1 + 37 * place % 89 for place in range(NUM_TOKENS)]])
    _pass(ranks, module, prompt, caches, hangs_on_caches=True)
    on_all(ranks, lambda: _refuse_unwritten(caches))
    batch = on_all(ranks, lambda: [leaf.merge([leaf]) for leaf in entering(caches)])
    _pass(ranks, module, prompt[:, :1], batch, hangs_on_caches=False)


def _refuse_gaps(spans: Sequence[Sequence[int]], num_layers: int) -> None:
    """Raises ModelLoadError unless the ranks have all layers between them, rank 0 the last ones."""
    ends = [0, *(end for _, end in reversed(spans))]
    starts = [*(start for start, _ in reversed(spans)), num_layers]
    if starts != ends:
        raise _broken(f"its ranks have the layers {[tuple(span) for span in spans]} of {num_layers}")


def _served(caches: list[Any], span: LayerSpan) -> list[Any]:
    """The caches, which are plain ones of this rank's layers. Raises ModelLoadError."""
    if others := sorted({type(each).__name__ for each in caches if type(each) not in SERVED}):
        raise _broken(f"it keeps {', '.join(others)}, which is not served where layers are divided")
    if len(caches) != span.end - span.start:
        raise _broken(f"it makes {len(caches)} caches for {span}")
    return caches


def _refuse_unwritten(caches: Sequence[Any]) -> None:
    """Raises ModelLoadError where a pass has left keys and values of its tokens out."""
    if any(type(each) is KVCache and each.offset != NUM_TOKENS for each in caches):
        raise _broken("some layers do not keep what they are given")


def _pass(ranks: Ranks, module: Any, ids: mx.array, caches: list[Any], *, hangs_on_caches: bool) -> None:
    """One pass of all ranks, whose logits must be the same everywhere. `hangs_on_caches`: it is done once the caches
    are computed, as behind a chunk of a prompt nobody asks for logits."""
    logits = on_all(ranks, lambda: _described(ranks.place, module, ids, caches, hangs_on_caches=hangs_on_caches))
    num_apart = max(1, logits.shape[-1] // NUM_COMPARED)

    def compute() -> list[float]:
        mx.eval(held_arrays(caches))
        told: Any = logits[0, -1, ::num_apart].astype(mx.float32).tolist()
        return [float(each) for each in told]

    found = ranks.gathered("logits", ranks.together(compute))
    errors = [logits_error(mx.array(each), mx.array(found[0])) for each in found]
    if not all(error <= MAX_ERROR for error in errors):  # also for what is no number
        raise _broken(f"its ranks come to unlike logits: {[f'{error:.0%}' for error in errors]} off those of rank 0")


def _described(
    place: RankPlace | None, module: Any, ids: mx.array, caches: list[Any], *, hangs_on_caches: bool
) -> mx.array:
    """The logits of a pass, which is not computed yet. Raises ModelLoadError where computing the caches would not do
    this rank's part of it, and what the model raises."""
    logits: mx.array = module(ids, cache=caches)
    steps = _steps(held_arrays(caches) if hangs_on_caches else [logits])
    if place is not None and place.rank > 0 and not steps["Send"]:
        raise _broken("what a rank hands on is not part of what it computes")
    if place is not None and place.rank < place.size - 1 and not steps["Recv"]:
        raise _broken("what a rank is handed is not part of what it computes")
    return logits


def _steps(arrays: Sequence[mx.array]) -> Counter[str]:
    """How often each of MLX's primitives is in what these arrays come from."""
    graph = StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(_STEP.findall(graph.getvalue()))


def _broken(why: str) -> ModelLoadError:
    return ModelLoadError(f"This model cannot be divided over ranks: mlx-lm's pipeline of it does not work ({why}).")
