"""Forgetting on real tiny models: what only one owner used leaves RAM and disk, and another one reuses what it did."""

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvserve.cache.disk_account import DiskAccount
from kvserve.cache.disk_records import Removal
from kvserve.core import GenerationRequest, TokenSequence
from kvserve.engine.cache_records import ForgottenKv
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.warming import WarmJob, WarmSettings
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    MESSAGE_TOKENS,
    assert_exact,
    beside_stream,
    cached,
    cold,
    collect,
    generate,
    held,
    prompt_of,
    running_engine,
    turn,
    without_idle_work,
)
from tests.integrity import check_integrity
from tests.laws import sampled

FAMILIES = ("qwen3", "qwen3_5", "gemma3")
SHARED = prompt_of(4 * MESSAGE_TOKENS)
MINE, THEIRS = [*SHARED, *prompt_of(100, 1)], [*SHARED, *prompt_of(100, 2)]
OWN_WORDS = MINE[len(SHARED) + 2 : len(SHARED) + MESSAGE_TOKENS - 2]
"""Within a message, so that no border between two blobs divides them."""

ONE, OTHER = "key.user/session", "key.user/another"
WAIT_SECONDS = 60.0


def asked(owner: str, tokens: list[int], max_tokens: int = 8) -> GenerationRequest:
    return replace(turn(tokens, max_tokens), owner=owner)


def is_one(name: str) -> bool:
    return name == ONE


def forget_one(scheduler: Scheduler | None) -> None:
    assert scheduler is not None
    scheduler.forget(is_one)


def on(folder: Path) -> DiskSettings:
    return DiskSettings(folder, max_bytes=None, min_free_bytes=0, ttl_hours=24)


def settle(engine: Engine) -> None:
    assert engine._ask(lambda scheduler: _disk(scheduler.cache).tier.flush(WAIT_SECONDS))


def _disk(cache: PrefixCache):  # type: ignore[no-untyped-def]
    assert cache._disk is not None
    return cache._disk


def found_in(folder: Path, tokens: list[int]) -> list[str]:
    """The files in which these ids stand one behind the other, as the index and the blobs write them."""
    ids = struct.pack(f"<{len(tokens)}I", *tokens)
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and ids in path.read_bytes())


def found_in_ram(engine: Engine, tokens: list[int]) -> bool:
    """Whether a node of the tree, or a prompt that it remembers, has these ids."""
    ids = struct.pack(f"<{len(tokens)}I", *tokens)

    def look(cache: PrefixCache) -> bool:
        records = [node.tokens.ids for path in cache._tree.sequences() for node in path]
        names = [named.run.ids for named in cache._tree._names._kept]
        warmed = [struct.pack(f"<{len(run.tokens.ids)}I", *run.tokens.ids) for run in cache.warmed._runs]
        return any(ids in each for each in (*records, *names, *warmed))

    return engine._ask(lambda scheduler: look(scheduler.cache))


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_the_other_one_reuses_what_it_did(family: str) -> None:
    """Of the forgotten one's conversation only what both begin with is there; what is reused is exact."""
    with running_engine(family) as engine:
        expected = cold(engine, THEIRS, 16)
        generate(engine, asked(ONE, MINE))
        generate(engine, asked(OTHER, THEIRS))
        before = engine.kept_tokens(TokenSequence((*THEIRS, 1)))[0]
        gone = engine.forget(is_one)
        assert gone.num_tokens > 0 and gone.num_ram_bytes > 0 and gone.is_done
        assert not found_in_ram(engine, OWN_WORDS)
        assert engine.kept_tokens(TokenSequence((*THEIRS, 1)))[0] == before
        assert engine.kept_tokens(TokenSequence((*MINE, 1)))[0] <= len(SHARED)
        [warm] = generate(engine, turn(THEIRS, 16))
        assert_exact(warm, expected)
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
def test_nothing_is_left_on_disk(family: str, tmp_path: Path) -> None:
    """No file has the ids; after a restart the other one finds what it had, and the forgotten one what both had."""
    with running_engine(family, disk=on(tmp_path)) as engine:
        generate(engine, asked(ONE, MINE))
        generate(engine, asked(OTHER, THEIRS))
        settle(engine)
        assert found_in(tmp_path, OWN_WORDS)
        gone = engine.forget(is_one)
        assert gone.is_done and gone.num_disk_bytes > 0
        settle(engine)
        assert found_in(tmp_path, OWN_WORDS) == []
        before = engine.kept_tokens(TokenSequence((*THEIRS, 1)))
        assert before[0] == before[1]
    assert found_in(tmp_path, OWN_WORDS) == []
    with running_engine(family, disk=on(tmp_path)) as engine:
        assert engine.kept_tokens(TokenSequence((*THEIRS, 1)))[1] == before[1]
        assert engine.kept_tokens(TokenSequence((*MINE, 1)))[1] <= len(SHARED)
        expected = generate(engine, turn(THEIRS, 16))[0]
        assert cached(expected) >= before[1] - MESSAGE_TOKENS
        assert_exact(expected, cold(engine, THEIRS, 16))


