"""KV on disk under a real engine: warm after a restart, exact, and never in the way of a request."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.token_run import pack
from kvserve.core import TokenDelta, TokenSequence
from kvserve.engine import disk_cache, disk_writing, pinned
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.pinned import DiskReport
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.quantised import KvSettings
from kvserve.engine.snapshot import KvSlice
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CACHE,
    CUTTABLE,
    MESSAGE_TOKENS,
    NUM_ANSWER_TOKENS,
    TAIL_TOKENS,
    Result,
    assert_exact,
    cached,
    cold,
    collect,
    engine_settings,
    generate,
    prompt_of,
    running_engine,
    turn,
)
from tests.engine.odd_caches import Unmergeable, use_cache
from tests.integrity import check_integrity
from tests.laws import IS_FULL, TWO_KINDS, sampled, sampled_cells
from tests.models import DEEP, TWO_LAYERS, tiny_model
from tests.starts import remembered_starts

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite")
BASE = prompt_of(300 if IS_FULL else 200)
PAIR_TOKENS = 2 * MESSAGE_TOKENS
WAIT_SECONDS = 60.0
NUM_TOKENS = NUM_ANSWER_TOKENS if IS_FULL else 24


def on(folder: Path, **changes: Any) -> DiskSettings:
    return DiskSettings(folder, **({"max_bytes": None, "min_free_bytes": 0, "ttl_hours": 24.0} | changes))


def disk_of(engine: Engine) -> DiskReport:
    report = engine.cache_report().disk
    assert report is not None
    return report


def settle(engine: Engine) -> None:
    """Wait until all that was to be written is on disk and in the index."""
    assert engine._ask(lambda scheduler: disk_cache_of(scheduler.cache).tier.flush(WAIT_SECONDS))


def disk_cache_of(cache: PrefixCache) -> DiskCache:
    assert cache._disk is not None
    return cache._disk


def wait_until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def usable(num_tokens: int, family: str) -> int:
    """How much of a prompt that the disk has whole can be started from: all, or up to the end of its user's last
    message, every second one of 48 tokens."""
    return num_tokens - 1 if family in CUTTABLE else (num_tokens - TAIL_TOKENS) // PAIR_TOKENS * PAIR_TOKENS


@pytest.mark.parametrize("family", sampled((*FAMILIES, DEEP + "qwen3_5"), ("qwen3_5",)))
def test_a_restart_is_warm_and_exact(family: str, tmp_path: Path) -> None:
    """Repeated and continued prompts reuse all that was computed before, and write what a cold one writes."""
    with running_engine(family, disk=on(tmp_path / "kv")) as engine:
        [first] = generate(engine, turn(BASE, NUM_TOKENS))
        settle(engine)
        shutil.copytree(tmp_path / "kv", tmp_path / "crashed")  # what a kill -9 leaves at this moment
    longer = [*BASE, *first.tokens, *prompt_of(60, 1)]
    expected: tuple[int, ...] = ()
    for folder in ("kv", "crashed"):
        with running_engine(family, disk=on(tmp_path / folder)) as engine:
            [again] = generate(engine, turn(BASE, NUM_TOKENS))
            assert_exact(again, first.tokens)
            assert cached(again) == usable(len(BASE), family) >= 0.95 * len(BASE)
            assert again.progress[-1].reuse.tier == "disk"
            [warm] = generate(engine, turn(longer, NUM_TOKENS))
            assert cached(warm) == len(BASE) + NUM_TOKENS
            engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
            report = disk_of(engine)
            assert report.num_restores >= 1 and report.stats.faults == {}
            expected = expected or cold(engine, longer, NUM_TOKENS)
            assert_exact(warm, expected)


def test_the_start_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the index is read; a prompt that shares nothing reads nothing either."""
    with running_engine(disk=on(tmp_path)) as engine:
        generate(engine, turn(BASE, 1))
    with running_engine(disk=on(tmp_path)) as engine:
        generate(engine, turn(prompt_of(100, 5), 1))
        assert disk_of(engine).stats.num_read == 0 and disk_of(engine).stats.num_segments > 0


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("family", sampled(FAMILIES, TWO_KINDS))
@sampled_cells(lambda family, first: family == "qwen3_5" and first == "theirs")
def test_siblings_after_a_restart(family: str, first: str, tmp_path: Path) -> None:
    """Two conversations that part in the middle: both are whole, whichever comes back first, and what they share is on
    disk once. Theirs leaves a blob of ours in the middle: the rows behind that place are not its own.
    """
    ours, theirs = [*BASE, *prompt_of(100, 1)], [*BASE, *prompt_of(100, 2)]
    with running_engine(family, disk=on(tmp_path)) as engine:
        expected = [generate(engine, turn(each, NUM_TOKENS))[0].tokens for each in (ours, theirs)]
        settle(engine)
        written = disk_of(engine).stats.num_written_bytes
    with running_engine(family, disk=on(tmp_path)) as engine:
        known = list(zip((ours, theirs), expected, strict=True))
        for prompt, tokens in known if first == "ours" else reversed(known):
            [warm] = generate(engine, turn(prompt, NUM_TOKENS))
            assert_exact(warm, tokens)
            assert cached(warm) == usable(len(prompt), family)
        settle(engine)
        assert disk_of(engine).stats.num_written == 0, "what is there was written again"
    if family in CUTTABLE:
        with running_engine(family, disk=on(tmp_path / "alone")) as engine:
            generate(engine, turn(theirs, NUM_TOKENS))
            settle(engine)
            alone = disk_of(engine).stats.num_written_bytes
        assert written < 1.4 * alone


