"""What the engine's tests share: a running engine on a tiny model, requests, and a collector of their events."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvserve.core import (
    GenerationDone,
    GenerationFailed,
    GenerationRequest,
    Grammar,
    PrefillProgress,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.engine.prefix_cache import CacheSettings
from kvserve.engine.rows import Generation
from kvserve.engine.worker import Engine, EngineSettings
from tests.models import tiny_model

CACHE = CacheSettings(
    max_bytes=2**30,
    block_size=16,
    use_index=True,
    max_entries=1000,
    max_entries_per_owner=1000,
    ttl_seconds=0,
    owner_idle_seconds=0,
)

FAMILIES = (
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "glm4_moe_lite",
    "llama",
)


@dataclass(frozen=True, slots=True)
class Result:
    """The tokens of a row and its last event."""

    tokens: tuple[int, ...]
    end: GenerationDone | GenerationFailed
    progress: tuple[PrefillProgress, ...]


def engine_settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "max_kv_size": 131072,
        "max_concurrent_requests": 8,
        "max_queued_requests": 64,
        "max_batch_bytes": None,
        "prefill_step_size": 2048,
        "watchdog_seconds": 0,
        "default_sampling": SamplingParams(),
        "cache": CACHE,
    }
    return EngineSettings(**(values | changes))


@contextmanager
def running_engine(
    family: str = "qwen3",
    *,
    grammar_tokenizer: Callable[[int], Any] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine that has loaded the tiny model of a family; stopped afterwards."""
    engine = Engine(tiny_model(family), engine_settings(**settings), grammar_tokenizer=grammar_tokenizer, report=report)
    engine.start()
    try:
        engine.wait_until_ready(60)
        yield engine
    finally:
        engine.stop(20)


def request(
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    stop: Sequence[int] = (),
    grammar: Grammar | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """Greedy unless the sampling parameters say otherwise."""
    return GenerationRequest(
        RequestId("test"),
        TokenSequence(tuple(prompt)),
        max_tokens,
        SamplingParams(**sampling),
        frozenset(stop),
        grammar,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of ordinary tokens, another one for another seed."""
    return [300 + (position * 7919 + seed * 104729 + position * position * 31) % 600 for position in range(length)]


def collect(generation: Generation, *, poll_seconds: float = 30) -> Result:
    """Wait for a row to end."""
    tokens: list[int] = []
    progress: list[PrefillProgress] = []
    for batch in generation.batches(poll_seconds):
        assert batch, "the engine said nothing for too long"
        for event in batch:
            if isinstance(event, TokenDelta):
                tokens.append(event.token)
            elif isinstance(event, PrefillProgress):
                progress.append(event)
            else:
                return Result(tuple(tokens), event, tuple(progress))
    raise AssertionError("the row ended without a last event")


def generate(engine: Engine, *requests: GenerationRequest) -> list[Result]:
    """Submit all at once and wait for all."""
    return [collect(generation) for generation in [engine.submit(each) for each in requests]]
