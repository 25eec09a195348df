"""KV from disk: how long 8k tokens take to come back beside computing them, the first token after a restart, and what
writing behind costs a running stream.

The engine itself, without HTTP, so that the ratio is that of reading to computing and nothing else. The rows of the
tiny models are small: what counts is bytes per second, which is shown.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.known_prefix import SETTINGS
from kvserve.core import (
    GenerationDone,
    GenerationFailed,
    GenerationRequest,
    MessageStart,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.demo.build import build_model
from kvserve.engine.disk_cache import DiskReport
from kvserve.engine.engine_settings import DiskSettings, EngineSettings
from kvserve.engine.worker import Engine

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite")
LONG_TOKENS = 8192
SHORT_TOKENS = 2048
MESSAGE_TOKENS = 512
TAIL_TOKENS = 4
START_SECONDS = 120
STREAM_TOKENS = 600
NUM_BLOCKS = 10
ROOM_BYTES = 2**32


def run(num_rounds: int) -> list[Figure]:
    """Restoring against prefilling, per family the first token after a restart, and paired blocks of a stream."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folders = {family: build_model(family, Path(scratch) / family, answer_tokens=None) for family in FAMILIES}
        figures = [_restore(folders["qwen3"], Path(scratch) / "kv-long", num_rounds)]
        for family, folder in folders.items():
            figures.append(_restart(family, folder, Path(scratch) / f"kv-{family}", num_rounds))
        figures.append(_write_behind(folders["qwen3"], Path(scratch) / "kv-stream"))
        figures.append(_ephemeral(folders["qwen3"], Path(scratch)))
    return figures


def _restore(folder: Path, kv: Path, num_rounds: int) -> Figure:
    """The same prompt computed by an engine that knows nothing, and read by one that starts after it."""
    ratios, seconds, reports = [], [], []
    for number in range(num_rounds):
        prompt = _prompt(LONG_TOKENS, number)
        with running_engine(folder, kv) as engine:
            cold, _ = _first_token(engine, prompt)
        with running_engine(folder, kv) as engine:
            warm, num_cached = _first_token(engine, prompt)
            reports.append(_disk(engine))
        if num_cached != LONG_TOKENS - 1:
            raise BenchmarkError(f"{num_cached} of {LONG_TOKENS} tokens were restored")
        ratios.append(warm / cold)
        seconds.append((cold, warm))
    rate = median(report.stats.read_bytes_per_second or 0.0 for report in reports)
    absolute = (
        f"{1000 * median(warm for _, warm in seconds):.0f} : {1000 * median(cold for cold, _ in seconds):.0f} ms, "
        f"{reports[-1].stats.num_read_bytes / 1e6:.1f} MB at {rate / 1e6:.0f} MB/s, checksums included"
    )
    name = f"first token of {LONG_TOKENS} tokens from disk : prefilled"
    return Figure("disk", name, "", tuple(ratios), Bound("at most", 0.1), absolute)


def _restart(family: str, folder: Path, kv: Path, num_rounds: int) -> Figure:
    """Time to the first token of a known prompt after a restart, against the cold one."""
    ratios, absolute = [], ""
    for number in range(num_rounds):
        prompt = _prompt(SHORT_TOKENS, number)
        with running_engine(folder, kv) as engine:
            cold, _ = _first_token(engine, prompt)
        with running_engine(folder, kv) as engine:
            warm, num_cached = _first_token(engine, prompt)
        ratios.append(warm / cold)
        absolute = f"{1000 * warm:.0f} : {1000 * cold:.0f} ms, {num_cached} of {SHORT_TOKENS} tokens reused"
    return Figure("disk", f"first token after a restart : cold, {family}", "", tuple(ratios), None, absolute)


def _write_behind(folder: Path, kv: Path) -> Figure:
    """Seconds of a stream with a disk and without, in turns; other rows are prefilled beside it, so that there is
    something to write. The 90 % bound is that of the paired ratios."""
    ratios: list[float] = []
    with running_engine(folder, kv) as with_disk, running_engine(folder, None) as without:
        for number in range(-1, NUM_BLOCKS):
            pair = [(engine, _stream_seconds(engine, number)) for engine in _turn([with_disk, without], number)]
            if number >= 0:
                seconds = dict(pair)
                ratios.append(seconds[with_disk] / seconds[without])
        written = _disk(with_disk).stats.num_written_bytes
    bound = quantiles(ratios, n=20)[-1]
    absolute = (
        f"90 % of the pairs within {quantiles(ratios, n=20)[0]:.3f} to {bound:.3f}, {written / 1e6:.0f} MB written"
    )
    return Figure(
        "disk", "a stream while KV is written : without a disk", "", tuple(ratios), Bound("at most", 1.05), absolute
    )