@pytest.mark.parametrize("family", sampled(("qwen3", "gemma3"), ("gemma3",)))
def test_what_leaves_ram_comes_back(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RAM for one conversation four take turns: each is found on disk and goes on exactly."""
    for name in ("LEAVE_SECONDS", "MAX_WAITS_SECONDS"):  # a busy machine's disk is not waited for in vain
        monkeypatch.setattr(disk_writing, name, WAIT_SECONDS)
    prompts = [prompt_of(300, seed) for seed in range(4)]
    small = replace(CACHE, max_bytes=2**18)
    with running_engine(family, disk=on(tmp_path), cache=small) as engine:
        first = generate(engine, *(turn(prompt, 8) for prompt in prompts))
        settle(engine)
        again = [generate(engine, turn(prompt, 8))[0] for prompt in prompts]
        for one, other in zip(first, again, strict=True):
            assert_exact(other, one.tokens)
            assert cached(other) == usable(300, family)
        assert disk_of(engine).num_restores >= 3
        assert engine.cache_report().stats.ram_bytes <= 2**18


def test_quantised_kv_comes_back(tmp_path: Path) -> None:
    """Both forms of a row, before and behind the start of quantised KV."""
    results = []
    for kv in (KvSettings(bits=8, group_size=32, start=150),) * 2 + (KvSettings(bits=4, group_size=32, start=150),):
        settings = engine_settings(disk=on(tmp_path), kv=kv)
        model = tiny_model("qwen3", scale=replace(TWO_LAYERS, head_dim=32))
        engine = Engine(model, settings, grammar_tokenizer=lambda _: None, report=lambda _: None)
        try:
            with remembered_starts():
                engine.start()
                engine.wait_until_ready(60)
            results += generate(engine, turn(BASE, 16))
        finally:
            engine.stop(60)
    assert_exact(results[1], results[0].tokens)
    assert [cached(result) for result in results] == [0, len(BASE) - 1, 0], "KV of other settings is not used"


def test_rows_that_come_together_read_a_blob_once(tmp_path: Path) -> None:
    """Four rows with one beginning: the first reads it, the others find it in RAM."""
    prompts = [[*BASE, *prompt_of(40, seed)] for seed in range(4)]
    with running_engine(disk=on(tmp_path)) as engine:
        expected = [generate(engine, turn(prompt, 8))[0].tokens for prompt in prompts]
    with running_engine(disk=on(tmp_path)) as engine:
        results = generate(engine, *(turn(prompt, 8) for prompt in prompts))
        for result, tokens in zip(results, expected, strict=True):
            assert_exact(result, tokens)
            assert cached(result) == len(prompts[0]) - 1
        assert disk_of(engine).stats.num_read == 1 + len(prompts)


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_no_more_is_read_than_there_is_room_for(family: str, tmp_path: Path) -> None:
    """Of what the disk has a hold with bounded room reads what fits, and nothing where nothing does."""

    def read_within(room_bytes: float) -> tuple[int, bool]:
        def ask(scheduler: Any) -> tuple[int, bool]:
            disk = disk_cache_of(scheduler.cache)
            held = disk.pin(TokenSequence(tuple(BASE)), room_bytes=room_bytes)
            num_bytes, is_settled = held.goal.num_bytes if held.goal is not None else 0, held.is_settled
            disk.let_go(held)
            return num_bytes, is_settled

        return engine._ask(ask)

    with running_engine(family, disk=on(tmp_path)) as engine:
        generate(engine, turn(BASE, 8))
        settle(engine)
    with running_engine(family, disk=on(tmp_path)) as engine:
        whole, is_settled = read_within(math.inf)
        assert whole > 0 and not is_settled
        assert read_within(whole) == (whole, False) and read_within(1) == (0, True)
        part, _ = read_within(whole - 1)
        assert 0 < part < whole


@sampled_cells(lambda family, kind: family == "qwen3_5")
@pytest.mark.parametrize(("family", "kind"), [("qwen3", "segment"), ("qwen3_5", "segment"), ("qwen3_5", "checkpoint")])
def test_a_damaged_blob_is_computed_again(family: str, kind: str, tmp_path: Path) -> None:
    """The largest blob of a kind with one bit flipped: the right answer, counted, told once, and whole again later."""
    with running_engine(family, disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE, 8))
    blobs = [path for path in tmp_path.rglob("*.safetensors") if f'"kind":"{kind}"'.encode() in path.read_bytes()]
    for path in blobs:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    lines: list[str] = []
    with running_engine(family, disk=on(tmp_path), report=lines.append) as engine:
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) == 0
        faults = disk_of(engine).stats.faults
        assert set(faults) == {"damaged"} and 1 <= faults["damaged"] <= len(blobs) and len(lines) == 1
    with running_engine(family, disk=on(tmp_path)) as engine:
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) == usable(len(BASE), family)


def test_wrong_rows_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of another prompt, served as if the disk had them, lead to another text."""
    with running_engine(disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE))
    real = disk_cache.decode_kv

    def wrong(text: str, tensors: Any) -> KvSlice:
        kv = real(text, tensors)
        return replace(kv, leaves=tuple(tuple(array[..., ::-1] for array in leaf) for leaf in kv.leaves))

    monkeypatch.setattr(disk_cache, "decode_kv", wrong)
    with running_engine(disk=on(tmp_path)) as engine:
        [again] = generate(engine, turn(BASE))
        assert cached(again) == len(BASE) - 1 and again.tokens != first.tokens