def test_owners_outlive_the_process(tmp_path: Path) -> None:
    """Who is forgotten after a restart takes along what the one before it wrote; nobody else's goes."""
    apart = prompt_of(200, 9)
    with running_engine(disk=on(tmp_path)) as engine:
        generate(engine, asked(ONE, MINE))
        generate(engine, asked(OTHER, apart))
    with running_engine(disk=on(tmp_path)) as engine:
        before = engine.kept_tokens(TokenSequence((*apart, 1)))[1]
        gone = engine.forget(is_one)
        assert gone.is_done and gone.num_disk_bytes > 0 and gone.num_tokens == 0
        assert found_in(tmp_path, OWN_WORDS) == []
        assert engine.kept_tokens(TokenSequence((*MINE, 1))) == (0, 0)
        assert engine.kept_tokens(TokenSequence((*apart, 1)))[1] == before > 0


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
def test_what_only_the_disk_has_of_another_one_stays(family: str, tmp_path: Path) -> None:
    """It stood in the middle of what goes: after a restart nothing of it is in RAM, and it is written anew."""
    with running_engine(family, disk=on(tmp_path)) as engine:
        generate(engine, asked(ONE, MINE))
        generate(engine, asked(OTHER, THEIRS))
    with running_engine(family, disk=on(tmp_path)) as engine:
        before = engine.kept_tokens(TokenSequence((*THEIRS, 1)))[1]
        gone = engine.forget(is_one)
        assert gone.is_done and gone.num_disk_bytes > 0 and (gone.num_tokens, gone.num_ram_bytes) == (0, 0)
        assert found_in(tmp_path, OWN_WORDS) == [] and not found_in_ram(engine, OWN_WORDS)
        settle(engine)
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    with running_engine(family, disk=on(tmp_path)) as engine:
        assert found_in(tmp_path, OWN_WORDS) == []
        assert engine.kept_tokens(TokenSequence((*THEIRS, 1)))[1] == before > len(SHARED)
        [warm] = generate(engine, turn(THEIRS, 16))
        assert_exact(warm, cold(engine, THEIRS, 16))
        generate(engine, asked(OTHER, THEIRS))
        assert engine.forget(lambda name: name == OTHER).num_disk_bytes > 0
        assert engine.kept_tokens(TokenSequence((*THEIRS, 1))) == (0, 0), "whose it is was written anew too"


