"""A running stream while a cache full of states lets them leave: the longest gap between two of its tokens.

The real engine with its disk on a tiny hybrid. A thousand states are kept, and all are on disk; then they leave, a
few at a time as for the stops of rows, and the rest for a row that is admitted and needs all the memory.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.known_prefix import SETTINGS
from kvserve.core import (
    GenerationDone,
    GenerationRequest,
    MessageStart,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.demo.build import build_model
from kvserve.engine.engine_settings import DiskSettings, EngineSettings
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.worker import Engine

FAMILY = "qwen3_5"
NUM_STATES = 1000
MESSAGE_TOKENS = 16
NUM_MESSAGES = 10
TAIL_TOKENS = 4
ARRIVING_TOKENS = 4
"""The row that all leaves for is short, so that its own prefill is no part of a gap."""

NUM_SMALL = 40
STATES_OF_SMALL = 10
CALM_TOKENS = 100
TOKENS_BETWEEN = 5
START_SECONDS = 120
GAP_STEPS, GAP_SECONDS = 3, 0.020
"""How long a gap may be: so many of this stream's steps, and so long."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds of one stream: its usual step, and the longest without a token while states left."""

    step: float
    longest_calm: float
    longest: float
    num_states: int

    @property
    def ratio(self) -> float:
        """The longest gap in units of what is allowed."""
        return self.longest / (GAP_STEPS * self.step + GAP_SECONDS)


def run(num_rounds: int) -> list[Figure]:
    """The longest gap : the longest that is allowed."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folder = build_model(FAMILY, Path(scratch) / FAMILY, answer_tokens=None)
        rounds = [_round(folder, Path(scratch) / f"kv-{number}") for number in range(num_rounds)]
    absolute = (
        f"median step {1000 * median(each.step for each in rounds):.1f} ms, longest gap "
        f"{1000 * median(each.longest for each in rounds):.1f} ms, with no eviction "
        f"{1000 * median(each.longest_calm for each in rounds):.1f} ms, {rounds[-1].num_states:,} states left"
    )
    name = f"longest gap of a stream while states leave : {GAP_STEPS} steps + {1000 * GAP_SECONDS:.0f} ms"
    return [Figure("evicting", name, "", tuple(each.ratio for each in rounds), Bound("at most", 1), absolute)]


def _round(folder: Path, kv: Path) -> Gaps:
    """Fill the cache, wait for the disk, and let all of it leave beside a stream."""
    settings = EngineSettings(
        max_kv_size=131072,
        max_concurrent_requests=2,
        max_queued_requests=8,
        max_batch_bytes=None,
        prefill_step_size=2048,
        watchdog_seconds=0,
        stream_share=0.5,
        default_sampling=SamplingParams(),
        cache=replace(SETTINGS, ttl_seconds=0, owner_idle_seconds=0),
        disk=DiskSettings(kv, None, 0, 24.0),
    )
    engine = Engine(folder, settings, grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    try:
        engine.wait_until_ready(START_SECONDS)
        _fill(engine)
        return _stream(engine)
    finally:
        engine.stop(60)


def _fill(engine: Engine) -> None:
    """Keep the states, and wait until the disk has them."""
    number = 0
    while engine.cache_report().stats.num_checkpoints < NUM_STATES:
        for _ in engine.submit(_request(number, 1)).batches(START_SECONDS):
            pass
        number += 1
    until = time.monotonic() + START_SECONDS
    while not engine._ask(lambda scheduler: scheduler.cache._disk.tier.is_settled):  # type: ignore[union-attr]
        if time.monotonic() > until:
            raise BenchmarkError("the disk does not settle")
        time.sleep(0.1)


def _stream(engine: Engine) -> Gaps:
    """A long answer: undisturbed, then beside small evictions, then beside that of all that is left."""
    before = engine.cache_report().stats.num_evicted_checkpoints
    running = engine.submit(_request(10**6, 100_000))
    times: list[float] = []
    num_small, calm_until, num_left, is_last, arriving = 0, 0, 0, False, running
    for batch in running.batches(START_SECONDS):
        times += [time.perf_counter() for event in batch if isinstance(event, TokenDelta)]
        if len(times) < CALM_TOKENS or not isinstance(batch[-1], TokenDelta):
            continue
        calm_until = calm_until or len(times)
        if num_small < NUM_SMALL and len(times) >= calm_until + num_small * TOKENS_BETWEEN:
            engine._put(_let_some_leave)
            num_small += 1
        elif num_small == NUM_SMALL and not is_last and len(times) >= calm_until + (num_small + 1) * TOKENS_BETWEEN:
            engine._put(_need_all)
            arriving, is_last = engine.submit(_request(10**6 + 1, 1, ARRIVING_TOKENS)), True
        elif is_last and len(times) >= calm_until + (num_small + 20) * TOKENS_BETWEEN:
            num_left = engine.cache_report().stats.num_evicted_checkpoints - before
            running.cancel()
    if not isinstance([event for batch in arriving.batches(START_SECONDS) for event in batch][-1], GenerationDone):
        raise BenchmarkError("the row for which all leaves has failed")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if num_left < NUM_STATES:
        raise BenchmarkError(f"only {num_left} states left beside the stream")
    calm = gaps[CALM_TOKENS // 5 : calm_until]
    return Gaps(median(calm), max(calm), max(gaps[calm_until - 1 :]), num_left)


def _let_some_leave(scheduler: Scheduler) -> None:
    """As for a stop of a row, after another one has ended."""
    cache = scheduler.cache
    stats = cache.report().stats
    cache._tree._sweep.expect_change()
    state_bytes = stats.checkpoint_bytes / max(1, stats.num_checkpoints)
    cache.make_room(cache.kv_room.left().num_bytes + STATES_OF_SMALL * state_bytes)


def _need_all(scheduler: Scheduler) -> None:
    """The row that comes next needs all the memory, whatever it is; else it is as a client's."""
    num_bytes = scheduler.cache.kv_room.left().num_bytes + scheduler.cache.report().stats.ram_bytes
    admission: Any = scheduler._admission
    admission.missing_bytes = lambda _row, _behind: num_bytes


def _request(
    number: int, max_tokens: int, num_tokens: int = NUM_MESSAGES * MESSAGE_TOKENS + TAIL_TOKENS
) -> GenerationRequest:
    """A prompt of short messages: a state behind each of them."""
    ids = tuple(300 + (place * 7919 + number * 104729 + place * place * 31) % 600 for place in range(num_tokens))
    starts = tuple(
        MessageStart(at, is_user=not at // MESSAGE_TOKENS % 2) for at in range(0, num_tokens, MESSAGE_TOKENS)
    )
    return GenerationRequest(
        RequestId("evicting"),
        TokenSequence(ids),
        max_tokens,
        SamplingParams(),
        frozenset(),
        None,
        message_starts=starts,
    )
