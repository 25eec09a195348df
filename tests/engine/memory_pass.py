"""One pass of work on a model with 128 KiB of KV a token, in a process of its own, and the memory that it took.

    python -m tests.engine.memory_pass '{"work": "fits", "kv_bytes": 67108864, ...}'    prints one JSON object

What MLX and the kernel count is of a whole process, so each pass has one; the law about it is in `test_memory_law.py`.
"""

import gc
import json
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvserve.core import GenerationRequest
from kvserve.demo.families import ModelScale
from kvserve.engine import engine_start
from kvserve.engine import memory as memory_module
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.memory import Account, MemoryLedger
from kvserve.engine.model import CacheSupport
from kvserve.engine.worker import Engine
from tests.engine.engines import CACHE, engine_settings, generate, prompt_of, request
from tests.models import tiny_model

WIDE = ModelScale(hidden_size=64, num_layers=4, num_heads=32, num_kv_heads=32, head_dim=128)
TOKEN_BYTES = 2 * 4 * 32 * 128 * 4
"""KV of one token of a WIDE model: keys and values, layers, heads, width, float32."""

CHUNK_TOKENS = 64
"""What a chunk computes with is in no account: a layer of these models is wide, and 256 tokens take 50 MiB."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass does and may take: `kv_bytes` and `batch_bytes` are the two settings, `side_bytes` the queue of
    writes, and reading ahead. `forgets` is an account that the ledger does not count; `num_engines`: the work is done
    again by another model, which takes the place of the first."""

    work: str
    kv_bytes: int
    batch_bytes: int
    side_bytes: int = 16 * MIB
    disk: str = ""
    keeps: bool = True
    seed: int = 0
    forgets: str = ""
    num_engines: int = 1


@dataclass(slots=True)
class Seen:
    """What a pass took: `peak_bytes` of MLX beyond the weights, `host_bytes` of the ledger that are not MLX's,
    `both_bytes` the most that was seen of them at one moment, `process_bytes` beyond the idle process. `budget_bytes`
    is what KV and its ways to and from the disk may have, `total_budget_bytes` what all accounts may."""

    peak_bytes: int = 0
    host_bytes: int = 0
    both_bytes: int = 0
    process_bytes: int = 0
    budget_bytes: int = 0
    total_budget_bytes: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    told: list[str] = field(default_factory=list)


type Work = Callable[[Engine, "Pass"], list[Any]]


