"""KV that moves: a row that takes more than half of the memory for KV is found again whole, because it gives its own KV
away at its end, and takes what is kept of it at its beginning."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvserve.engine import admission
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CACHE,
    NUM_ANSWER_TOKENS,
    assert_exact,
    cached,
    cold,
    generate,
    prompt_of,
    running_engine,
    turn,
)
from tests.laws import sampled

FAMILIES = sampled(("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite"), {"qwen3", "qwen3_5", "gemma3"})
NUM_PROMPT_TOKENS = 796
NEXT_TOKENS = 52


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted with the answers that they get here."""
    monkeypatch.setattr(admission, "ANSWER_ALLOWANCE_TOKENS", NUM_ANSWER_TOKENS)


def budget_bytes(engine: Engine, num_tokens: int, share: float) -> int:
    """A memory for KV of which a row of so many tokens takes this share at its peak."""
    sizes = engine.wait_until_ready().sizes
    peak_bytes = sizes.peak(num_tokens)
    return int((peak_bytes + sizes.copied(peak_bytes)) / share)


@contextmanager
def full_engine(family: str, num_tokens: int, share: float, **settings: Any) -> Iterator[Engine]:
    """An engine in which a row of so many tokens takes this share of the memory for KV."""
    with running_engine(family) as engine:
        num_bytes = budget_bytes(engine, num_tokens, share)
    cache = replace(CACHE, max_bytes=num_bytes)
    with running_engine(family, cache=cache, max_batch_bytes=num_bytes, **settings) as engine:
        yield engine


def turns_of(engine: Engine) -> tuple[list[int], tuple[int, ...], list[int], tuple[int, ...]]:
    """Two turns of a conversation and what a cold server answers to each."""
    first = prompt_of(NUM_PROMPT_TOKENS)
    answer = cold(engine, first)
    second = [*first, *answer, *prompt_of(NEXT_TOKENS, 1)]
    return first, answer, second, cold(engine, second)


NUM_ALL_TOKENS = NUM_PROMPT_TOKENS + 2 * NUM_ANSWER_TOKENS + NEXT_TOKENS


def check(engine: Engine) -> None:
    """The tree adds up, and nothing is held besides."""

    def look(scheduler: Any) -> None:
        scheduler.cache.check_integrity()
        assert scheduler.cache.moving.held_bytes == 0

    engine._ask(look)


@pytest.mark.parametrize("share", [0.65, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_most_of_the_memory_is_found_again_whole(family: str, share: float) -> None:
    """Its next turn computes what is new, and writes what a cold server writes; so does the one after that."""
    lines: list[str] = []
    with full_engine(family, NUM_ALL_TOKENS, share, report=lines.append) as engine:
        first, answer, second, expected = turns_of(engine)
        assert_exact(generate(engine, turn(first))[0], answer)
        warm = generate(engine, turn(second))[0]
        again = generate(engine, turn(second))[0]
        check(engine)
    assert_exact(warm, expected)
    assert_exact(again, expected)
    assert cached(warm) == len(first) + len(answer), lines
    assert cached(again) >= len(first) + len(answer)
    assert lines == []
