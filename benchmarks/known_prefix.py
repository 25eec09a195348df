"""What the cache itself costs a warm request: finding, naming, keeping and accounting 100k known tokens, no model.

The real scheduler, cache and message markers serve a conversation that has grown over hundreds of turns, on a model
without layers: no KV is copied (`warm_turn` and `restore` measure that). The measure is the tokenizer, whose work on
the same prompt any server does.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.rig import rounds
from benchmarks.weightless import weightless_model
from kvserve.core import GenerationRequest, MessageStart, RequestId, SamplingParams, TokenSequence
from kvserve.demo.build import build_model
from kvserve.engine.admission import Budget
from kvserve.engine.memory import fixed_memory
from kvserve.engine.prefix_cache import CacheSettings, PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.warming import WarmSettings
from kvserve.prompt.boundaries import MessageMarkers, learn_markers
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer

PROMPT_TOKENS = 100_000
SYSTEM_TOKENS = 8_000
NUM_MESSAGES = 338
NEW_TOKENS = 200
SETTINGS = CacheSettings(
    max_bytes=2**30,
    block_size=16,
    use_index=True,
    max_entries=24,
    max_entries_per_owner=2,
    ttl_seconds=1800,
    owner_idle_seconds=1800,
)
SOURCES = Path(__file__).resolve().parent.parent


class Timed:
    """A cache that counts the seconds that its methods take."""

    def __init__(self, cache: PrefixCache) -> None:
        self.seconds = 0.0
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, name)
        if not callable(method):
            return method

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one request: in the cache and the message markers, and in the whole engine with them."""

    cache: float
    engine: float


class Known:
    """A conversation that an engine without a model has served turn by turn."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.markers: MessageMarkers = learn_markers(self.tokenizer, ChatTemplate(self.tokenizer))
        self.text = _text(self.tokenizer, PROMPT_TOKENS)
        self.ids = self.tokenizer.encode(self.text)
        self.offsets = _message_offsets(len(self.ids))
        self._numbers = count(1)
        model = weightless_model(folder, num_layers=0)
        self._cache: Any = Timed(PrefixCache(model, SETTINGS, fixed_memory(2**30), "benchmark"))
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
        for end in self.offsets[2:]:
            self._serve(self.ids[:end])
            while self._scheduler.do_idle_work():
                pass

    def tokenise_seconds(self) -> float:
        """Text to ids."""
        started = time.perf_counter()
        self.tokenizer.encode(self.text)
        return time.perf_counter() - started

    def serve(self) -> Cost:
        """A turn of 200 new tokens behind all that is known, from its ids to the idle engine."""
        new = [next(self._numbers) % 8 for _ in range(NEW_TOKENS)]
        new[0] = next(self._numbers) % len(self.ids)  # another branch each time
        ids = (*self.ids[:-NEW_TOKENS], *new)
        self._cache.seconds = 0.0
        started = time.perf_counter()
        self.markers.message_starts(ids)
        marked = time.perf_counter()
        num_cached = self._serve(ids)
        ended = time.perf_counter()
        if num_cached < len(self.ids) - NEW_TOKENS:
            raise BenchmarkError(f"only {num_cached} of {len(self.ids)} tokens were known")
        return Cost(marked - started + self._cache.seconds, ended - started)

    def _serve(self, ids: Sequence[int]) -> int:
        """One request for one token; returns how many of its tokens were known."""
        starts = tuple(MessageStart(at, number % 2 == 1) for number, at in enumerate(self.offsets) if at < len(ids))
        request = GenerationRequest(
            RequestId("known"), TokenSequence(tuple(ids)), 1, SamplingParams(), frozenset(), message_starts=starts
        )
        row = Row(RequestHandle(request), lambda: None)
        self._scheduler.add(row)
        while not self._scheduler.is_idle:
            self._scheduler.tick()
        return row.num_cached_tokens


def run(num_rounds: int) -> list[Figure]:
    """The cache's part as a share of tokenising, which has a bound, and all that the engine does besides the model."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        known = Known(build_model("qwen3", Path(scratch) / "model"))
        costs, tokenising = rounds(num_rounds, known.serve, known.tokenise_seconds)
    whole = f"{len(known.ids):,} known tokens : tokenising them"
    cache, engine = [cost.cache for cost in costs], [cost.engine for cost in costs]
    return [
        _figure(f"lookup, names and bookkeeping of {whole}", cache, tokenising, Bound("at most", 0.1)),
        _figure(f"all of the engine's own work on {whole}", engine, tokenising, None),
    ]


def _figure(name: str, own: list[float], tokenising: list[float], bound: Bound | None) -> Figure:
    return Figure(
        "known_prefix",
        name,
        "",
        tuple(a / b for a, b in zip(own, tokenising, strict=True)),
        bound,
        f"{1000 * median(own):.1f} : {1000 * median(tokenising):.1f} ms",
    )


def _text(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Program text, as agents send it: the sources of this project, over again if they are too short."""
    text = "".join(file.read_text("utf-8") for file in sorted(SOURCES.glob("kvserve/**/*.py")))
    num_found = len(tokenizer.encode(text))
    text *= -(-num_tokens // num_found)
    return text[: len(text) * num_tokens // (num_found * -(-num_tokens // num_found))]


def _message_offsets(num_tokens: int) -> list[int]:
    """Where the messages begin: the system prompt, then messages of equal length."""
    length = (num_tokens - SYSTEM_TOKENS) // (NUM_MESSAGES - 1)
    return [0, *(SYSTEM_TOKENS + length * number for number in range(NUM_MESSAGES - 1)), num_tokens]


def _fail(line: str) -> None:
    raise BenchmarkError(line)
