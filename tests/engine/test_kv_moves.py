"""KV that moves: a row that takes more than half of the memory for KV is found again whole, because it gives its own KV
away at its end, and takes what is kept of it at its beginning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import GenerationDone, PrefillProgress, TokenDelta
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.kv_moves import KvMoves
from kvserve.engine.snapshot import CacheLayout
from tests.engine.engines import (
    Result,
    assert_exact,
    cached,
    collect,
    generate,
    held,
    let_watchdog_end,
    prompt_of,
    request,
)
from tests.engine.full_engines import (
    NUM_ALL_TOKENS,
    NUM_ANSWER_TOKENS,
    check,
    cold,
    conversation_of,
    full_engine,
    moves_counted,
    turn,
)
from tests.laws import sampled, sampled_cells

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite")


@sampled_cells(lambda family, share: share == 0.99 and family in ("qwen3_5", "gemma3"))
@pytest.mark.parametrize("share", [0.85, 0.99])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_most_of_the_memory_is_found_again_whole(family: str, share: float) -> None:
    """Its next turn computes what is new, and writes what a cold server writes; so does the one after that."""
    lines: list[str] = []
    with full_engine(family, NUM_ALL_TOKENS, share, report=lines.append) as engine:
        said = conversation_of(family)
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        assert_exact(generate(engine, turn(first))[0], answer)
        warm = generate(engine, turn(second))[0]
        again = generate(engine, turn(said.third(), 4))[0]
        check(engine)
    assert_exact(warm, expected)
    assert_exact(again, said.last)
    assert cached(warm) == len(first) + len(answer), lines
    assert cached(again) == len(second) + len(expected), lines
    assert lines == []


@pytest.mark.long
def test_a_row_that_is_not_moved_is_found_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: moving is what lets the next turn find all of it."""
    monkeypatch.setattr(KvMoves, "_makes_way", lambda *_, **__: False)
    with full_engine("qwen3", NUM_ALL_TOKENS, 0.99) as engine:
        said = conversation_of("qwen3")
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        generate(engine, turn(first))
        warm = generate(engine, turn(second))[0]
    assert_exact(warm, expected)
    assert cached(warm) < len(first) + len(answer)


