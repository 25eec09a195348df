"""Bare mlx-lm on the same model: what the hardware gives when no server is around it, on the calling thread."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

type KvPieces = list[list[tuple[mx.array, mx.array]]]
"""Per layer the keys and values of consecutive runs of tokens."""

PREFILL_CHUNK_TOKENS = 2048
"""The length of chunk that mlx-lm prefills with unless told otherwise."""


class BareAnswers:
    """Answers of one `BatchGenerator` on their way, slice by slice (`slices.Answers`)."""

    def __init__(self, module: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._generator = BatchGenerator(module)
        self._prompts = [list(prompt) for prompt in prompts]
        self._num_tokens = num_tokens
        self._num_running = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        mx.synchronize(generation_stream)
        self._generator.close()

    def run(self, seconds: float | None) -> bool:
        """One slice; the step that is in flight at its end is waited for."""
        ends_at = time.perf_counter() + (seconds or 0.0)
        if self._prompts:
            self._num_running = len(self._prompts)
            self._generator.insert(self._prompts, max_tokens=[self._num_tokens] * len(self._prompts))
            self._prompts = []
        while self._num_running:
            _, responses = self._generator.next()
            self._num_running -= sum(response.finish_reason is not None for response in responses)
            if responses if seconds is None else time.perf_counter() >= ends_at:
                mx.synchronize(generation_stream)
                break
        return not self._num_running


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

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> "BareAnswers":
        """Greedy answers of `num_tokens` each in one `BatchGenerator`."""
        return BareAnswers(self._module, prompts, num_tokens)

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
