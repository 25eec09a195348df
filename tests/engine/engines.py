"""What the engine's tests share: a running engine on a tiny model, requests, a collector of their events, and the
comparison with a cold server that the exactness matrix and its negative controls both rest on."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvserve.cache.disk_tier import DiskTier
from kvserve.core import (
    Awaiting,
    GenerationDone,
    GenerationFailed,
    GenerationRequest,
    Grammar,
    MessageStart,
    PrefillProgress,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.engine import turn_order
from kvserve.engine.cache_records import CacheSettings
from kvserve.engine.decode_group import Decoder
from kvserve.engine.engine_settings import EngineSettings
from kvserve.engine.fair_clock import StreamShare
from kvserve.engine.policy import Facts, Plan, plan
from kvserve.engine.prefill import ChunkLength
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.worker import Engine
from tests.laws import sampled
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
HYBRID = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})
"""Families with recurrent layers."""

WINDOWED = frozenset({"gemma3", "gemma4", "gpt_oss"})
"""Families with sliding windows."""

CUTTABLE = frozenset(FAMILIES) - HYBRID - WINDOWED
"""Families whose every layer can be cut at any token."""

KINDS = frozenset({"qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite"})
"""One family for each kind of caches: plain, recurrent, with windows, with windows and sinks, latent."""


def of_each_kind(families: Sequence[str]) -> list[Any]:
    """Parameters: the families of KINDS in every run, the others, whose caches are like theirs, in `make full`."""
    return sampled(families, KINDS)


MESSAGE_TOKENS = 48
TAIL_TOKENS = 4
NUM_ANSWER_TOKENS = 48
"""Long enough to show a fault in the text alone, which takes up to 46 tokens in the families of the default run
(`test_prefix_cache_controls.py`)."""

LOGIT_TOLERANCE = 1e-4
"""How far two ways to compute the same may be apart in a logit, where the chunks of the prefill differ; the logits of
the tiny models have a standard deviation of about 5."""


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
        "stream_share": 0.5,
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
    reading_pays: bool = True,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine that has loaded the tiny model of a family; stopped afterwards.

    `reading_pays`: what the disk has is read, however slow a busy machine's disk was found to be.
    """
    from tests.starts import remembered_starts  # here: it imports the whole server, which `memory_pass` does without

    engine = Engine(tiny_model(family), engine_settings(**settings), grammar_tokenizer=grammar_tokenizer, report=report)
    with pytest.MonkeyPatch.context() as patch:
        if reading_pays:
            patch.setattr(DiskTier, "read_rate", None)
        try:
            with remembered_starts():
                engine.start()
                engine.wait_until_ready(60)
            yield engine
        finally:
            engine.stop(60)


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


def collect(generation: RequestHandle, *, poll_seconds: float = 60) -> Result:
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
            elif not isinstance(event, Awaiting):
                return Result(tuple(tokens), event, tuple(progress))
    raise AssertionError("the row ended without a last event")


def live_extra_bytes(engine: Engine, num_tokens: int) -> int:
    """What a running row of so many tokens takes beyond its KV: places ahead, and what is there twice for a moment. As
    much as the rows themselves with models and prompts as small as these."""
    sizes = engine.wait_until_ready().sizes
    live_bytes = sizes.peak(num_tokens)
    return int(live_bytes + sizes.copied(live_bytes) - sizes.held(num_tokens))


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """An engine that stands still between two steps: what is given to it meanwhile comes at once, and what a test looks
    at does not go on, however long the test's own thread slept. It cannot be asked for anything."""
    goes_on = threading.Event()
    engine._inbox.put(lambda _: bool(goes_on.wait(60)))
    try:
        yield
    finally:
        goes_on.set()


def let_prompts_take_no_time(patch: pytest.MonkeyPatch) -> None:
    """Rows that come together decode together, and one that decodes is there still when a prompt behind it is computed,
    however slow the chunks of a busy machine are. Streams are owed nothing for a prompt: not behind it, and not before
    its last chunk either; no prompt is too long for others to wait for it."""
    patch.setattr(StreamShare, "prefilled", lambda *_, **__: None)
    patch.setattr(ChunkLength, "slowest_tokens_per_second", 1e9)


def let_watchdog_end(patch: pytest.MonkeyPatch, is_meant: Callable[[Row], bool]) -> None:
    """Rows that are meant have decoded for too long from now on, whatever the limit is."""

    def planned(facts: Facts[Row]) -> Plan[Row]:
        lives = tuple(replace(life, decoding_seconds=math.inf) if is_meant(life.row) else life for life in facts.lives)
        return plan(replace(facts, lives=lives, watchdog_seconds=facts.watchdog_seconds or 1e9))

    patch.setattr(turn_order, "plan", planned)


def generate(engine: Engine, *requests: GenerationRequest) -> list[Result]:
    """Submit all at once and wait for all."""
    with held(engine):
        generations = [engine.submit(each) for each in requests]
    return [collect(generation) for generation in generations]


