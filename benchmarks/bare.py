"""Bare mlx-lm on the same model: what the hardware gives when no server is around it, on the calling thread."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

type KvPieces = list[list[tuple[mx.array, mx.array]]]
"""Per layer the keys and values of consecutive runs of tokens."""

PREFILL_CHUNK_TOKENS = 2048
"""The length of chunk that mlx-lm prefills with unless told otherwise."""


class BareModel:
    """A model in this process. Every method waits for the device before it returns."""

    def __init__(self, folder: Path) -> None:
        self._module: Any = load_model(folder, lazy=False)[0]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, for a model whose layers all have them."""
        caches = make_prompt_cache(self._module)
        with mx.stream(generation_stream):
            self._module(mx.array([[0]]), cache=caches)
        arrays = [array for cache in caches for array in (cache.keys, cache.values)]
        return sum(array.nbytes // array.shape[2] for array in arrays)

    def generation_seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Greedy answers of `num_tokens` each in one `BatchGenerator`, from inserting the prompts to the last token."""
        generator = BatchGenerator(self._module)
        started = time.perf_counter()
        generator.insert([list(prompt) for prompt in prompts], max_tokens=[num_tokens] * len(prompts))
        num_running = len(prompts)
        while num_running:
            _, responses = generator.next()
            num_running -= sum(response.finish_reason is not None for response in responses)
        seconds = time.perf_counter() - started
        mx.synchronize(generation_stream)
        generator.close()
        return seconds

    def first_token_seconds(self, prompt: Sequence[int], chunk_tokens: int) -> float:
        """Prefill of the prompt on plain caches in chunks of so many tokens, and the first token."""
        caches = make_prompt_cache(self._module)
        started = time.perf_counter()
        with mx.stream(generation_stream):
            for start in range(0, len(prompt) - 1, chunk_tokens):
                chunk = list(prompt[start : min(start + chunk_tokens, len(prompt) - 1)])
                self._module(mx.array(chunk)[None], cache=caches)
                mx.eval([cache.state for cache in caches])
            logits = self._module(mx.array([prompt[-1]])[None], cache=caches)
            mx.argmax(logits[:, -1, :], axis=-1).item()
        return time.perf_counter() - started

    def stored_pieces(self, num_tokens: int, piece_tokens: int) -> KvPieces:
        """KV of `num_tokens` tokens in runs of at most `piece_tokens`. Random: only its shape costs."""
        caches = make_prompt_cache(self._module)
        with mx.stream(generation_stream):
            self._module(mx.array([[0]]), cache=caches)
            lengths = [min(piece_tokens, num_tokens - start) for start in range(0, num_tokens, piece_tokens)]
            pieces = [
                [(_random_rows(cache.keys, length), _random_rows(cache.values, length)) for length in lengths]
                for cache in caches
            ]
            mx.eval(pieces)
        return pieces

    def warm_first_token_seconds(self, stored: KvPieces, new: Sequence[int]) -> float:
        """Put the stored pieces together, prefill the new tokens behind them but the last, and draw one token."""
        caches = make_prompt_cache(self._module)
        started = time.perf_counter()
        with mx.stream(generation_stream):
            for cache, pieces in zip(caches, stored, strict=True):
                cache.offset = sum(keys.shape[2] for keys, _ in pieces)
                cache.keys, cache.values = (_joined(parts, len(new)) for parts in zip(*pieces, strict=True))
            mx.eval([cache.state for cache in caches])
            self._module(mx.array(new[:-1])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
            logits = self._module(mx.array([new[-1]])[None], cache=caches)
            mx.argmax(logits[:, -1, :], axis=-1).item()
        return time.perf_counter() - started


def _random_rows(like: mx.array, num_tokens: int) -> mx.array:
    return mx.random.normal((*like.shape[:2], num_tokens, like.shape[3]), like.dtype)


def _joined(parts: Sequence[mx.array], num_new_tokens: int) -> mx.array:
    """All parts in one buffer with room behind them, so that nothing is copied twice."""
    room = mx.zeros((*parts[0].shape[:2], num_new_tokens, parts[0].shape[3]), parts[0].dtype)
    return mx.concatenate([*parts, room], axis=2)
