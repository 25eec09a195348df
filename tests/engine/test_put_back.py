"""A row that is put back, because all rows have outgrown the memory: it goes on behind the last token that it drew and
computes nothing again, whatever its caches are."""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.core import GenerationDone, TokenDelta
from kvserve.engine import decode, turn_order
from kvserve.engine import rows as rows_module
from kvserve.engine.admission import Admission
from kvserve.engine.cache_records import Totals
from kvserve.engine.decode_group import drawn_token
from kvserve.engine.rows import Row
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    LOGIT_TOLERANCE,
    assert_exact,
    cached,
    collect,
    generate,
    held,
    let_prompts_take_no_time,
    prompt_of,
    request,
    running_engine,
)
from tests.engine.full_engines import (
    NUM_ALL_TOKENS,
    NUM_ANSWER_TOKENS,
    check,
    cold,
    conversation_of,
    full_engine,
    turn,
)
from tests.engine.moving_rows import BESIDE, put_back_after, put_backs_counted, with_row_beside
from tests.engine.odd_caches import Unmergeable, use_cache
from tests.laws import IS_FULL, THREE_KINDS, sampled


@pytest.mark.parametrize("is_alone", sampled((True, False), {False}))
@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5", "gemma3"), {"qwen3_5"}))
def test_a_row_that_is_put_back_computes_nothing_again(
    family: str, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on behind what it has handed out, also where states stand at one place only, and writes the same."""
    with full_engine(family, NUM_ALL_TOKENS + 400, 0.99) as engine, put_backs_counted() as rows:
        said = conversation_of(family)
        generate(engine, turn(said.first))
        if is_alone:
            monkeypatch.setattr("kvserve.engine.decode.extra_padding_tokens", lambda *_: 10**12)
        put_back_after(3, said.second, monkeypatch)
        before = engine.cache_report().totals.num_prefill_tokens
        found = with_row_beside(engine, turn(said.second))
        num_computed = engine.cache_report().totals.num_prefill_tokens - before
        check(engine)
    assert len(rows) == 1
    assert_exact(found, said.expected)
    assert num_computed <= len(said.second) - said.num_kept + len(BESIDE) + 1


@pytest.mark.parametrize("ends", sampled(("stop", "length"), {"stop"}))
def test_a_row_whose_next_token_is_its_last_ends_instead_of_waiting(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That token is drawn already: its client hears the end, and the next turn goes on from all but this token."""
    with full_engine("qwen3_5", NUM_ALL_TOKENS + 400, 0.99) as engine, put_backs_counted() as rows:
        said = conversation_of("qwen3_5")
        num_tokens = next(k for k in range(3, NUM_ANSWER_TOKENS) if said.expected[k] not in said.expected[:k])
        wanted = turn(said.second, num_tokens + 1)
        if ends == "stop":
            wanted = replace(turn(said.second), stop_tokens=frozenset([said.expected[num_tokens]]))
        expected = said.expected[: num_tokens + (ends == "length")]
        third = [*said.second, *said.expected[: num_tokens + 1], *prompt_of(9, 4)]
        last = cold(engine, third, 8)
        generate(engine, turn(said.first))
        put_back_after(num_tokens, said.second, monkeypatch)
        found = with_row_beside(engine, wanted)
        again = generate(engine, turn(third, 8))[0]
        check(engine)
    assert rows == []
    assert_exact(found, expected)
    assert isinstance(found.end, GenerationDone)
    assert (found.end.reason, found.end.num_generated_tokens) == (ends, num_tokens + 1)
    assert_exact(again, last)
    assert cached(again) == len(said.second) + num_tokens


def test_a_row_that_is_put_back_while_its_step_breaks_is_computed_from_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next token cannot be read: its batch begins again, as where a step raises."""

    def broken(*_: Any) -> int | None:
        monkeypatch.setattr(decode, "drawn_token", drawn_token)
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    lines: list[str] = []
    with full_engine("qwen3_5", NUM_ALL_TOKENS + 400, 0.99, report=lines.append) as engine:
        said = conversation_of("qwen3_5")
        monkeypatch.setattr(decode, "drawn_token", broken)
        put_back_after(4, said.second, monkeypatch)
        found = with_row_beside(engine, turn(said.second))
        check(engine)
    assert any("A decode batch failed" in line for line in lines)
    assert_exact(found, said.expected)


@pytest.mark.parametrize("is_batched", [True, False])
def test_what_is_told_of_the_tokens_of_a_row_that_is_put_back(
    is_batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch or by itself: each token comes once, with its own log-probabilities."""
    if not is_batched:
        use_cache(monkeypatch, Unmergeable)
    prompt = prompt_of(170, 1)

    def told(engine: Engine) -> tuple[list[TokenDelta], int]:
        engine.clear_cache()
        before = engine.cache_report().totals.num_prefill_tokens
        with held(engine):
            other = engine.submit(request(BESIDE, NUM_ANSWER_TOKENS))
            batches = engine.submit(replace(request(prompt, 12), num_top_logprobs=2)).batches(60)
        events = [event for batch in batches for event in batch if isinstance(event, TokenDelta)]
        collect(other)
        return events, engine.cache_report().totals.num_prefill_tokens - before

    with running_engine() as engine, put_backs_counted() as rows:
        alone, _ = told(engine)
        put_back_after(3, prompt, monkeypatch)
        again, num_computed = told(engine)
    assert len(rows) == 1
    assert num_computed == len(prompt) + len(BESIDE) + 1
    assert [event.token for event in again] == [event.token for event in alone]
    for one, other in zip(alone, again, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert abs(one.logprobs.logprob - other.logprobs.logprob) <= LOGIT_TOLERANCE


def test_a_seeded_row_that_is_put_back_draws_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random keys are those of the places of its tokens: its text is the one that it has undisturbed."""
    prompt = prompt_of(70, 1)
    wanted = request(prompt, 12, temperature=1.0, seed=5)
    with running_engine() as engine, put_backs_counted() as rows:
        alone = with_row_beside(engine, wanted)
        put_back_after(3, prompt, monkeypatch)
        again = with_row_beside(engine, wanted)
    assert len(rows) == 1
    assert_exact(again, alone.tokens)


def test_the_time_that_a_row_waits_again_is_not_the_watchdogs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes nothing then: a row that waited for another one's long answer was ended for it."""
    late_seconds, real, prompt = 0, Admission.admits, prompt_of(70, 1)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_seconds)
    monkeypatch.setattr(rows_module, "time", clock)
    monkeypatch.setattr(turn_order, "time", clock)

    def admits(self: Admission, row: Row, running: Sequence[Row], num_waiting: int) -> bool:
        nonlocal late_seconds
        if row.generated and not late_seconds:
            late_seconds = 1000
            return False
        return real(self, row, running, num_waiting)

    with running_engine(watchdog_seconds=500) as engine, put_backs_counted() as rows:
        alone = with_row_beside(engine, request(prompt, 12))
        put_back_after(3, prompt, monkeypatch)
        monkeypatch.setattr(Admission, "admits", admits)
        computing, waiting = generate(engine, request(BESIDE, NUM_ANSWER_TOKENS), request(prompt, 12))
    assert len(rows) == 1
    assert isinstance(computing.end, GenerationDone) and isinstance(waiting.end, GenerationDone)
    assert (computing.end.reason, waiting.end.reason) == ("watchdog", "length")
    assert_exact(waiting, alone.tokens)


def test_a_row_that_is_put_back_before_its_first_token_has_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it begins from then it has computed itself: its client is told of none of it, and it counts once."""
    prompt = prompt_of(70, 1)
    with running_engine() as engine, put_backs_counted() as rows:
        put_back_after(0, prompt, monkeypatch)
        found = with_row_beside(engine, request(prompt, 4))
        totals = engine.cache_report().totals
    assert len(rows) == 1
    assert cached(found) == 0
    assert [(each.num_cached_tokens, each.reuse.tier) for each in found.progress] == [(0, "nothing")] * len(
        found.progress
    )
    assert totals == Totals(len(prompt) + len(BESIDE), 0, len(prompt) + len(BESIDE) + 1)


@pytest.mark.parametrize("family", sampled(THREE_KINDS, ("qwen3_5",)))
def test_a_row_that_is_put_back_waits_until_there_is_room(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lets it in counts as who puts it back: it came and went thousands of times, and the other one stood still."""
    num_room, num_tokens = (680, 200) if IS_FULL else (520, 110)  # where windows are, a row outgrows later
    monkeypatch.setattr(rows_module, "ANSWER_ALLOWANCE_TOKENS", NUM_ANSWER_TOKENS)
    monkeypatch.setattr(decode, "extra_padding_tokens", lambda *_: 10**12)  # each by itself, as of other lengths
    let_prompts_take_no_time(monkeypatch)  # the first is there still when the second comes
    with full_engine(family, num_room, 0.99) as engine, put_backs_counted() as rows:
        ends = [found.end for found in generate(engine, *(request(prompt_of(60, seed), num_tokens) for seed in (0, 1)))]
        check(engine)
    assert [end.reason for end in ends if isinstance(end, GenerationDone)] == ["length"] * 2
    assert len(rows) == 1