def test_the_engine_goes_on_while_other_models_books_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be long; whoever forgets waits for the end of them, and no row does."""
    real, is_reading, may_end = DiskAccount.forget_of_others, threading.Event(), threading.Event()

    def slowly(self: DiskAccount, owners: Callable[[str], bool]) -> Removal:
        is_reading.set()
        assert may_end.wait(WAIT_SECONDS)
        return real(self, owners) + Removal(7, is_done=True)

    monkeypatch.setattr(DiskAccount, "forget_of_others", slowly)
    with running_engine(disk=on(tmp_path)) as engine, ThreadPoolExecutor(1) as pool:
        generate(engine, asked(ONE, MINE))
        settle(engine)
        told = pool.submit(engine.forget, is_one)
        try:
            assert is_reading.wait(WAIT_SECONDS)
            assert collect(engine.submit(asked(OTHER, THEIRS))).tokens and not told.done()
            assert found_in(tmp_path, OWN_WORDS) == []
        finally:
            may_end.set()
        gone = told.result(WAIT_SECONDS)
        assert gone.is_done and gone.num_disk_bytes > 7


def test_whoever_is_not_forgotten_keeps_all(tmp_path: Path) -> None:
    """Negative control: to forget somebody else is no loss for anybody, in RAM or on disk."""
    with running_engine(disk=on(tmp_path)) as engine:
        generate(engine, asked(ONE, MINE))
        generate(engine, asked(OTHER, THEIRS))
        settle(engine)
        files = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
        assert engine.forget(lambda name: name == "nobody that is here") == ForgottenKv()
        assert found_in_ram(engine, OWN_WORDS) and found_in(tmp_path, OWN_WORDS)
        assert sorted(path.name for path in tmp_path.rglob("*.safetensors")) == files


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(warming=WarmSettings(grace_seconds=0)) as engine:
        yield engine


def test_a_running_row_of_who_is_forgotten_leaves_nothing(engine: Engine) -> None:
    """It goes on to its end."""
    engine.clear_cache()
    prompt = prompt_of(200, 4)
    running: list[RequestHandle] = []

    def forget() -> None:
        generation = engine.submit(asked(ONE, prompt, 60))
        wait_for(lambda: found_in_ram(engine, prompt[20:100]))
        engine.forget(is_one)
        running.append(generation)

    beside_stream(engine, prompt_of(50, 5), 4, forget)
    [generation] = running
    assert len(collect(generation).tokens) == 60
    assert not found_in_ram(engine, prompt[20:100])


def test_a_waiting_row_of_who_is_forgotten_leaves_nothing(engine: Engine) -> None:
    """It was asked before, so it is answered; who asks once more is kept again."""
    engine.clear_cache()
    prompt = prompt_of(200, 11)
    with held(engine):
        generation = engine.submit(asked(ONE, prompt))
        engine._inbox.put(forget_one)
    assert len(collect(generation).tokens) == 8
    assert not found_in_ram(engine, prompt[20:100])
    generate(engine, asked(ONE, prompt))
    assert found_in_ram(engine, prompt[20:100])


def wait_for(check: Callable[[], bool]) -> None:
    for _ in range(6000):
        if check():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_what_was_computed_ahead_for_it_goes(engine: Engine) -> None:
    """Done or still waiting; another one's job is done all the same."""
    engine.clear_cache()
    jobs = [
        WarmJob(TokenSequence(tuple(prompt_of(150, seed))), "next_turn", owner=owner)
        for seed, owner in ((6, ONE), (7, OTHER), (8, ""))
    ]
    done = [engine.warm(job) for job in jobs]
    assert all(each.wait(WAIT_SECONDS) for each in done)
    with without_idle_work(engine):
        late = engine.warm(WarmJob(TokenSequence(tuple(prompt_of(150, 9))), "next_turn", owner=ONE))
        theirs = engine.warm(WarmJob(TokenSequence(tuple(prompt_of(150, 10))), "next_turn", owner=OTHER))
        engine.forget(is_one)
        assert late.result is not None and late.result.reason == "forgotten" and theirs.result is None
    assert [found_in_ram(engine, prompt_of(150, seed)[20:100]) for seed in (6, 7, 8)] == [False, True, False]
    result = theirs.wait(WAIT_SECONDS)
    assert result is not None and result.state == "done"


def test_to_forget_waits_for_no_later_slice() -> None:
    """Whose names are kept is known by what is kept of theirs: what is too old leaves first, however much it is."""
    with running_engine("qwen3_5") as engine:
        for seed in range(6):
            generate(engine, asked(ONE if seed == 0 else OTHER, prompt_of(100, seed), 1))

        def forget(scheduler: Scheduler) -> tuple[list[str], int, bool]:
            tree = scheduler.cache._tree
            tree._sweep._limits = replace(tree._sweep._limits, ttl_seconds=1.0)
            clock = tree._clock
            tree._clock = lambda: clock() + 10
            assert any(name.startswith(ONE) for name in tree._sweep.owners_seen_at)
            scheduler.forget(is_one)
            return list(tree._sweep.owners_seen_at), tree.num_ram_bytes, scheduler.cache.kv_room.has_more

        with without_idle_work(engine):
            assert engine._ask(forget) == ([], 0, False)
