"""How often a turn moves its KV: bytes that are copied per stage of a warm turn, as multiples of the row's own KV.

The real scheduler and cache on a model without weights. Whatever copies KV writes it into fresh memory, so fresh memory
is what is counted: pages that were touched for the first time, with MLX's cache of free buffers switched off. It misses
no copy, wherever it is made: a gather, a pad, an item assignment that could not be done in place. Linux only, on a CPU;
elsewhere nothing is counted.
"""

import ctypes
import platform
import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.known_prefix import SETTINGS
from benchmarks.weightless import weightless_model
from kvserve.core import GenerationRequest, RequestId, SamplingParams, TokenSequence
from kvserve.demo.build import build_model
from kvserve.engine.admission import Budget
from kvserve.engine.memory import fixed_memory
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.warming import WarmSettings

HISTORY_TOKENS = 100_000
NEW_TOKENS = 200
ANSWER_TOKENS = 600
LONG_ANSWER_TOKENS = 4000
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 4, 2, 16
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 2**17
"""What glibc must take from the system and give back to it: less than any array of a layer."""

MAX_PASSES = 3.0

STAGES = {
    "cache.enter": "restore",
    "cache.keep": "keep the prompt",
    "cache.extend": "keep the answer",
    "cache.finish": "keep the answer",
    "cache.make_room": "evict",
    "prefills.step": "prefill",
    "pool.step": "decode",
    "pool.step_all": "decode",
    "pool.enter": "decode",
}
"""Whose fresh memory counts where: methods of the scheduler's parts."""


@dataclass(slots=True)
class Copied:
    """Bytes of fresh memory by stage."""

    stages: Counter[str] = field(default_factory=Counter)
    stage: str = "other"
    last_bytes: int = 0

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """What is written meanwhile belongs to this stage, but for stages inside it."""
        self.note()
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.note()
            self.stage = before

    def note(self) -> None:
        mx.synchronize()
        num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
        self.stages[self.stage] += num_bytes - self.last_bytes
        self.last_bytes = num_bytes

    def take(self) -> Counter[str]:
        """What was counted since the last call."""
        self.note()
        stages, self.stages = self.stages, Counter()
        return stages


class Conversation:
    """A conversation of 100k tokens that an engine without a model has served, and turns behind it."""

    def __init__(self, model: LoadedModel) -> None:
        self.copied = Copied()
        self._numbers = count(1)
        self._cache = PrefixCache(model, SETTINGS, fixed_memory(2**40), "benchmark")
        self._scheduler = Scheduler(
            model,
            Budget(8, 2**40, model.sizes),
            self._cache,
            prefill_step_size=2048,
            watchdog_seconds=0,
            stream_share=0.5,
            report=_fail,
            warming=WarmSettings(),
        )
        self.history = [number % 7 + 1 for number in range(HISTORY_TOKENS)]
        self._serve(self._row(self.history, 1))
        for part, name in (
            (self._cache, "cache"),
            (self._scheduler._prefills, "prefills"),
            (self._scheduler._pool, "pool"),
        ):
            self._watch(part, name)

    def cold(self) -> Counter[str]:
        """A prompt of that length of which nothing is known."""
        return self._counted([next(self._numbers) + 10, *self.history[1:]], 1)

    def turn(self, num_answer_tokens: int) -> Counter[str]:
        """A turn of new tokens behind all that is known, and its answer; nobody else computes."""
        return self._counted(self._prompt(), num_answer_tokens)

    def turn_beside(self, num_answer_tokens: int) -> Counter[str]:
        """The same while another row of that length decodes, which goes on behind its end: one batch."""
        beside = self._row(self._prompt(), 10 * num_answer_tokens)
        self._scheduler.add(beside)
        while not beside.generated:
            self._scheduler.tick()
        stages = self._counted(self._prompt(), num_answer_tokens)
        beside.handle.cancel()
        self._run()
        return stages

    def _prompt(self) -> list[int]:
        return [*self.history, next(self._numbers) + 10, *(1 for _ in range(NEW_TOKENS - 1))]

    def _counted(self, prompt: list[int], num_answer_tokens: int) -> Counter[str]:
        row = self._row(prompt, num_answer_tokens)
        self.copied.take()
        self._serve(row)
        return self.copied.take()

    def _row(self, prompt: list[int], num_answer_tokens: int) -> Row:
        request = GenerationRequest(
            RequestId("passes"), TokenSequence(tuple(prompt)), num_answer_tokens, SamplingParams(), frozenset()
        )
        return Row(RequestHandle(request), lambda: None)

    def _serve(self, row: Row) -> None:
        self._scheduler.add(row)
        while not row.is_over:
            self._scheduler.tick()

    def _run(self) -> None:
        while not self._scheduler.is_idle:
            self._scheduler.tick()

    def _watch(self, part: Any, name: str) -> None:
        for watched, stage in STAGES.items():
            owner, _, method = watched.partition(".")
            if owner == name:
                setattr(part, method, self._counting(getattr(part, method), stage))

    def _counting(self, call: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            with self.copied.during(stage):
                return call(*args, **options)

        return counted


def run(num_rounds: int) -> list[Figure]:
    """Passes over the row's KV: a turn alone, with a long answer, beside a row that goes on, and a cold prompt."""
    if platform.system() != "Linux" or mx.default_device().type != mx.DeviceType.cpu:
        return []
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        model = weightless_model(
            build_model("qwen3", Path(scratch) / "model"), num_layers=NUM_LAYERS, num_heads=NUM_HEADS, head_dim=HEAD_DIM
        )
    limit = mx.set_cache_limit(0)
    try:
        conversation = Conversation(model)
        found = [
            _figure(name, [measure() for _ in range(num_rounds)], model.sizes.per_token * HISTORY_TOKENS, bound)
            for name, measure, bound in (
                (f"a warm turn, {ANSWER_TOKENS} tokens of answer", lambda: conversation.turn(ANSWER_TOKENS), True),
                (f"the same, {LONG_ANSWER_TOKENS} tokens", lambda: conversation.turn(LONG_ANSWER_TOKENS), True),
                (
                    "a warm turn that joins a row of that length and leaves it",
                    lambda: conversation.turn_beside(ANSWER_TOKENS),
                    False,
                ),
                ("a cold prompt", conversation.cold, False),
            )
        ]
    finally:
        mx.set_cache_limit(limit)
    return found


def _figure(name: str, counted: list[Counter[str]], row_bytes: float, is_bound: bool) -> Figure:
    told = ", ".join(f"{stage} {num_bytes / row_bytes:.2f}" for stage, num_bytes in sorted(counted[-1].items()))
    passes = tuple(each.total() / row_bytes for each in counted)
    bound = Bound("at most", MAX_PASSES) if is_bound else None
    return Figure("kv_passes", f"passes over {HISTORY_TOKENS:,} tokens of KV: {name}", "", passes, bound, told)


def _fail(line: str) -> None:
    raise BenchmarkError(line)