def test_a_disk_that_is_slower_than_computing_is_not_read(tmp_path: Path) -> None:
    """By the measured rates; they are known from the run before."""
    with running_engine(disk=on(tmp_path), reading_pays=False) as engine:
        [first] = generate(engine, turn(BASE, 8))

        def slow(scheduler: Any) -> None:
            tier = disk_cache_of(scheduler.cache).tier
            assert tier.worker.prefill_rate is not None
            tier.worker.read_rate = 10.0
            tier.note_restored((), 0)

        engine._ask(slow)
        settle(engine)
    with running_engine(disk=on(tmp_path), reading_pays=False) as engine:
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        report = disk_of(engine)
        assert cached(again) == 0 and report.num_declined == 1 and report.stats.num_read == 0


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that does not end is given up; the row computes."""
    with running_engine(disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE, 8))
    is_over = threading.Event()

    def hang(self: FolderStore, *_: object) -> bytearray:
        is_over.wait(WAIT_SECONDS)
        raise OSError("gave up")

    monkeypatch.setattr(FolderStore, "read", hang)
    monkeypatch.setattr(pinned, "STALLED_SECONDS", 0.1)
    try:
        with running_engine(disk=on(tmp_path)) as engine:
            [again] = generate(engine, turn(BASE, 8))
            assert_exact(again, first.tokens)
            assert cached(again) == 0 and disk_of(engine).stats.faults["unreadable"] == 1
            is_over.set()
    finally:
        is_over.set()


def test_a_client_that_leaves_while_it_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row goes at once, nothing of it stays behind, and the next one is served."""
    with running_engine(disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE, 8))
    may_read, real = threading.Event(), FolderStore.read

    def wait(self: FolderStore, *arguments: Any) -> bytearray:
        may_read.wait(WAIT_SECONDS)
        return real(self, *arguments)

    monkeypatch.setattr(FolderStore, "read", wait)
    monkeypatch.setattr(DiskTier, "read_rate", None)  # a disk that is held up here is not to pass for a slow one
    with running_engine(disk=on(tmp_path)) as engine:
        generation = engine.submit(turn(BASE, 8))
        wait_until(lambda: engine.status.num_prefilling == 1)
        generation.cancel()
        assert collect(generation).end.reason == "cancelled"  # type: ignore[union-attr]
        may_read.set()
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) == len(BASE) - 1
        assert engine.cache_report().stats.num_leases == 0


