"""Nothing that was computed is lost: what leaves RAM is on disk already, and what RAM has at the end is there too, also
where the disk is slower than the model."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.cache import tree
from kvserve.cache.disk_blob import BlobName, unpack_blob
from kvserve.cache.disk_records import Entry
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_worker import DiskWorker
from kvserve.core import TokenSequence
from kvserve.engine import disk_cache, disk_writing, memory, pinned
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CACHE,
    CUTTABLE,
    TAIL_TOKENS,
    assert_exact,
    cached,
    collect,
    generate,
    prompt_of,
    running_engine,
    turn,
)
from tests.engine.test_disk_cache import WAIT_SECONDS, disk_cache_of, disk_of, on, settle, wait_until
from tests.engine.test_disk_cache import usable as usable_of
from tests.laws import sampled

FAMILIES = ("qwen3", "qwen3_5")
PROMPTS = [prompt_of(300, seed) for seed in range(6)]
NUM_RAM_BYTES = 2**19


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that is slower than any machine computes: it takes its time over every blob until somebody was refused
    another one meanwhile, or waits for it."""
    changed = threading.Condition()
    num_refused = num_waiting = 0
    write, can_take, await_written, order, wait = (
        FolderStore.write,
        DiskTier.can_take,
        DiskTier.await_written,
        DiskTier._order,
        DiskTier.wait,
    )

    @contextmanager
    def waiting() -> Iterator[None]:
        nonlocal num_waiting
        with changed:
            num_waiting += 1
            changed.notify_all()
        yield
        with changed:
            num_waiting -= 1

    def asked(tier: DiskTier, num_bytes: int, until: float = 0.0) -> bool:
        nonlocal num_refused
        with waiting() if until > time.monotonic() else nullcontext():
            is_taken = can_take(tier, num_bytes, until)
        with changed:
            num_refused += not is_taken
            changed.notify_all()
        return is_taken

    def awaited(tier: DiskTier, entries: Sequence[Entry], until: float) -> bool:
        with waiting():
            return await_written(tier, entries, until)

    def ordered(tier: DiskTier, what: Callable[[], object], timeout_seconds: float) -> bool:
        with waiting():
            return order(tier, what, timeout_seconds)

    def waited(tier: DiskTier, seconds: float) -> None:
        with waiting():
            wait(tier, seconds)

    def slow(self: FolderStore, name: BlobName, parts: Sequence[bytes]) -> int:
        with changed:
            before = num_refused
            assert changed.wait_for(lambda: num_waiting or num_refused > before, WAIT_SECONDS)
        return write(self, name, parts)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "write", slow)
        patch.setattr(DiskTier, "can_take", asked)
        patch.setattr(DiskTier, "await_written", awaited)
        patch.setattr(DiskTier, "_order", ordered)
        patch.setattr(DiskTier, "wait", waited)
        yield


def kept(engine: Engine, tokens: Sequence[int]) -> tuple[int, int]:
    """How much of these tokens RAM has, and how much RAM or the disk."""
    return engine.kept_tokens(TokenSequence(tuple(tokens)))


def usable(family: str) -> int:
    return usable_of(len(PROMPTS[0]), family)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
