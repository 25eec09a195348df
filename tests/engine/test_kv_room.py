"""Room for KV: what rows stand on cannot leave, and who enters beside them is restored from what fits."""

from dataclasses import replace

import pytest

from kvserve.core import TokenSequence
from kvserve.engine import admission
from kvserve.engine.kv_moves import KvMoves
from kvserve.engine.memory import fixed_memory
from kvserve.engine.prefix_cache import PrefixCache
from tests.engine.engines import (
    CACHE,
    assert_exact,
    cached,
    cold,
    generate,
    prompt_of,
    running_engine,
    turn,
)


def test_a_row_stands_on_each_record_once() -> None:
    """Two rows that share a beginning hold it once; whoever left holds nothing."""
    with running_engine() as engine:
        generate(engine, turn(prompt_of(200), 2), turn([*prompt_of(100), *prompt_of(100, 1)], 2))
        kept_bytes = engine.cache_report().stats.ram_bytes

        def look(scheduler: object) -> tuple[int, int, int]:
            tree, room = scheduler.cache._tree, scheduler.cache.kv_room  # type: ignore[attr-defined]
            before = room.leased_bytes()
            prompts = (prompt_of(210), [*prompt_of(100), *prompt_of(110, 1)])
            leases = [tree.acquire(tree.lookup(TokenSequence(tuple(each)))) for each in (*prompts, prompts[0])]
            during = room.leased_bytes()
            for lease in leases:
                tree.release(lease)
            return before, during, room.leased_bytes()

        before, during, after = engine._ask(look)
    assert before == after == 0 and 0.9 * kept_bytes <= during <= kept_bytes


def test_a_row_that_is_kept_in_part_writes_what_a_cold_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both budgets are little more than the row, and others hold its buffers too: it is restored from the part that
    fits, and that is told once."""
    monkeypatch.setattr(admission, "ANSWER_ALLOWANCE_TOKENS", 8)
    monkeypatch.setattr(KvMoves, "_makes_way", lambda *_, **__: False)
    lines: list[str] = []
    tokens = prompt_of(800)
    with running_engine() as engine:
        sizes = engine.wait_until_ready().sizes
        expected = cold(engine, tokens, 8)
        row_bytes = sizes.peak(808) + sizes.copied(sizes.peak(808))
    most_bytes = int(row_bytes + sizes.kept(0, 300))
    small = replace(CACHE, max_bytes=most_bytes)
    with running_engine(cache=small, max_batch_bytes=most_bytes, report=lines.append) as engine:
        first, again = (generate(engine, turn(tokens, 8))[0] for _ in range(2))
        report = engine.status.memory
    assert_exact(first, expected)
    assert_exact(again, expected)
    assert 0 < cached(again) <= 300
    assert len([line for line in lines if "Memory for KV is full" in line]) == 1
    assert report is not None and [each.bound for each in report.pressures] == ["kv_pool"]


def test_a_row_waits_where_others_stand_on_what_it_needs() -> None:
    """Beside rows that run and what they stand on there must be room for it and for all that it starts from."""
    with running_engine() as engine:
        model = engine.wait_until_ready()
    cache = PrefixCache(model, CACHE, fixed_memory(1_000_000), "test")
    room, sizes = cache.kv_room, model.sizes
    num_bytes = 1_000_000 - sizes.kept(0, 500)
    assert room.can_restore(num_bytes, 500, lambda: pytest.fail("all of it fits: nobody needs to look"))
    assert room.can_restore(num_bytes, 600, lambda: 500) and not room.can_restore(num_bytes + 1, 600, lambda: 500)
    assert len(room.within(TokenSequence(tuple(range(600))), room.restorable_bytes(num_bytes))) == 500