def beside_stream[T](engine: Engine, prompt: Sequence[int], num_tokens: int, act: Callable[[], T]) -> tuple[T, Result]:
    """Call `act` while a greedy row of this prompt streams, which it does until `act` has returned and so many tokens
    are written; returns what came of both."""
    running, tokens, found, end = engine.submit(request(prompt, 100_000)), list[int](), list[T](), None
    for batch in running.batches(60):
        assert batch, "the engine said nothing for too long"
        tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
        end = batch[-1]
        if tokens and not found:
            found.append(act())
        if len(tokens) >= num_tokens:
            running.cancel()
    assert isinstance(end, GenerationDone) and end.reason == "cancelled", f"the stream did not last: {end}"
    return found[0], Result(tuple(tokens[:num_tokens]), end, ())


@contextmanager
def without_idle_work(engine: Engine) -> Iterator[None]:
    """An engine that leaves its idle work undone, so that a test sees what there was before it however long its own
    thread slept between two requests."""
    engine._ask(lambda scheduler: setattr(scheduler, "do_idle_work", lambda: False))
    try:
        yield
    finally:
        engine._ask(lambda scheduler: delattr(scheduler, "do_idle_work"))


def do_all_idle_work(engine: Engine) -> None:
    """Let the engine do what no request waits for, to its end."""
    while engine._ask(lambda scheduler: scheduler.do_idle_work()):
        pass


# --- the comparison of the exactness matrix -----------------------------------------------------------------------


def turn(tokens: Sequence[int], max_tokens: int = NUM_ANSWER_TOKENS) -> GenerationRequest:
    """A greedy request whose messages are 48 tokens long, user and assistant in turns, before a tail of 4 tokens."""
    offsets = [*range(0, len(tokens) - TAIL_TOKENS, MESSAGE_TOKENS), len(tokens) - TAIL_TOKENS]
    starts = tuple(MessageStart(offset, is_user=index % 2 == 1) for index, offset in enumerate(offsets))
    return replace(request(tokens, max_tokens), message_starts=starts)


def cold(engine: Engine, tokens: Sequence[int], max_tokens: int = NUM_ANSWER_TOKENS) -> tuple[int, ...]:
    """The greedy answer of a server that has never seen anything."""
    engine.clear_cache()
    answer = generate(engine, turn(tokens, max_tokens))[0]
    assert cached(answer) == 0
    engine.clear_cache()
    return answer.tokens


def cached(result: Result) -> int:
    """How many of a row's prompt tokens were found. A row that failed is no result."""
    assert isinstance(result.end, GenerationDone), result.end
    return result.end.num_cached_tokens


def assert_exact(warm: Result, expected: Sequence[int]) -> None:
    """The row ended as it should and wrote, token for token, what a cold server writes."""
    assert isinstance(warm.end, GenerationDone), warm.end
    assert warm.tokens == tuple(expected)


def assert_close(warm: np.ndarray, expected: np.ndarray, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Two rows of the same tokens had the same logits at every step, within the tolerance; 0: bit for bit."""
    assert warm.shape == expected.shape
    assert np.abs(warm - expected).max() <= tolerance


def generate_with_logits(engine: Engine, wanted: GenerationRequest) -> tuple[Result, np.ndarray]:
    """A row alone, and the logits that each of its tokens was drawn from: (tokens, vocabulary), float32."""
    [found] = generate_each_with_logits(engine, wanted)
    return found


def cold_with_logits(
    engine: Engine, tokens: Sequence[int], max_tokens: int = NUM_ANSWER_TOKENS
) -> tuple[Result, np.ndarray]:
    """A greedy answer of a server that has never seen anything, and its logits."""
    engine.clear_cache()
    result, logits = generate_with_logits(engine, turn(tokens, max_tokens))
    assert cached(result) == 0
    engine.clear_cache()
    return result, logits


def generate_each_with_logits(engine: Engine, *requests: GenerationRequest) -> list[tuple[Result, np.ndarray]]:
    """The same of several rows that come at once."""
    steps: dict[RequestHandle, list[np.ndarray]] = {}
    real = Decoder.of

    def listening(row: Row, vocab_size: int) -> Decoder:
        own = steps.setdefault(row.handle, [])

        def listen(_tokens: mx.array, logits: mx.array) -> mx.array:
            own.append(np.array(logits[0]))
            return logits

        decoder = real(row, vocab_size)
        return replace(decoder, processors=[*decoder.processors, listen])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "of", listening)
        with held(engine):
            generations = [engine.submit(each) for each in requests]
        results = [collect(generation) for generation in generations]
    # The generator is one step ahead of what it delivers.
    heard = [
        steps.get(generation, [])[: len(each.tokens)] for generation, each in zip(generations, results, strict=True)
    ]
    return [(result, np.stack(own) if own else np.empty((0, 0))) for result, own in zip(results, heard, strict=True)]
