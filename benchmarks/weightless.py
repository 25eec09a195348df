"""A model without weights whose forward pass costs next to nothing: what is left is what the engine does around it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from kvserve.engine.model import KvSize, LoadedModel, load


class Weightless:
    """Writes noise into its caches (an array that all layers share would take the memory of one), says token 0.

    `num_states` more layers keep a small recurrent state instead, so that rows start from checkpoints.
    """

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, vocab_size: int, num_states: int = 0) -> None:
        self.layers = [None] * num_layers
        self._num_states = num_states
        self._heads = num_heads
        self._head_dim = head_dim
        self._vocab_size = vocab_size

    def make_cache(self) -> list[Any]:
        """Empty caches, one per layer."""
        states = [ArraysCache(1) for _ in range(self._num_states)]  # type: ignore[no-untyped-call]
        return [*(KVCache() for _ in self.layers), *states]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (rows, tokens, vocabulary) for ids (rows, tokens)."""
        num_rows, num_tokens = inputs.shape
        shape = (num_rows, self._heads, num_tokens, self._head_dim)
        fetched: list[mx.array] = []
        for layer in cache:
            if isinstance(layer, ArraysCache):
                layer[0] = mx.random.normal((num_rows, self._head_dim))
            else:
                fetched += layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        logits = mx.zeros((num_rows, num_tokens, self._vocab_size))
        return mx.depends(logits, fetched) if fetched else logits  # as attention does: no layer stays lazy


def weightless_model(
    folder: Path, *, num_layers: int, num_heads: int = 1, head_dim: int = 1, num_states: int = 0
) -> LoadedModel:
    """The model in `folder` with this one's caches and without its weights."""
    model = load(folder, max_kv_size=2**20)
    module: Any = Weightless(num_layers, num_heads, head_dim, vocab_size=8, num_states=num_states)
    per_token = 2 * num_layers * num_heads * head_dim * mx.float32.size
    fixed = num_states * head_dim * mx.float32.size
    return replace(model, module=module, sizes=KvSize(fixed=fixed, per_token=per_token), leaf_forms=None)