@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5"), {"qwen3_5"}))
def test_moved_rows_in_another_order_write_another_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the answers above depend on the KV that was moved."""
    real = CacheLayout.restore_moved

    def spoilt(self: CacheLayout, pieces: list[Any], *rest: Any) -> list[Any]:
        pieces[:] = [
            (replace(kv, leaves=tuple((keys[..., ::-1, :], values) for keys, values in kv.leaves)), *rows)
            for kv, *rows in pieces
        ]
        return real(self, pieces, *rest)

    with full_engine(family, NUM_ALL_TOKENS, 0.99) as engine:
        said = conversation_of(family)
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        generate(engine, turn(first))
        monkeypatch.setattr(CacheLayout, "restore_moved", spoilt)
        warm = generate(engine, turn(second))[0]
    assert cached(warm) == len(first) + len(answer)
    assert warm.tokens != expected


def test_a_short_request_is_served_beside_a_row_that_took_its_kv_over() -> None:
    """It neither waits for the long one nor costs it anything."""
    with full_engine("qwen3", NUM_ALL_TOKENS + 400, 0.99) as engine, moves_counted() as moves:
        said = conversation_of("qwen3")
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        short = prompt_of(20, 7)
        alone = cold(engine, short, 4)
        generate(engine, turn(first))
        running = engine.submit(turn(second, NUM_ANSWER_TOKENS))
        tokens: list[int] = []
        beside: list[Result] = []
        for batch in running.batches(60):
            tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
            if tokens and not beside:
                with held(engine):
                    generation = engine.submit(request(short, 4))
                beside.append(collect(generation))
            end = batch[-1]
        again = generate(engine, turn([*second, *tokens, *prompt_of(4, 9)], 4))[0]
        check(engine)
    assert moves["out"] == 2
    assert isinstance(end, GenerationDone) and end.num_cached_tokens == len(first) + len(answer)
    assert tuple(tokens) == expected and beside[0].tokens == alone
    assert cached(again) == len(second) + len(tokens)


@sampled_cells(lambda family, where: (family, where) == ("qwen3_5", "prefill"))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("where", ["prefill", "answer"])
def test_a_cancelled_row_leaves_all_that_it_took_over_and_computed(family: str, where: str) -> None:
    """Whoever goes on with its conversation finds what was kept before and more."""
    with full_engine(family, NUM_ALL_TOKENS, 0.99, prefill_step_size=16) as engine:
        said = conversation_of(family)
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        generate(engine, turn(first))
        running = engine.submit(turn(second))
        for batch in running.batches(60):
            has_begun = any(isinstance(event, TokenDelta) for event in batch)
            num_done = max([event.num_done_tokens for event in batch if isinstance(event, PrefillProgress)], default=0)
            if has_begun or (where == "prefill" and num_done >= len(first) + len(answer)):
                running.cancel()
        warm = generate(engine, turn(second))[0]
        check(engine)
    assert_exact(warm, expected)
    assert cached(warm) >= len(first) + len(answer)


def test_a_row_that_the_watchdog_ended_leaves_what_it_took_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its answer stays, and all that was kept before."""
    with full_engine("qwen3_5", NUM_ALL_TOKENS, 0.9) as engine:
        said = conversation_of("qwen3_5")
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        generate(engine, turn(first))
        with monkeypatch.context() as patch:
            let_watchdog_end(patch, lambda row: bool(row.generated))
            assert collect(engine.submit(turn(second))).end.reason == "watchdog"  # type: ignore[union-attr]
        warm = generate(engine, turn(second))[0]
        check(engine)
    assert_exact(warm, expected)
    assert cached(warm) == len(first) + len(answer)


def test_rows_that_others_need_are_not_moved() -> None:
    """Another conversation goes on from the same beginning: it stays, and the rest of the row moves."""
    with full_engine("qwen3", NUM_ALL_TOKENS + 300, 0.99) as engine, moves_counted() as moves:
        said = conversation_of("qwen3")
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        other = [*first[:96], *prompt_of(60, 5)]
        alone = cold(engine, [*other, *prompt_of(9, 6)], 8)
        generate(engine, turn(other, 8))
        generate(engine, turn(first))
        warm = generate(engine, turn(second))[0]
        again = generate(engine, turn([*other, *prompt_of(9, 6)], 8))[0]
        check(engine)
    assert moves["out"] == 1
    assert_exact(warm, expected)
    assert_exact(again, alone)
    assert cached(warm) == len(first) + len(answer) and cached(again) >= 96


@sampled_cells(lambda family, is_ephemeral: family == "qwen3_5" and not is_ephemeral)
@pytest.mark.parametrize("is_ephemeral", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_moved_kv_is_written_to_disk_and_comes_back_from_it(family: str, is_ephemeral: bool, tmp_path: Path) -> None:
    """With a disk the next turn finds all, and so does one after a restart."""
    disk = DiskSettings(tmp_path, 2**34, 0, 24, is_ephemeral=is_ephemeral)
    with full_engine(family, NUM_ALL_TOKENS, 0.99, disk=disk) as engine:
        said = conversation_of(family)
        first, answer, second, expected = said.first, said.answer, said.second, said.expected
        generate(engine, turn(first))
        warm = generate(engine, turn(second))[0]
        check(engine)
    assert_exact(warm, expected)
    assert cached(warm) == len(first) + len(answer)
    if is_ephemeral:
        return
    with full_engine(family, NUM_ALL_TOKENS, 0.99, disk=disk) as engine:
        after = generate(engine, turn(second))[0]
        check(engine)
    assert_exact(after, expected)
    assert cached(after) >= len(first) + len(answer)