def rows_of(wanted: Pass, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[GenerationRequest]:
    """Requests of so many prompt and answer tokens each, every one with words of its own."""
    ttl_seconds = None if wanted.keeps else 0
    seeds = range(100 * wanted.seed + seed, 100 * wanted.seed + seed + len(sizes))
    return [
        replace(request(prompt_of(length, seed), max_tokens), ttl_seconds=ttl_seconds)
        for (length, max_tokens), seed in zip(sizes, seeds, strict=True)
    ]


def turns(engine: Engine, wanted: Pass, sizes: Sequence[tuple[int, int]], num_turns: int) -> list[Any]:
    """Conversations, all at once, each of which goes on with what was answered."""
    asked = rows_of(wanted, sizes)
    found = generate(engine, *asked)
    for turn in range(1, num_turns):
        asked = [
            replace(each, prompt=replace(each.prompt, ids=(*each.prompt.ids, *got.tokens, *prompt_of(5, 50 + turn))))
            for each, got in zip(asked, found, strict=True)
        ]
        found = generate(engine, *asked)
    return found


def most_tokens(num_bytes: int) -> int:
    """The longest row, prompt and answer, that is admitted alone: its cache has 256 places more, and of its four layers
    one and a half are there twice for a moment."""
    return int(num_bytes / (1 + 1.5 / WIDE.num_layers)) // TOKEN_BYTES - 256


def fits(engine: Engine, wanted: Pass) -> list[Any]:
    """A prompt and its answer that just fit, twice; the second time it goes on."""
    num_tokens = most_tokens(wanted.batch_bytes)
    return turns(engine, wanted, [(num_tokens - 24, 8)], 2)


def eight(engine: Engine, wanted: Pass) -> list[Any]:
    """Eight rows of different lengths at once, and again when all of them go on."""
    share = most_tokens(wanted.batch_bytes) // 16
    return turns(engine, wanted, [(share * number // 2 + 8, 12) for number in range(1, 9)], 2)


def long_answer(engine: Engine, wanted: Pass) -> list[Any]:
    """A short prompt whose answer fills the rest."""
    return turns(engine, wanted, [(32, most_tokens(wanted.batch_bytes) - 32)], 1)


def restores(engine: Engine, wanted: Pass) -> list[Any]:
    """More conversations than can be kept, in turns: each goes on from what RAM or the disk has."""
    share = most_tokens(wanted.batch_bytes) // 4
    asked = rows_of(wanted, [(share, 4)] * 6)
    found = []
    for _ in range(2):
        found = [generate(engine, each)[0] for each in asked]
    return found


def mixed(engine: Engine, wanted: Pass) -> list[Any]:
    """What the seed says."""
    rng = random.Random(wanted.seed)
    most = most_tokens(wanted.batch_bytes) // 2
    found: list[Any] = []
    for turn in range(3):
        sizes = [(rng.randint(8, most), rng.randint(1, 24)) for _ in range(rng.randint(1, 4))]
        found = turns(engine, replace(wanted, seed=wanted.seed + turn % 2), sizes, rng.randint(1, 2))
    return found


WORKS: Mapping[str, Work] = {
    "fits": fits,
    "eight": eight,
    "long_answer": long_answer,
    "restores": restores,
    "mixed": mixed,
}


def proc_bytes(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run(wanted: Pass) -> Seen:
    """Do the work on a fresh engine, and on another one after that. The trial of caches is no work: what comes of it
    with this family is known (`test_self_check.py`)."""
    seen = Seen()
    engine_start.check_caches = lambda _: CacheSupport(can_pad=True)  # type: ignore[assignment]
    if wanted.forgets:
        real = MemoryLedger.held

        def held(self: MemoryLedger, account: Account) -> int:
            return 0 if account == wanted.forgets else real(self, account)

        MemoryLedger.held = held  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(wanted.num_engines):
            _run_one(wanted, Path(folder), number, seen)
    return seen


def _run_one(wanted: Pass, folder: Path, number: int, seen: Seen) -> None:
    memory_module.WRITE_QUEUE_CAP = memory_module.READ_AHEAD_CAP = wanted.side_bytes
    disk = DiskSettings(folder, 2**34, 0, 24, is_ephemeral=wanted.disk == "ephemeral") if wanted.disk else None
    engine = Engine(
        tiny_model("qwen3", scale=WIDE, seed=number),
        engine_settings(
            cache=replace(CACHE, max_bytes=wanted.kv_bytes),
            max_batch_bytes=wanted.batch_bytes,
            disk=disk,
            prefill_step_size=CHUNK_TOKENS,
        ),
        grammar_tokenizer=lambda _: None,
        report=seen.told.append,
    )
    engine.start()
    try:
        engine.wait_until_ready(60)
        while disk is not None and engine._ask(lambda scheduler: scheduler.cache._disk) is None:
            threading.Event().wait(0.01)
        generate(engine, *rows_of(wanted, [(8, 2)], seed=99))
        engine.clear_cache()
        _begin(engine)
        with _host_bytes_read(engine, seen):
            found = WORKS[wanted.work](engine, wanted)
        if disk is not None:
            assert engine._ask(lambda scheduler: scheduler.cache._disk.tier.flush(60))  # type: ignore[union-attr]
        memory = engine._start.ledger
        assert memory is not None
        plan = memory.plan
        seen.budget_bytes = plan.pool_bytes + (plan.write_queue_bytes + plan.read_ahead_bytes if disk else 0)
        seen.total_budget_bytes = plan.total_bytes
        seen.peak_bytes = max(seen.peak_bytes, mx.get_peak_memory() - IDLE["mlx"])
        seen.process_bytes = max(seen.process_bytes, proc_bytes("VmHWM") - IDLE["process"])
        seen.num_cached_tokens += sum(each.end.num_cached_tokens for each in found if hasattr(each.end, "reason"))
        seen.num_failed += sum(not hasattr(each.end, "reason") for each in found)
    finally:
        engine.stop(60)
    del engine, found, memory
    gc.collect()  # as whoever swaps models does
    assert mx.get_active_memory() <= MIB, "something of the model is still there"


IDLE = {"mlx": 0, "process": 0}


def _begin(engine: Engine) -> None:
    """Nothing runs now; from here on the peaks are counted: the checks at a load are no work."""

    def note(_: object) -> None:
        mx.clear_cache()
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        mx.reset_peak_memory()
        IDLE.update(mlx=mx.get_active_memory(), process=proc_bytes("VmRSS"))

    engine._ask(note)


@contextmanager
def _host_bytes_read(engine: Engine, seen: Seen) -> Iterator[None]:
    """Look at the ledger all the time: what it counts that is no array."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            memory = engine._start.ledger
            num_bytes = memory.held("read_ahead") if memory is not None else 0
            seen.host_bytes = max(seen.host_bytes, num_bytes)
            seen.both_bytes = max(seen.both_bytes, num_bytes + mx.get_active_memory() - IDLE["mlx"])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    print(json.dumps(asdict(run(Pass(**json.loads(sys.argv[1]))))))
