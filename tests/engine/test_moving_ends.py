"""Rows whose KV moved, and all the ways in which they end or others come between: what they took over is found again,
nobody loses anything, and what is counted adds up."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvserve.core import (
    GenerationDone,
    PrefillProgress,
    TokenDelta,
    TokenSequence,
)
from kvserve.engine import pinned
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.rows import RequestHandle, Row
from tests.engine.engines import (
    Result,
    assert_exact,
    cached,
    collect,
    generate,
    let_watchdog_end,
    prompt_of,
    request,
)
from tests.engine.full_engines import (
    NEXT_TOKENS,
    NUM_ALL_TOKENS,
    NUM_ANSWER_TOKENS,
    NUM_PROMPT_TOKENS,
    check,
    cold,
    conversation_of,
    full_engine,
    moves_counted,
    turn,
)
from tests.engine.moving_rows import KINDS, begun, put_back_after, put_backs_counted, while_it_answers, with_row_beside
from tests.laws import sampled, sampled_cells


@pytest.mark.long
@pytest.mark.parametrize("ends", ["cancelled", "watchdog"])
@pytest.mark.parametrize("family", KINDS)
def test_a_long_row_that_leaves_a_shorter_one_behind_is_found_again(
    family: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for a batch of both: they decode side by side, and neither is put back for it."""
    short = prompt_of(20, 7)
    with (
        full_engine(family, NUM_ALL_TOKENS + 400, 0.99) as engine,
        moves_counted() as moves,
        put_backs_counted() as rows,
    ):
        said = conversation_of(family)
        expected = cold(engine, short)
        generate(engine, turn(said.first))
        beside: list[RequestHandle] = []

        def act(running: RequestHandle) -> None:
            beside.append(engine.submit(request(short, NUM_ANSWER_TOKENS)))
            next(beside[0].batches(60))
            if ends == "cancelled":
                running.cancel()
            else:
                let_watchdog_end(monkeypatch, lambda row: row.handle is running)

        found = while_it_answers(engine, turn(said.second), act)
        rest = collect(beside[0])
        monkeypatch.undo()
        again = generate(engine, turn(said.second))[0]
        check(engine)
    assert moves["out"] == 2 and rows == []
    assert rest.tokens == expected[len(expected) - len(rest.tokens) :]
    assert_exact(again, said.expected)
    assert cached(found) == said.num_kept <= cached(again)


@sampled_cells(lambda family, num_tokens: family == "qwen3_5")
@pytest.mark.parametrize(("family", "num_tokens"), [("qwen3", 2658), ("qwen3_5", 2800)])
def test_a_row_that_leaves_a_batch_that_goes_on_moves_too(family: str, num_tokens: int) -> None:
    """Two equal rows decode together, and there is no memory to copy the first that ends: its layers leave the batch
    as what is left of it is computed. The other one writes what a cold one writes."""
    with full_engine(family, num_tokens, 1.0) as engine, moves_counted() as moves:
        said = conversation_of(family)
        other = prompt_of(NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS + 52, 3)
        expected = cold(engine, other, 12)
        last = cold(engine, [*other, *expected, *prompt_of(4, 2)], 4)
        generate(engine, turn(other[:-52], 1))
        generate(engine, turn(said.first))
        found, beside = generate(engine, turn(said.second), turn(other, 12))
        num_moved = moves["in"]
        again = generate(engine, turn([*other, *expected, *prompt_of(4, 2)], 4))[0]
        check(engine)
    assert (moves["out"] >= 1, num_moved) == (True, 1)
    assert_exact(found, said.expected)
    assert_exact(beside, expected)
    assert_exact(again, last)
    assert cached(beside) >= len(other) - 60 and cached(again) == len(other) + len(expected)