def test_what_leaves_ram_is_on_disk_already(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM for two conversations and a queue that takes one blob at a time: six prompts without a pause between them are
    all to be found, and the budget holds."""
    for name in ("LEAVE_SECONDS", "MAX_WAITS_SECONDS"):  # a busy machine's disk is not waited for in vain
        monkeypatch.setattr(disk_writing, name, WAIT_SECONDS)
    monkeypatch.setattr(memory, "WRITE_QUEUE_CAP", 1)
    small = replace(CACHE, max_bytes=NUM_RAM_BYTES)
    with running_engine(family, disk=on(tmp_path), cache=small, max_concurrent_requests=1) as engine:
        first = generate(engine, *(turn(prompt, 8) for prompt in PROMPTS))
        report = engine.cache_report()
        assert disk_of(engine).stats.num_refused > 0 and report.stats.num_evicted_tokens > 0
        assert report.stats.ram_bytes <= NUM_RAM_BYTES
        settle(engine)
        assert disk_of(engine).stats.faults == {}
        assert min(kept(engine, prompt)[1] for prompt in PROMPTS) >= usable(family)
        [again] = generate(engine, turn(PROMPTS[0], 8))
        assert_exact(again, first[0].tokens)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_all_that_ram_held_is_warm_after_a_shutdown(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the writer is far behind and its queue is full: every path that RAM had is on disk, to its end."""
    monkeypatch.setattr(memory, "WRITE_QUEUE_CAP", 1)
    with running_engine(family, disk=on(tmp_path), max_concurrent_requests=1) as engine:
        results = generate(engine, *(turn(prompt, 8) for prompt in PROMPTS))
        paths = [[*prompt, *result.tokens, 1] for prompt, result in zip(PROMPTS, results, strict=True)]
        in_ram = [kept(engine, path)[0] for path in paths]
        assert min(in_ram) >= len(PROMPTS[0]) and disk_of(engine).stats.num_refused > 0
    with running_engine(family, disk=on(tmp_path)) as engine:
        assert [kept(engine, path) for path in paths] == [(0, num_tokens) for num_tokens in in_ram]


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
def test_what_is_on_disk_leaves_ram_without_a_look_at_its_path(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that RAM has is on disk, from its rows or from there, while something else waits to be written: it leaves
    without one path being built. Where nobody had noted what the disk has, each leaf and state has its own."""
    num_built = 0
    real = tree.kept_path

    def counted(*arguments: Any) -> Any:
        nonlocal num_built
        num_built += 1
        return real(*arguments)

    def paths_of_eviction(scheduler: Scheduler, *, is_noted: bool) -> tuple[int, int]:
        nonlocal num_built
        cache, num_built = scheduler.cache, 0
        if not is_noted:
            cache._tree._trie.forget_copies()
        disk_cache_of(cache).tier._has_lost = True  # something, of something else
        with monkeypatch.context() as patch:
            patch.setattr(tree, "kept_path", counted)
            cache.make_room(CACHE.max_bytes or 0)
        return num_built, cache.report().stats.num_nodes

    with running_engine(family, disk=on(tmp_path)) as engine:
        for _ in range(2):  # computed here, then read from the disk
            generate(engine, *(turn(prompt, 8) for prompt in PROMPTS))
            settle(engine)
            assert engine.cache_report().stats.num_nodes >= len(PROMPTS)
            assert engine._ask(lambda scheduler: paths_of_eviction(scheduler, is_noted=True)) == (0, 0)
        assert disk_of(engine).num_restores > 0
        generate(engine, *(turn(prompt, 8) for prompt in PROMPTS))
        settle(engine)
        assert engine._ask(lambda scheduler: paths_of_eviction(scheduler, is_noted=False))[0] >= len(PROMPTS)


def test_a_disk_that_takes_nothing_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not taken leaves RAM all the same: the budget holds, each is counted, told once, waited for once."""
    is_open: list[bool] = []

    def write(self: FolderStore, name: BlobName, parts: Sequence[bytes]) -> int:
        while not is_open:
            time.sleep(0.01)
        raise OSError("gave up")

    monkeypatch.setattr(FolderStore, "write", write)
    monkeypatch.setattr(disk_writing, "LEAVE_SECONDS", 0.3)
    lines: list[str] = []
    small = replace(CACHE, max_bytes=NUM_RAM_BYTES)
    monkeypatch.setattr(memory, "WRITE_QUEUE_CAP", 1)
    with running_engine(disk=on(tmp_path), cache=small, report=lines.append) as engine:
        started = time.monotonic()
        for prompt in PROMPTS:
            generate(engine, turn(prompt, 8))
        assert time.monotonic() - started < 30 * 0.3
        assert engine.cache_report().stats.ram_bytes <= NUM_RAM_BYTES
        faults = disk_of(engine).stats.faults
        assert set(faults) == {"behind"} and faults["behind"] >= 2 and len(lines) == 1
        assert "before it could be written" in lines[0] and kept(engine, PROMPTS[1]) == (0, 0)
        is_open.append(True)


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
@pytest.mark.parametrize("num_shared", sampled([768, 4096], (768,)))
def test_siblings_share_their_beginning_on_disk(num_shared: int, family: str, tmp_path: Path) -> None:
    """Two conversations that part after many tokens: after a restart both are whole and go on as before, and the files
    hold every token of theirs once."""
    shared = prompt_of(num_shared + TAIL_TOKENS)[:num_shared]
    ours, theirs = [*shared, *prompt_of(100, 1)], [*shared, *prompt_of(100, 2)]
    with running_engine(family, disk=on(tmp_path)) as engine:
        answers = [generate(engine, turn(each, 8))[0].tokens for each in (ours, theirs)]
    heads = [unpack_blob(path.read_bytes(), BlobName(path.stem)).head for path in tmp_path.rglob("*.safetensors")]
    num_on_disk = sum(len(head.tokens) for head in heads if head.kind == "segment")
    num_own = [len(prompt) - len(shared) + len(said) for prompt, said in zip((ours, theirs), answers, strict=True)]
    assert num_on_disk == len(shared) + sum(num_own)
    with running_engine(family, disk=on(tmp_path)) as engine:
        for prompt, tokens in zip((ours, theirs), answers, strict=True):
            [warm] = generate(engine, turn(prompt, 8))
            assert_exact(warm, tokens)
            assert cached(warm) == (len(prompt) - 1 if family in CUTTABLE else len(prompt) - TAIL_TOKENS)
        settle(engine)
        assert disk_of(engine).stats.num_written == 0


# --- while it comes back ----------------------------------------------------------------------------------------------

LONG = prompt_of(384)
NUM_PARTS = 8


def in_parts(folder: Path) -> None:
    """A conversation of eight turns on disk: a blob for each of them."""
    with running_engine(disk=on(folder)) as engine:
        for number in range(1, NUM_PARTS + 1):
            generate(engine, turn(LONG[: number * len(LONG) // NUM_PARTS], 1))


def test_a_row_waits_for_what_another_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes longer than a row waits for a disk that gives nothing: as long as it gives, both rows wait."""
    in_parts(tmp_path)
    ticked, num_ticks, seconds = threading.Condition(), 0, 0
    real_read, real_wait = FolderStore.read, DiskTier.wait

    def read(self: FolderStore, *arguments: Any) -> bytearray:
        """Takes half a minute by the clock that the rows have, and long enough for both to look for it in vain."""
        nonlocal seconds
        with ticked:
            seconds += 30
            until = num_ticks + 3
            assert ticked.wait_for(lambda: num_ticks >= until, WAIT_SECONDS)
        return real_read(self, *arguments)

    def wait(self: DiskTier, wait_seconds: float) -> None:
        nonlocal num_ticks
        with ticked:
            num_ticks += 1
            ticked.notify_all()
        real_wait(self, wait_seconds)

    monkeypatch.setattr(FolderStore, "read", read)
    monkeypatch.setattr(DiskTier, "wait", wait)
    monkeypatch.setattr(disk_cache, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
    monkeypatch.setattr(pinned, "STALLED_SECONDS", 150.0)
    with running_engine(disk=on(tmp_path)) as engine:
        results = generate(engine, *(turn([*LONG, number], 2) for number in range(2)))
        assert disk_of(engine).stats.num_read >= NUM_PARTS
    assert min(map(cached, results)) >= len(LONG) - 1


def test_what_is_read_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes it in slowly is read for slowly: what was read and is not in RAM's budget yet stays small."""
    in_parts(tmp_path)
    num_read, num_inserted, ahead = 0, 0, list[int]()
    real_read, real_insert = FolderStore.read, DiskCache._insert

    def read(self: FolderStore, *arguments: Any) -> bytearray:
        nonlocal num_read
        num_read += 1
        ahead.append(num_read - num_inserted)
        return real_read(self, *arguments)

    def insert(self: DiskCache, *arguments: Any) -> bool:
        nonlocal num_inserted
        time.sleep(0.03)
        num_inserted += 1
        return real_insert(self, *arguments)

    monkeypatch.setattr(FolderStore, "read", read)
    monkeypatch.setattr(DiskCache, "_insert", insert)
    monkeypatch.setattr(disk_cache, "MAX_INSERT_BYTES", 1)
    monkeypatch.setattr(memory, "READ_AHEAD_CAP", 1)
    with running_engine(disk=on(tmp_path)) as engine:
        [result] = generate(engine, turn([*LONG, 1], 2))
    assert cached(result) >= len(LONG) and num_read >= NUM_PARTS
    assert max(ahead) <= 4


def test_rows_that_leave_ram_while_their_state_is_read_are_no_damage(tmp_path: Path) -> None:
    """RAM had the rows and the disk is asked for a state only; then RAM needs the room: all of it is read, none of it
    is taken for damaged."""
    prompt = PROMPTS[0]
    with running_engine("qwen3_5", disk=on(tmp_path)) as engine:
        generate(engine, turn(prompt, 8))
        settle(engine)

        def restored(scheduler: Scheduler) -> int:
            cache = scheduler.cache
            for path in cache._tree.sequences():
                for node in path:
                    cache._tree._store.drop_checkpoint(node)
            disk = cache._disk
            assert disk is not None
            held = disk.pin(TokenSequence(tuple(prompt)))
            assert held.load is not None and [entry.head.kind for entry in held.load.entries] == ["checkpoint"]
            cache.make_room(CACHE.max_bytes or 0)
            assert cache._tree.num_ram_bytes == 0
            while disk.advance(held):
                disk.tier.wait(0.01)
            num_tokens = held.lease.num_tokens
            disk.let_go(held)
            return num_tokens

        assert engine._ask(restored) == usable("qwen3_5")
        assert disk_of(engine).stats.faults == {}


def test_a_disk_that_was_slow_once_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not worth reading is computed; meanwhile somebody who keeps no row waiting looks if that is so still,
    and from then on it is read."""
    # Of a model so slow that reading pays on any disk but the one that is planted.
    slow = property(lambda worker: 10.0, lambda worker, rate: None)
    monkeypatch.setattr(DiskWorker, "prefill_rate", slow, raising=False)
    with running_engine(disk=on(tmp_path), reading_pays=False) as engine:
        [first] = generate(engine, turn(LONG, 8))
        settle(engine)

        def make_slow(scheduler: Scheduler) -> None:
            disk = scheduler.cache._disk
            assert disk is not None
            disk.tier.worker.read_rate = 10.0
            scheduler.cache.clear()

        engine._ask(make_slow)
        [slow] = generate(engine, turn(LONG, 8))
        assert cached(slow) == 0 and disk_of(engine).num_declined == 1
        wait_until(lambda: (disk_of(engine).stats.read_bytes_per_second or 0) > 1000)
        engine._ask(lambda scheduler: scheduler.cache.clear())
        [again] = generate(engine, turn(LONG, 8))
        assert cached(again) == len(LONG) - 1
        assert_exact(again, first.tokens)


# --- RAM that is only lent --------------------------------------------------------------------------------------------


def test_an_ephemeral_disk_empties_ram_while_others_run(tmp_path: Path) -> None:
    """A server that is never idle: RAM has what the running row stands on, and nothing of those that are over."""
    with running_engine(disk=on(tmp_path, is_ephemeral=True)) as engine:
        running = engine.submit(turn(prompt_of(48, 50), 100_000))
        results = [generate(engine, turn(prompt, 8))[0] for prompt in PROMPTS]
        wait_until(lambda: engine.cache_report().stats.ram_bytes < disk_of(engine).stats.total_bytes / 3)
        assert engine.status.num_decoding == 1
        [again] = generate(engine, turn(PROMPTS[0], 8))
        assert_exact(again, results[0].tokens)
        assert cached(again) == usable("qwen3")
        running.cancel()
        collect(running)
