"""Bare mlx-lm on the same model: what the hardware gives when no server is around it, on the calling thread."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

PREFILL_CHUNK_TOKENS = 2048
"""The length of chunk that mlx-lm prefills with unless told otherwise."""


class BareModel:
    """A model in this process. Every method waits for the device before it returns."""

    def __init__(self, folder: Path) -> None:
        self._module: Any = load_model(folder, lazy=False)[0]

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
