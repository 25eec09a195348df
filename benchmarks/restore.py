"""A conversation of 500 turns is restored from many small pieces of KV, unless idle work has put them together.

The real cache on a model without weights: what is measured is finding the pieces and copying them into a live cache.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.known_prefix import SETTINGS
from benchmarks.rig import rounds
from benchmarks.weightless import weightless_model
from kvserve.core import GenerationRequest, RequestId, SamplingParams, TokenSequence
from kvserve.demo.build import build_model
from kvserve.engine.memory import fixed_memory
from kvserve.engine.model import LoadedModel
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row

NUM_TURNS = 500
TURN_TOKENS = 64
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 32, 2, 16
"""Many arrays with short rows: what a piece costs is told per array, so it weighs most here."""

MAX_BYTES = 2**32


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation in a cache of its own."""

    cache: PrefixCache
    prompt: TokenSequence

    @property
    def num_segments(self) -> int:
        return self.cache.report().stats.num_segments

    def restore_seconds(self) -> float:
        """From the prompt to live caches that hold it. Raises BenchmarkError if anything of it is missing."""
        row = _row(self.prompt)
        started = time.perf_counter()
        cache_lease, _, num_restored = self.cache.enter(row)
        seconds = time.perf_counter() - started
        self.cache.leave(cache_lease)
        if num_restored != len(self.prompt) - 1:
            raise BenchmarkError(f"{num_restored} of {len(self.prompt)} tokens were restored")
        return seconds


def run(num_rounds: int) -> list[Figure]:
    """With idle work after every turn, which has a bound, and without any, against one segment that has it all; then
    with a state behind every turn."""
    return [*_figures(num_rounds, num_states=0), *_figures(num_rounds, num_states=1)]


def _figures(num_rounds: int, num_states: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        model = weightless_model(
            build_model("qwen3", Path(scratch) / "model"),
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            num_states=num_states,
        )
    whole = _kept(model, num_turns=1, has_idle_time=False)
    busy = _kept(model, num_turns=NUM_TURNS, has_idle_time=False)
    idle = _kept(model, num_turns=NUM_TURNS, has_idle_time=True)
    one, many, joined = rounds(num_rounds, whole.restore_seconds, busy.restore_seconds, idle.restore_seconds)
    name = f"restoring {NUM_TURNS} turns of {TURN_TOKENS} tokens{', a state behind each' if num_states else ''}"
    return [
        _figure(f"{name}, idle work between them : one segment", joined, one, idle, Bound("at most", 1.3)),
        _figure(f"{name}, never idle : one segment", many, one, busy, None),
    ]


def _figure(name: str, seconds: list[float], one: list[float], kept: Kept, bound: Bound | None) -> Figure:
    absolute = f"{1000 * median(seconds):.1f} : {1000 * median(one):.1f} ms, {kept.num_segments} segments"
    return Figure("restore", name, "", tuple(a / b for a, b in zip(seconds, one, strict=True)), bound, absolute)


def _kept(model: LoadedModel, *, num_turns: int, has_idle_time: bool) -> Kept:
    """All tokens as the KV of so many turns."""
    num_tokens = NUM_TURNS * TURN_TOKENS
    prompt = TokenSequence(tuple(token % 1000 for token in range(num_tokens + 1)))
    cache = PrefixCache(model, SETTINGS, fixed_memory(MAX_BYTES), "benchmark")
    cache_lease, live, _ = cache.enter(_row(prompt))
    model.module(mx.zeros((1, num_tokens), mx.int32), cache=live)
    for turn in range(1, num_turns + 1):
        cache.finish(cache_lease, live, prompt.ids[: num_tokens * turn // num_turns])
        while has_idle_time and cache.coalesce():
            pass
    cache.leave(cache_lease)
    return Kept(cache, prompt)


def _row(prompt: TokenSequence) -> Row:
    request = GenerationRequest(RequestId("restore"), prompt, 1, SamplingParams(), frozenset())
    return Row(RequestHandle(request), lambda: None)
