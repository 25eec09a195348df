"""What is kept makes way for rows a slice at a time: streams get their steps in between, and no row begins before there
is room for it."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from kvserve.cache.records import Eviction
from kvserve.cache.tree import PrefixTree
from kvserve.core import GenerationRequest, TokenSequence
from kvserve.engine import admission, kv_room, rows
from kvserve.engine.cache_records import CacheLease
from kvserve.engine.decode import DecodePool
from kvserve.engine.kv_room import KvRoom
from kvserve.engine.memory import fixed_memory
from kvserve.engine.model import KvSize
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.worker import Engine
from tests.cache.payloads import ROOMY, ROW_BYTES, make_tree, store
from tests.engine.engines import (
    CACHE,
    Result,
    beside_stream,
    cached,
    cold,
    collect,
    generate,
    prompt_of,
    request,
    running_engine,
    turn,
    without_idle_work,
)
from tests.integrity import check_integrity
from tests.laws import sampled

SMALL_TOKENS = 1400
"""What a full memory of these tests has room for."""

WIDER_TOKENS = 2500
"""Where two rows, and all that one of them waited for, are to be there beside what stays."""

STREAM_TOKENS = 120
"""Less than the allowance for an answer, and more steps than room takes to be made."""

MAX_BYTES = 40_000
NUM_ROWS, ROW_TOKENS = 200, 50


@pytest.fixture
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that may write without end take little room, so that a small memory holds them and is filled soon."""
    for module in (admission, rows):
        monkeypatch.setattr(module, "ANSWER_ALLOWANCE_TOKENS", 256)


def beside_short_stream(engine: Engine, *requests: GenerationRequest) -> list[Result]:
    """Requests that come together with the first token of a stream. A test's thread that sleeps changes nothing: the
    stream never takes more of a small memory than it was counted with, so nobody waits for its end or is put back."""
    handles, deliver = list[RequestHandle](), Row.deliver

    def delivering(row: Row, token: int) -> None:
        deliver(row, token)
        if not handles:
            handles.extend([engine.submit(each) for each in requests])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "deliver", delivering)
        stream = collect(engine.submit(request(prompt_of(40, 98), STREAM_TOKENS)))
    assert len(stream.tokens) == STREAM_TOKENS, stream.end
    return [collect(handle) for handle in handles]