@pytest.mark.long
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("family", "num_tokens"), [("qwen3", 2658), ("qwen3_5", 2800)])
def test_two_rows_that_end_in_one_step_are_both_found_again(family: str, num_tokens: int, is_first: bool) -> None:
    """There is no memory to copy either: the layers of each are computed as those of the other move."""
    with full_engine(family, num_tokens, 1.0) as engine, moves_counted() as moves:
        said = conversation_of(family)
        other = prompt_of(NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS + 52, 3)
        expected = cold(engine, other)
        generate(engine, turn(other[:-52], 1))
        generate(engine, turn(said.first))
        wanted = [turn(said.second), turn(other)]
        found = generate(engine, *(wanted if is_first else wanted[::-1]))
        second, beside = found if is_first else found[::-1]
        num_kept = [
            engine._ask(lambda s, p=p: s.cache.kept_tokens(turn(p).prompt, [""])[0]) for p in (said.second, other)
        ]
        check(engine)
    assert moves["out"] >= 1
    assert_exact(second, said.expected)
    assert_exact(beside, expected)
    assert num_kept[0] >= said.num_kept - 64 and num_kept[1] >= len(other) - 64


@pytest.mark.long
def test_a_row_that_has_outgrown_the_memory_waits_until_there_is_some() -> None:
    """It is not let in again for what it was put back for."""
    prompts = [prompt_of(20, 7), prompt_of(20, 8)]
    with full_engine("qwen3", 492, 1.0) as engine, put_backs_counted() as rows:
        expected = [cold(engine, each, 300) for each in prompts]
        found = generate(engine, *(turn(each, 300) for each in prompts))
        check(engine)
    assert [each.tokens for each in found] == expected
    assert 1 <= len(rows) <= 2