def test_a_row_that_waits_for_the_disk_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row is computed and answered meanwhile; then the first one goes on with what was read."""
    with running_engine(disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE, 8))
    may_read, real = threading.Event(), FolderStore.read

    def wait(self: FolderStore, *arguments: Any) -> bytearray:
        may_read.wait(WAIT_SECONDS)
        return real(self, *arguments)

    monkeypatch.setattr(FolderStore, "read", wait)
    with running_engine(disk=on(tmp_path)) as engine:
        waiting = engine.submit(turn(BASE, 8))
        [other] = generate(engine, turn(prompt_of(200, 9), 8))
        assert len(other.tokens) == 8 and not may_read.is_set()
        may_read.set()
        again = collect(waiting)
        assert_exact(again, first.tokens)
        assert cached(again) == len(BASE) - 1


def test_clearing_empties_the_disk(engine_on_disk: tuple[Engine, Path]) -> None:
    """After DELETE nothing is found, now and after a restart, and what comes later is kept."""
    engine, folder = engine_on_disk
    generate(engine, turn(BASE, 8))
    settle(engine)
    assert list(folder.rglob("*.safetensors"))
    engine.clear_cache()
    assert not list(folder.rglob("*.safetensors"))
    assert cached(generate(engine, turn(BASE, 8))[0]) == 0
    settle(engine)
    assert list(folder.rglob("*.safetensors"))


@pytest.fixture
def engine_on_disk(tmp_path: Path) -> Any:
    with running_engine(disk=on(tmp_path)) as engine:
        yield engine, tmp_path


def test_what_ram_lost_is_on_disk_and_what_disk_lost_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full while prompts were computed gets them once there is room."""
    with running_engine(disk=on(tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "free_bytes", lambda self: -1)
            [first] = generate(engine, turn(BASE, 8))
            settle(engine)
            assert disk_of(engine).stats.is_full and disk_of(engine).stats.num_segments == 0
        engine._ask(lambda scheduler: setattr(disk_cache_of(scheduler.cache).tier, "_full_check_at", 0.0))
        settle(engine)
        wait_until(lambda: disk_of(engine).stats.num_segments > 0)
        settle(engine)
    with running_engine(disk=on(tmp_path)) as engine:
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) == len(BASE) - 1