@dataclass
class Ticks:
    """A clock that goes on by one second whenever it is looked at."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def full_room(clock: Ticks) -> tuple[PrefixTree, KvRoom]:
    """As much as may be kept, in two hundred rows of the same size."""
    tree = make_tree(replace(ROOMY, max_bytes=MAX_BYTES))
    for number in range(NUM_ROWS):
        store(tree, TokenSequence(tuple(range(1000 * number, 1000 * number + ROW_TOKENS))))
    tree.evict()  # ranked: what is counted is what leaves
    assert tree.num_ram_bytes == MAX_BYTES
    sizes: Any = KvSize  # what rows take is not asked for here
    return tree, KvRoom(tree, fixed_memory(MAX_BYTES), sizes, clock)


def test_a_slice_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each few that have left somebody looks at the clock; the next slice goes on, until all has left that
    must."""
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 2.5)
    tree, room = full_room(Ticks())
    left, is_made = [tree.num_ram_bytes], False
    while not is_made:
        is_made = room.make_some(MAX_BYTES // 2)
        left.append(tree.num_ram_bytes)
    pieces = [(before - after) // (ROW_BYTES * ROW_TOKENS) for before, after in pairwise(left)]
    assert left[-1] == MAX_BYTES // 2
    assert pieces[0] == max(pieces) == 3 * kv_room.PIECES and sum(pieces) == NUM_ROWS // 2


def test_what_is_needed_now_takes_no_more_than_that() -> None:
    """A row that waits for all the memory is counted, and holds nothing: a stop of another one lets leave what that
    stop needs. It may use what the row waits for where that can leave again."""
    tree, room = full_room(Ticks())
    room.account(MAX_BYTES, 0, awaited_bytes=MAX_BYTES)
    num_bytes = 10 * ROW_BYTES * ROW_TOKENS
    room.make(num_bytes)
    assert tree.num_ram_bytes == MAX_BYTES - num_bytes
    assert room.left().num_bytes < 0, "it is counted"
    assert not room.takes(num_bytes, has_disk=True), "no room would be left for the one that waits"
    room.account(MAX_BYTES // 2, 0, awaited_bytes=MAX_BYTES // 2)
    assert room.takes(num_bytes, has_disk=True) and not room.takes(num_bytes + 1, has_disk=True)
    while not room.make_some():
        pass
    assert tree.num_ram_bytes == MAX_BYTES // 2


def test_what_is_only_too_old_leaves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs room now does not wait for all that nobody has asked for in a long time."""
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 0)
    clock = Ticks()
    tree, room = full_room(clock)
    tree._sweep._limits = replace(tree._sweep._limits, ttl_seconds=1.0)
    tree._clock.now += 10  # type: ignore[attr-defined]
    num_kept = (MAX_BYTES - tree.num_ram_bytes) // (ROW_BYTES * ROW_TOKENS)
    room.make(1)
    num_left = (MAX_BYTES - tree.num_ram_bytes) // (ROW_BYTES * ROW_TOKENS) - num_kept
    assert 1 <= num_left <= kv_room.PIECES and room.has_more
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 10**6)
    room.evict_rest()
    assert tree.num_ram_bytes == 0 and not room.has_more


def test_what_cannot_leave_costs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut a record to size takes memory for a moment. Where there is none that is told once, and streams go on."""
    evict, failures, lines = PrefixTree.evict, iter([True]), list[str]()

    def failing(tree: PrefixTree, *asked: float) -> Eviction:
        if next(failures, False):
            raise RuntimeError("[malloc] Unable to allocate 64 bytes.")
        return evict(tree, *asked)  # type: ignore[arg-type]

    def begin(scheduler: Scheduler) -> None:
        scheduler.cache.kv_room.has_more = True
        monkeypatch.setattr(PrefixTree, "evict", failing)

    with running_engine(report=lines.append) as engine:
        _none, result = beside_stream(engine, prompt_of(40), 20, partial(engine._ask, begin))
    assert len(result.tokens) == 20
    assert [line for line in lines if "Room could not be made" in line] == lines and len(lines) == 1, lines


def test_a_row_for_which_nothing_can_be_cut_to_size_costs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the room that there is: what it then cannot allocate is its own trouble."""
    make_some, lines = KvRoom.make_some, list[str]()

    def failing(room: KvRoom, num_needed_bytes: float = 0) -> bool:
        monkeypatch.setattr(KvRoom, "make_some", make_some)
        raise RuntimeError("[malloc] Unable to allocate 64 bytes.")

    with running_engine(report=lines.append) as engine:
        alone = cold(engine, prompt_of(100, 5), 4)

        def beside() -> Result:
            monkeypatch.setattr(KvRoom, "make_some", failing)
            return collect(engine.submit(turn(prompt_of(100, 5), 4)))

        result, stream = beside_stream(engine, prompt_of(40), 20, beside)
    assert len(stream.tokens) == 20 and result.tokens == alone
    assert len(lines) == 1 and "Room could not be made" in lines[0], lines


@pytest.mark.usefixtures("small_answers")
def test_a_stream_gets_its_steps_while_what_is_kept_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache full of states, a stream, and a row that needs most of the memory: between two steps a few states leave,
    and the row begins when all of it fits; it writes what it would alone."""
    long = prompt_of(800, 99)
    with running_engine("qwen3_5") as engine:
        sizes = engine.wait_until_ready().sizes
        alone = cold(engine, long, 4)
        most_bytes = int(sizes.peak(SMALL_TOKENS) + sizes.copied(sizes.peak(SMALL_TOKENS)))
    monkeypatch.setattr(kv_room, "PIECES", 2)
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 0)
    seen: list[int] = []
    begun: list[tuple[float, float]] = []
    with running_engine("qwen3_5", cache=replace(CACHE, max_bytes=most_bytes), max_batch_bytes=most_bytes) as engine:
        with without_idle_work(engine):
            for seed in range(8):
                generate(engine, turn(prompt_of(240, seed), 1))
        enter, steps = PrefixCache.enter, {name: getattr(DecodePool, name) for name in ("step", "step_all")}

        def look() -> None:
            if not begun:
                assert engine._scheduler is not None
                seen.append(engine._scheduler.cache._tree._store.counters.num_evicted_checkpoints)

        def entering(cache: PrefixCache, row: Row, **asked: Any) -> Any:
            if len(row.request.prompt) == len(long):
                look()
                memory = cache.kv_room.memory
                begun.append((memory.reserved_bytes + memory.held("kept"), memory.plan.pool_bytes))
            return enter(cache, row, **asked)

        def stepping(name: str) -> Any:
            def step(pool: DecodePool) -> Any:
                look()
                return steps[name](pool)

            return step

        monkeypatch.setattr(PrefixCache, "enter", entering)
        for name in steps:
            monkeypatch.setattr(DecodePool, name, stepping(name))
        [result] = beside_short_stream(engine, turn(long, 4))
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    left = [later - earlier for earlier, later in pairwise(seen)]
    assert cached(result) == 0 and result.tokens == alone
    assert sum(left) >= 20, "little had to leave"
    assert max(left) <= 2 * (kv_room.PIECES + 1), left
    assert len(begun) == 1 and begun[0][0] <= begun[0][1], begun


@pytest.mark.usefixtures("small_answers")
@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5"), ("qwen3_5",)))
def test_what_a_row_waited_for_does_not_make_way_for_it(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """While room is made for a row, another one computes the beginning that both have, and ends. Though all else that
    is kept is to stay for longer, it is there when the room is."""
    shared = prompt_of(240, 99)
    first, second = [*shared, *prompt_of(8, 1)], [*shared, *prompt_of(500, 2)]
    with running_engine(family) as engine:
        sizes = engine.wait_until_ready().sizes
        most_bytes = int(sizes.peak(WIDER_TOKENS) + sizes.copied(sizes.peak(WIDER_TOKENS)))
        num_entries = int(most_bytes / sizes.kept(0, 400))
    monkeypatch.setattr(kv_room, "PIECES", 1)
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 0)
    bounds: Any = {"cache": replace(CACHE, max_bytes=most_bytes), "max_batch_bytes": most_bytes}
    with running_engine(family, prefill_step_size=64, stream_share=0.0, **bounds) as engine:
        for seed in range(num_entries):
            generate(engine, replace(turn(prompt_of(400, 1000 + seed), 1), ttl_seconds=3000.0))
        others, is_over = list[RequestHandle](), list[bool]()
        enter, leave, make_some = PrefixCache.enter, PrefixCache.leave, KvRoom.make_some

        def entering(cache: PrefixCache, row: Row, **asked: Any) -> Any:
            if len(row.request.prompt) == len(first):
                others.append(engine.submit(turn(second, 4)))
            return enter(cache, row, **asked)

        def leaving(cache: PrefixCache, cache_lease: CacheLease) -> None:
            leave(cache, cache_lease)
            is_over.extend([True] * (len(cache_lease.row.request.prompt) == len(first)))

        def making(room: KvRoom, num_needed_bytes: float = 0) -> bool:
            is_slow = bool(others) and not is_over
            return not is_slow and make_some(room, num_needed_bytes)

        monkeypatch.setattr(PrefixCache, "enter", entering)
        monkeypatch.setattr(PrefixCache, "leave", leaving)
        monkeypatch.setattr(KvRoom, "make_some", making)

        beside_short_stream(engine, turn(first, 1))
        result = collect(others[0])
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    assert cached(result) >= len(shared) - 1


@pytest.mark.usefixtures("small_answers")
def test_a_row_does_not_wait_for_the_room_of_one_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one and one that needs much of the memory come in the same moment: the short one begins first."""
    short, long = prompt_of(60, 97), prompt_of(480, 99)
    with running_engine() as engine:
        sizes = engine.wait_until_ready().sizes
        most_bytes = int(sizes.peak(SMALL_TOKENS) + sizes.copied(sizes.peak(SMALL_TOKENS)))
        num_entries = int(most_bytes / sizes.kept(0, 200))
    monkeypatch.setattr(kv_room, "PIECES", 1)
    monkeypatch.setattr(kv_room, "SLICE_SECONDS", 0)
    begun: list[tuple[int, int]] = []
    enter = PrefixCache.enter
    with running_engine(cache=replace(CACHE, max_bytes=most_bytes), max_batch_bytes=most_bytes) as engine:
        for seed in range(num_entries):
            generate(engine, turn(prompt_of(200, 1000 + seed), 1))

        def entering(cache: PrefixCache, row: Row, **asked: Any) -> Any:
            assert engine._scheduler is not None
            begun.append((len(row.request.prompt), len(engine._scheduler._waiting_for_prefix.without_room())))
            return enter(cache, row, **asked)

        monkeypatch.setattr(PrefixCache, "enter", entering)
        beside_short_stream(engine, turn(short, 8), turn(long, 1))
    assert begun[1:] == [(60, 1), (480, 0)]