@sampled_cells(lambda family, is_alone: is_alone and family == "qwen3_5")
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("family", KINDS)
def test_a_row_that_is_put_back_goes_on_with_what_it_took_over(
    family: str, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits, takes its own KV over again, and its client notices nothing; in a batch of its own or not."""
    with (
        full_engine(family, NUM_ALL_TOKENS + 400, 0.99) as engine,
        moves_counted() as moves,
        put_backs_counted() as rows,
    ):
        said = conversation_of(family)
        generate(engine, turn(said.first))
        if is_alone:
            monkeypatch.setattr("kvserve.engine.decode.extra_padding_tokens", lambda *_: 10**12)
        put_back_after(1, said.second, monkeypatch)
        found = with_row_beside(engine, turn(said.second))
        again = generate(engine, turn(said.third(), 4))[0]
        check(engine)
    assert [row.handle.request.prompt.ids for row in rows] == [tuple(said.second)] and moves["out"] >= 2
    assert_exact(found, said.expected)
    assert cached(again) == len(said.second) + len(said.expected)


@sampled_cells(lambda family, where: (family, where) == ("qwen3_5", "prefill"))
@pytest.mark.parametrize("where", ["prefill", "answer", "beside"])
@pytest.mark.parametrize("family", KINDS)
def test_at_the_end_of_the_server_moved_kv_is_on_disk(family: str, where: str, tmp_path: Path) -> None:
    """After the restart all is there that a row had when the server ended."""
    disk = DiskSettings(tmp_path, 2**34, 0, 24)
    with (
        full_engine(family, NUM_ALL_TOKENS + 400, 0.99, disk=disk, prefill_step_size=16) as engine,
        moves_counted() as moves,
    ):
        said = conversation_of(family)
        engine._ask(lambda scheduler: scheduler.cache._disk.tier.clear())
        generate(engine, turn(said.first))
        running = engine.submit(turn(said.second))
        for batch in running.batches(60):
            has_begun = any(isinstance(event, TokenDelta) for event in batch)
            num_done = max([event.num_done_tokens for event in batch if isinstance(event, PrefillProgress)], default=0)
            if has_begun or (where == "prefill" and num_done > said.num_kept):
                break
        if where == "beside":
            begun(engine.submit(request(prompt_of(20, 7), NUM_ANSWER_TOKENS)))
    assert moves["out"] == 1
    with full_engine(family, NUM_ALL_TOKENS + 400, 0.99, disk=disk) as engine:
        again = generate(engine, turn(said.second))[0]
        check(engine)
    assert_exact(again, said.expected)
    assert cached(again) >= said.num_kept


@pytest.mark.parametrize("family", sampled(KINDS, {"qwen3_5"}))
def test_two_rows_of_one_beginning_of_which_one_moves(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes while the first has its KV: it writes what a cold one writes, and both are found again."""
    with full_engine(family, NUM_ALL_TOKENS + 400, 0.99) as engine, moves_counted() as moves:
        said = conversation_of(family)
        other = [*said.first[:192], *prompt_of(40, 5)]
        expected, later = cold(engine, other, 8), [*prompt_of(9, 6)]
        expected_later = cold(engine, [*other, *expected, *later], 8)
        generate(engine, turn(said.first))
        beside: list[Result] = []
        found = while_it_answers(
            engine, turn(said.second), lambda _: beside.append(collect(engine.submit(turn(other, 8))))
        )
        num_kept = engine._ask(lambda s: s.cache.kept_tokens(turn(said.third()).prompt, [""])[0])
        last = generate(engine, turn([*other, *expected, *later], 8))[0]
        check(engine)
    assert moves["out"] >= 1
    assert_exact(found, said.expected)
    assert_exact(beside[0], expected)
    assert_exact(last, expected_later)
    assert num_kept == len(said.second) + len(said.expected)
    assert cached(last) == len(other) + len(expected)


def test_a_disk_that_writes_nothing_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it still reads from RAM is not moved: the row starts from a part, and its answer is the same."""
    disk = DiskSettings(tmp_path, 2**34, 0, 24, is_ephemeral=True)
    monkeypatch.setattr(pinned, "STALLED_SECONDS", 0.2)
    goes_on = threading.Event()
    with full_engine("qwen3", NUM_ALL_TOKENS, 0.95, disk=disk) as engine, moves_counted() as moves:
        said = conversation_of("qwen3")
        engine._ask(lambda scheduler: scheduler.cache._disk.tier.clear())
        tier = engine._ask(lambda scheduler: scheduler.cache._disk.tier)
        real = type(tier)._write
        monkeypatch.setattr(type(tier), "_write", lambda self, write: real(self, write) if goes_on.wait(60) else None)
        generate(engine, turn(said.first))
        found = generate(engine, turn(said.second))[0]
        goes_on.set()
        check(engine)
    assert_exact(found, said.expected)
    assert moves["out"] == 0 and cached(found) < said.num_kept


def test_an_answer_that_the_disk_still_writes_is_waited_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn leaves the beginning of the answer out, as clients do with thinking, and comes at once: what it
    goes on from moves all the same."""
    with full_engine("qwen3_5", NUM_ALL_TOKENS, 0.99, disk=DiskSettings(tmp_path, 2**34, 0, 24)) as engine:
        said = conversation_of("qwen3_5")
        third = [*said.second, *said.expected[NUM_ANSWER_TOKENS // 2 :], *prompt_of(4, 2)]
        expected = cold(engine, third, 4)
        tier = engine._ask(lambda scheduler: scheduler.cache._disk.tier)
        tier.clear()
        generate(engine, turn(said.first))
        assert tier.flush(60)
        real = type(tier)._write
        monkeypatch.setattr(type(tier), "_write", lambda self, write: (time.sleep(0.03), real(self, write))[1])
        generate(engine, turn(said.second))
        found = generate(engine, turn(third, 4))[0]
    assert_exact(found, expected)
    assert cached(found) >= len(said.second) - 64


def test_a_row_that_was_put_back_and_then_ended_by_the_watchdog_keeps_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what it gave back only the answer is retracted."""
    with full_engine("qwen3", NUM_ALL_TOKENS + 400, 0.99) as engine, put_backs_counted() as put_back:
        said = conversation_of("qwen3")
        generate(engine, turn(said.first))

        def is_overdue(row: Row) -> bool:
            return bool(put_back) and row.request.prompt.ids == tuple(said.second) and len(row.generated) > 4

        with monkeypatch.context() as patch:
            let_watchdog_end(patch, is_overdue)
            put_back_after(1, said.second, patch)
            ended = with_row_beside(engine, turn(said.second))
        assert isinstance(ended.end, GenerationDone) and len(put_back) == 1
        again = generate(engine, turn(said.second))[0]
    assert_exact(again, said.expected)
    assert cached(again) >= said.num_kept - 64


@sampled_cells(lambda family, act: (family, act) == ("qwen3_5", "forget"))
@pytest.mark.parametrize("act", ["forget", "clear", "discard"])
@pytest.mark.parametrize("family", KINDS)
def test_what_is_forgotten_while_a_row_has_it(family: str, act: str) -> None:
    """Its row goes on, exactly."""
    with full_engine(family, NUM_ALL_TOKENS, 0.95) as engine, moves_counted() as moves:
        said = conversation_of(family)
        generate(engine, replace(turn(said.first), owner="one"))

        def do(_: RequestHandle) -> None:
            if act == "forget":
                engine.forget(lambda name: name == "one")
            elif act == "clear":
                engine.clear_cache()
            else:
                engine.discard(turn(said.second).prompt, lambda name: name == "one")

        found = while_it_answers(engine, replace(turn(said.second), owner="one"), do)
        check(engine)
        stats = engine.cache_report().stats
        again = generate(engine, replace(turn(said.third(), 4), owner="one"))[0]
    assert moves["out"] >= 1
    assert_exact(found, said.expected)
    if act == "discard":
        assert cached(again) == len(said.second) + len(said.expected)
    else:
        assert (stats.num_stored_tokens, stats.ram_bytes, cached(again)) == (0, 0, 0)


@pytest.mark.parametrize("is_first", sampled((True, False), {True}))
@pytest.mark.parametrize("num_tokens", sampled((2900, 3000), {3000}))
def test_of_two_rows_that_end_in_one_step_neither_costs_the_other_its_history(num_tokens: int, is_first: bool) -> None:
    """A little more than both fits, and one of them took over what was kept of it: that one moves, as to copy it would
    cost what the other one has just left."""
    with full_engine("qwen3_5", num_tokens, 1.0) as engine, moves_counted() as moves:
        said = conversation_of("qwen3_5")
        other = prompt_of(NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS + 52, 3)
        expected = cold(engine, other)
        thirds = [said.third(), [*other, *expected, *prompt_of(4, 2)]]
        lasts = [cold(engine, each, 4) for each in thirds]
        generate(engine, turn(other[:-52], 1))
        generate(engine, turn(said.first))
        wanted = [turn(said.second), turn(other)]
        found = generate(engine, *(wanted if is_first else wanted[::-1]))
        second, beside = found if is_first else found[::-1]
        again = [generate(engine, turn(each, 4))[0] for each in thirds]
        check(engine)
    assert moves["out"] >= 1
    assert_exact(second, said.expected)
    assert_exact(beside, expected)
    for each, last, third in zip(again, lasts, thirds, strict=True):
        assert_exact(each, last)
        assert cached(each) == len(third) - 4


@pytest.mark.parametrize("num_tokens", sampled((NUM_ALL_TOKENS, 2658), {2658}))
def test_a_marked_answer_behind_a_row_leaves_last(num_tokens: int) -> None:
    """A client asked for its conversation to be kept and goes on without the end of an answer: that end is gone only
    where all else that could leave does not make room for it beside the row."""
    with full_engine("qwen3", num_tokens, 0.99) as engine, moves_counted() as moves:
        said = conversation_of("qwen3")
        second = [*said.first, *said.answer[:20], *prompt_of(NEXT_TOKENS, 1)]
        expected = cold(engine, second)
        for seed in (20, 21, 22):
            generate(engine, turn(prompt_of(NUM_PROMPT_TOKENS, seed), 4))
        generate(engine, replace(turn(said.first), ttl_seconds=3600))
        found = generate(engine, replace(turn(second), ttl_seconds=3600))[0]
        check(engine)
        answer = TokenSequence((*said.first, *said.answer, 5))
        num_kept = engine._ask(lambda scheduler: scheduler.cache.kept_tokens(answer, [""])[0])
    assert_exact(found, expected)
    assert cached(found) == len(said.first) + 20
    is_alone = num_tokens == NUM_ALL_TOKENS
    assert (moves["out"], num_kept) == ((1, cached(found)) if is_alone else (0, said.num_kept))
