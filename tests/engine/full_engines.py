"""Engines whose memory for KV one row takes most of, and the conversation that fills it: what the tests of KV that
moves share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from kvserve.core import GenerationRequest
from kvserve.engine import admission
from kvserve.engine.kv_moves import KvMoves
from kvserve.engine.model import KvSize
from kvserve.engine.worker import Engine
from tests.engine import engines
from tests.engine.engines import CACHE, prompt_of, running_engine
from tests.integrity import check_integrity
from tests.laws import IS_FULL

NUM_ANSWER_TOKENS = 48 if IS_FULL else 24
NUM_PROMPT_TOKENS = 892 - 2 * NUM_ANSWER_TOKENS
"""Longer where answers are shorter: the same memory is full."""

NEXT_TOKENS = 52
NUM_ALL_TOKENS = NUM_PROMPT_TOKENS + 2 * NUM_ANSWER_TOKENS + NEXT_TOKENS + 8
"""Two turns, and a few tokens of a third one."""


def turn(tokens: Sequence[int], max_tokens: int = NUM_ANSWER_TOKENS) -> GenerationRequest:
    """As everywhere, with the answers of these tests."""
    return engines.turn(tokens, max_tokens)


def cold(engine: Engine, tokens: Sequence[int], max_tokens: int = NUM_ANSWER_TOKENS) -> tuple[int, ...]:
    """As everywhere, with the answers of these tests."""
    return engines.cold(engine, tokens, max_tokens)


def budget_bytes(sizes: KvSize, num_tokens: int, share: float) -> int:
    """A memory for KV of which a row of so many tokens takes this share at its peak."""
    peak_bytes = sizes.peak(num_tokens)
    return int((peak_bytes + sizes.copied(peak_bytes)) / share)


@contextmanager
def full_engine(family: str, num_tokens: int, share: float, **settings: Any) -> Iterator[Engine]:
    """An engine in which a row of so many tokens takes this share of the memory for KV. Rows are counted with the
    answers that they get here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "ANSWER_ALLOWANCE_TOKENS", NUM_ANSWER_TOKENS)
        num_bytes = budget_bytes(_sizes_of(family), num_tokens, share)
        kept = replace(CACHE, max_bytes=num_bytes)
        with running_engine(family, cache=kept, max_batch_bytes=num_bytes, **settings) as engine:
            yield engine


@cache
def _sizes_of(family: str) -> KvSize:
    with running_engine(family) as engine:
        return engine.wait_until_ready().sizes


@dataclass(frozen=True, slots=True)
class Conversation:
    """Two turns, and what a cold server answers to each; then a few tokens of a third one, and of its answer."""

    first: list[int]
    answer: tuple[int, ...]
    second: list[int]
    expected: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def num_kept(self) -> int:
        """What the second turn finds."""
        return len(self.first) + len(self.answer)

    def third(self) -> list[int]:
        """A prompt that goes on from the second answer."""
        return [*self.second, *self.expected, *prompt_of(4, 2)]


def conversation_with(engine: Engine) -> Conversation:
    """What this engine says; nothing is kept of it."""
    first = prompt_of(NUM_PROMPT_TOKENS)
    answer = cold(engine, first)
    second = [*first, *answer, *prompt_of(NEXT_TOKENS, 1)]
    expected = cold(engine, second)
    return Conversation(first, answer, second, expected, cold(engine, [*second, *expected, *prompt_of(4, 2)], 4))


@cache
def conversation_of(family: str) -> Conversation:
    """What every engine of a family in full precision says, whatever its memory: computed once per process, by one that
    has enough of it."""
    with running_engine(family) as engine:
        return conversation_with(engine)


@contextmanager
def moves_counted() -> Iterator[Counter[str]]:
    """How often KV left the tree for a row, and moved into it."""
    counted: Counter[str] = Counter()

    def counting(name: str, way: str) -> Any:
        real = getattr(KvMoves, name)

        def counted_too(self: KvMoves, *args: Any, **options: Any) -> Any:
            counted[way] += 1
            return real(self, *args, **options)

        return counted_too

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvMoves, "restore", counting("restore", "out"))
        patch.setattr(KvMoves, "_insert_moved", counting("_insert_moved", "in"))
        yield counted


def check(engine: Engine) -> None:
    """The tree adds up, and nothing is held besides: neither states, nor a row that is counted and gone."""

    def look(scheduler: Any) -> None:
        check_integrity(scheduler.cache._tree)
        assert scheduler.cache.kv_moves.held_bytes == 0 == scheduler._cache_leases.transit_bytes
        assert scheduler.cache.kv_room.leased_bytes() == 0
        scheduler._account()
        assert scheduler.cache.kv_room.memory.held("live") == scheduler.warmer.live_bytes()

    engine._ask(look)