def test_a_beginning_that_left_the_disk_is_written_again_with_what_follows(tmp_path: Path) -> None:
    """The next turn of a conversation that RAM still has brings all of it back to the disk, not at the end only."""

    def num_on_disk(tokens: list[int]) -> int:
        settle(engine)
        sequence = TokenSequence(tuple(tokens))
        return engine._ask(lambda s: disk_cache_of(s.cache).known_depth(s.cache._tree.name(sequence, "")))

    def lose_all(scheduler: Any) -> None:
        tier, run = disk_cache_of(scheduler.cache).tier, pack(TokenSequence(tuple(BASE)))
        found = tier.index.find(run, scheduler.cache.hasher.start().extended(run))
        tier.discard([found.steps[0].segment.name])  # what stands on it goes too

    with running_engine(disk=on(tmp_path)) as engine:
        [first] = generate(engine, turn(BASE, 8))
        assert num_on_disk(BASE) == len(BASE)
        engine._ask(lose_all)
        assert num_on_disk(BASE) == 0
        longer = [*BASE, *first.tokens, *prompt_of(60, 1)]
        [warm] = generate(engine, turn(longer, 8))
        assert cached(warm) == len(BASE) + 8 and num_on_disk(longer) == len(longer)


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_a_long_answer_is_kept_while_it_is_written(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for its beginning after a crash finds it; the answer itself is the same as ever."""
    for name in ("ANSWER_STRIDE_TOKENS", "CHECKPOINT_STRIDE_TOKENS"):
        monkeypatch.setattr(disk_cache, name, 16)
    ends: list[int] = []
    real = PrefixCache.extend

    def note(self: PrefixCache, cache_lease: Any, caches: Any, tokens: Any, *rest: Any) -> bool:
        ends.append(len(tokens))
        return real(self, cache_lease, caches, tokens, *rest)

    with running_engine(family, disk=on(tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "extend", note)
            [first] = generate(engine, turn(BASE, 56))
        longer = [*BASE, *first.tokens[:49], *prompt_of(40, 4)]
        [warm] = generate(engine, turn(longer, 16))
        assert len(ends) >= 4 and cached(warm) >= len(BASE) + 32
        assert_exact(warm, cold(engine, longer, 16))
        assert_exact(first, cold(engine, BASE, 56))


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_of_an_answer_that_the_watchdog_ended_nothing_stays(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept of it while it was written leaves RAM and disk; the prompt, and another answer to it, stay."""
    for name in ("ANSWER_STRIDE_TOKENS", "CHECKPOINT_STRIDE_TOKENS"):
        monkeypatch.setattr(disk_cache, name, 16)
    with running_engine(family, disk=on(tmp_path)) as engine:
        [other] = generate(engine, turn([*BASE, 7], 26))
        running, tokens, kept_bytes = engine.submit(turn(BASE, 100_000)), list[int](), 0
        try:
            for batch in running.batches(60):
                tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
                if len(tokens) > 40:
                    kept_bytes = kept_bytes or engine.cache_report().stats.ram_bytes
                    engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 1e-6))
        finally:
            engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 0))
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
        assert kept_bytes > engine.cache_report().stats.ram_bytes, "some of it was kept meanwhile"
        settle(engine)
        # Where a state is needed, it is that of the other prompt's tail.
        num_known = len(BASE) if family in CUTTABLE else len(BASE) + 1 - TAIL_TOKENS
        paths = {(*BASE, *tokens, 5): num_known, (*BASE, 7, *other.tokens, 5): len(BASE) + 27}
        for path, depth in paths.items():
            sequence = TokenSequence(path)
            assert engine._ask(lambda scheduler, sequence=sequence: scheduler.cache.kept_tokens(sequence)) == (
                depth,
                depth,
            )
    with running_engine(family, disk=on(tmp_path)) as engine:
        longer = [*BASE, *tokens[:30], 6]
        [warm] = generate(engine, turn(longer, 8))
        known_on_disk = num_known if family in CUTTABLE else usable(len(BASE), family)
        assert cached(warm) == known_on_disk and disk_of(engine).stats.faults == {}
        assert_exact(warm, cold(engine, longer, 8))


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_a_shutdown_keeps_what_running_rows_had(family: str, tmp_path: Path) -> None:
    """Stopped in the middle of an answer: prompt and answer so far are warm for the next run."""
    with running_engine(family, disk=on(tmp_path)) as engine:
        generation, tokens = engine.submit(turn(BASE, 5000)), []
        for batch in generation.batches(60):
            tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
            if len(tokens) > 2:
                break
    stopped: Result = collect(generation)
    assert stopped.end.reason == "shutdown"  # type: ignore[union-attr]
    tokens += stopped.tokens
    longer = [*BASE, *tokens, *prompt_of(20, 6)]
    with running_engine(family, disk=on(tmp_path)) as engine:
        [warm] = generate(engine, turn(longer, 16))
        assert cached(warm) >= len(BASE) + len(tokens) - 1
        assert_exact(warm, cold(engine, longer, 16))


def test_an_ephemeral_disk_empties_ram_and_leaves_nothing(tmp_path: Path) -> None:
    """RAM holds nothing of rows that are over; they come back from the scratch file, exactly; no file is ever seen."""
    prompts = [prompt_of(200, seed) for seed in range(3)]
    with running_engine(disk=on(tmp_path, is_ephemeral=True)) as engine:
        first = [generate(engine, turn(prompt, 8))[0] for prompt in prompts]
        wait_until(lambda: engine.cache_report().stats.ram_bytes == 0)
        for prompt, result in zip(prompts, first, strict=True):
            [again] = generate(engine, turn(prompt, 8))
            assert_exact(again, result.tokens)
            assert cached(again) == len(prompt) - 1
        assert disk_of(engine).num_restores == 3 and list(tmp_path.iterdir()) == []
    with running_engine(disk=on(tmp_path, is_ephemeral=True)) as engine:
        assert cached(generate(engine, turn(prompts[0], 8))[0]) == 0


def test_states_of_an_unknown_class_stay_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is served and warm while it runs; one line says what the disk cannot have."""
    use_cache(monkeypatch, Unmergeable)
    lines: list[str] = []
    with running_engine(disk=on(tmp_path), report=lines.append) as engine:
        [first] = generate(engine, turn(BASE, 8))
        [again] = generate(engine, turn(BASE, 8))
        assert_exact(again, first.tokens)
        assert cached(again) > len(BASE) * 2 // 3
        assert disk_of(engine).stats.faults == {"unsupported": 1} and len(lines) == 1


def test_a_folder_that_cannot_be_used_costs_a_line(tmp_path: Path) -> None:
    """The server starts and serves without it."""
    (tmp_path / "file").write_text("in the way")
    lines: list[str] = []
    with running_engine(disk=on(tmp_path / "file"), report=lines.append) as engine:
        assert cached(generate(engine, turn(BASE, 8))[0]) == 0
        assert engine.cache_report().disk is None
    assert len(lines) == 1 and "DISK_CACHE_DIR" in lines[0]
