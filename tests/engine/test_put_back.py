"""A row that is put back, because all rows have outgrown the memory: it goes on behind the last token that it drew and
computes nothing again, whatever its caches are."""

from dataclasses import replace
from typing import Any

import pytest

from kvserve.core import GenerationDone
from kvserve.engine import decode
from kvserve.engine.drawn_token import drawn_token
from tests.engine.engines import (
    NUM_ANSWER_TOKENS,
    assert_exact,
    cached,
    cold,
    generate,
    prompt_of,
    request,
    turn,
)
from tests.engine.full_engines import NUM_ALL_TOKENS, check, conversation_of, full_engine
from tests.engine.moving_rows import put_back_after, put_backs_counted

BESIDE = prompt_of(20, 7)
"""A row that came before, so that it stays."""


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_a_row_that_is_put_back_computes_nothing_again(
    family: str, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on behind what it has handed out, also where states stand at one place only, and writes the same."""
    with full_engine(family, NUM_ALL_TOKENS + 400, 0.99) as engine, put_backs_counted() as rows:
        said = conversation_of(engine)
        generate(engine, turn(said.first))
        if is_alone:
            monkeypatch.setattr("kvserve.engine.decode.extra_padding_tokens", lambda *_: 10**12)
        put_back_after(3, said.second, monkeypatch)
        before = engine.cache_report().totals.num_prefill_tokens
        _, found = generate(engine, request(BESIDE, NUM_ANSWER_TOKENS), turn(said.second))
        num_computed = engine.cache_report().totals.num_prefill_tokens - before
        check(engine)
    assert len(rows) == 1
    assert_exact(found, said.expected)
    assert num_computed <= len(said.second) - said.num_kept + len(BESIDE) + 1


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_a_row_whose_next_token_is_its_last_ends_instead_of_waiting(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That token is drawn already: its client hears the end, and the next turn goes on from all but this token."""
    with full_engine("qwen3_5", NUM_ALL_TOKENS + 400, 0.99) as engine, put_backs_counted() as rows:
        said = conversation_of(engine)
        num_tokens = next(k for k in range(3, NUM_ANSWER_TOKENS) if said.expected[k] not in said.expected[:k])
        wanted = turn(said.second, num_tokens + 1)
        if ends == "stop":
            wanted = replace(turn(said.second), stop_tokens=frozenset([said.expected[num_tokens]]))
        expected = said.expected[: num_tokens + (ends == "length")]
        third = [*said.second, *said.expected[: num_tokens + 1], *prompt_of(9, 4)]
        last = cold(engine, third, 8)
        generate(engine, turn(said.first))
        put_back_after(num_tokens, said.second, monkeypatch)
        _, found = generate(engine, request(BESIDE, NUM_ANSWER_TOKENS), wanted)
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
        said = conversation_of(engine)
        expected = cold(engine, BESIDE)
        monkeypatch.setattr(decode, "drawn_token", broken)
        put_back_after(4, said.second, monkeypatch)
        beside, found = generate(engine, request(BESIDE, NUM_ANSWER_TOKENS), turn(said.second))
        check(engine)
    assert any("A decode batch failed" in line for line in lines)
    assert_exact(found, said.expected)
    assert_exact(beside, expected)
