"""Cache classes as a model file might bring them: right by themselves, and in one way each not as the server needs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.cache import BatchKVCache, ConcatenateKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import _get_classes

type NewCache = Callable[[], Any]


class Unmergeable(KVCache):
    """A KVCache in all but that it cannot be merged."""

    @property
    def merge(self) -> Any:
        raise AttributeError("merge")


class DropsPadding(KVCache):
    """Merged rows see the padding of the shorter ones."""

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        batch = BatchKVCache.merge(caches)
        batch.left_padding = mx.zeros_like(batch.left_padding)
        return batch


class FailsToMerge(KVCache):
    """Says that it can be merged, and cannot."""

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        raise NotImplementedError("planned")


class ShortMemory(RotatingKVCache):
    """A window in which the first tokens stay; mlx-lm's batch of windows forgets them."""

    def __init__(self) -> None:
        super().__init__(max_size=64, keep=4)


class LongMemory(RotatingKVCache):
    """The same, too long for a trial at the start."""

    def __init__(self) -> None:
        super().__init__(max_size=4096, keep=4)


class CopiesItself(Unmergeable):
    """Every copy is the object itself."""

    def __copy__(self) -> "CopiesItself":
        return self

    def __deepcopy__(self, memo: Any) -> "CopiesItself":
        return self


class ForgetsAtCuts(KVCache):
    """What it holds of a token has a part of the token before, but for the first one of each pass."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        before = mx.pad(values[..., :-1, :], [(0, 0), (0, 0), (1, 0), (0, 0)])
        return super().update_and_fetch(keys, values + 2 * before)


class ForgetsAtCutsUnseen(ForgetsAtCuts):
    """The same, for the control."""


class _Box:
    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def __copy__(self) -> "_Box":
        return self

    def __deepcopy__(self, memo: Any) -> "_Box":
        return self


class HidesItsArrays(ConcatenateKVCache):
    """Keeps its arrays in an object that all copies share, and shows none of them."""

    state: Any = ()

    def __init__(self) -> None:
        self.box = _Box()
        self.offset = 0

    @property
    def keys(self) -> mx.array | None:
        return self.box.keys

    @keys.setter
    def keys(self, value: mx.array | None) -> None:
        self.box.keys = value

    @property
    def values(self) -> mx.array | None:
        return self.box.values

    @values.setter
    def values(self, value: mx.array | None) -> None:
        self.box.values = value


class RefusesCopies(Unmergeable):
    """Raises when it is copied."""

    def __copy__(self) -> Any:
        raise TypeError("not to be copied")


def use_cache(monkeypatch: pytest.MonkeyPatch, new_cache: NewCache) -> None:
    """Give every layer of the qwen3 models in this test such a cache."""

    def make_cache(model: qwen3.Model) -> list[Any]:
        return [new_cache() for _ in model.layers]

    monkeypatch.setattr(qwen3.Model, "make_cache", make_cache, raising=False)


LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 64,
        "head_dim": 16,
        "hidden_size": 64,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": False,
        "vocab_size": 1000,
    },
}
"""Local attention in chunks of 64 tokens: mlx-lm's ChunkedKVCache, which has no batch form."""

DEEPSEEK_V41 = {
    "model_type": "deepseek_v41",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "compress_ratios": [0, 4, 0, 4],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}
"""Windows, compressed groups and a half-filled group in one cache object of the model's own."""


def random_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a model of random weights, without a tokenizer: what the engine needs."""
    model_class, arguments = _get_classes(config)
    mx.random.seed(1)
    model = model_class(arguments.from_dict(config))
    weights = {
        name: mx.random.normal(array.shape) * (0.3 if array.ndim > 1 else 0.1) + (0 if array.ndim > 1 else 1)
        for name, array in tree_flatten(model.parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