def _ephemeral(folder: Path, scratch: Path) -> Figure:
    """What four conversations leave in RAM once they are over: with a scratch file, against RAM alone."""
    kept = [_left_in_ram(folder, None), _left_in_ram(folder, scratch / "kv-scratch")]
    absolute = (
        f"{kept[1] / 2**20:.1f} : {kept[0] / 2**20:.1f} MiB of MLX memory after four prompts of {LONG_TOKENS} tokens"
    )
    name = "RAM after four conversations, --ephemeral-cache : --no-disk-cache"
    return Figure("disk", name, "", (kept[1] / kept[0],), Bound("at most", 0.18), absolute)


def _left_in_ram(folder: Path, scratch: Path | None) -> int:
    with running_engine(folder, scratch, is_ephemeral=True) as engine:
        before = engine.status.active_memory_bytes
        for number in range(4):
            _first_token(engine, _prompt(LONG_TOKENS, 3000 + number))
        deadline = time.monotonic() + START_SECONDS
        while scratch is not None and engine.cache_report().stats.ram_bytes and time.monotonic() < deadline:
            time.sleep(0.05)
        return engine.status.active_memory_bytes - before


def _turn[T](items: list[T], number: int) -> list[T]:
    return items[:: -1 if number % 2 else 1]


def _stream_seconds(engine: Engine, number: int) -> float:
    """A long answer, and a prompt of 2k tokens that comes while it runs."""
    started = time.perf_counter()
    running = engine.submit(_request(_prompt(256, 1000 + number), STREAM_TOKENS))
    beside = engine.submit(_request(_prompt(SHORT_TOKENS, 2000 + number), 2))
    for generation in (running, beside):
        for batch in generation.batches(START_SECONDS):
            _check(batch)
    return time.perf_counter() - started


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from the request to its first token, and how many tokens of it were found."""
    started, first = time.perf_counter(), 0.0
    generation = engine.submit(_request(prompt, 2))
    num_cached = 0
    for batch in generation.batches(START_SECONDS):
        _check(batch)
        for event in batch:
            if isinstance(event, TokenDelta):
                first = first or time.perf_counter() - started
            elif isinstance(event, GenerationDone):
                num_cached = event.num_cached_tokens
    return first, num_cached


def _check(batch: list[object]) -> None:
    for event in batch:
        if isinstance(event, GenerationFailed):
            raise BenchmarkError(str(event.error))


def _request(prompt: list[int], max_tokens: int) -> GenerationRequest:
    offsets = [*range(0, len(prompt) - TAIL_TOKENS, MESSAGE_TOKENS), len(prompt) - TAIL_TOKENS]
    starts = tuple(MessageStart(offset, is_user=number % 2 == 1) for number, offset in enumerate(offsets))
    sequence = TokenSequence(tuple(prompt))
    request = GenerationRequest(RequestId("bench"), sequence, max_tokens, SamplingParams(), frozenset())
    return replace(request, message_starts=starts)


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return [300 + (place * 7919 + seed * 104729 + place * place * 31) % 600 for place in range(num_tokens)]


def _disk(engine: Engine) -> DiskReport:
    report = engine.cache_report().disk
    if report is None:
        raise BenchmarkError("the disk cannot be used")
    return report


@contextlib.contextmanager
def running_engine(
    folder: Path, kv: Path | None, *, is_ephemeral: bool = False, start_seconds: float = START_SECONDS
) -> Iterator[Engine]:
    """A running engine, with KV on disk below `kv`; at its end all of it is written."""
    disk = DiskSettings(kv, None, 0, 24.0, is_ephemeral=is_ephemeral) if kv is not None else None
    settings = EngineSettings(
        max_kv_size=131072,
        max_concurrent_requests=8,
        max_queued_requests=64,
        max_batch_bytes=None,
        prefill_step_size=2048,
        watchdog_seconds=0,
        stream_share=0.5,
        default_sampling=SamplingParams(),
        cache=replace(SETTINGS, max_bytes=ROOM_BYTES),
        disk=disk,
    )
    engine = Engine(folder, settings, grammar_tokenizer=lambda _: None, report=lambda _: None)
    engine.start()
    try:
        engine.wait_until_ready(start_seconds)
        yield engine
    finally:
        engine.stop(START_SECONDS)
