"""What shared records cost the request that waits for them, and what is counted of rows that cannot travel."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvserve.core import Message
from kvserve.identity import shared_records
from kvserve.remote.shared_rows import MAX_FIELDS
from tests.remote.fake_redis import FakeRedis
from tests.test_identity import SYSTEM, asked, said
from tests.test_shared_records import AND, DO_IT, ECHO, WROTE, Site, is_known


def counted(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 0.0) -> list[Any]:
    """The first argument of each call of what `shared_records` calls so, which takes so long."""
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(shared_records, name)

    def call(first: Any, *rest: Any) -> Any:
        calls.append(first)
        time.sleep(seconds)
        return real(first, *rest)

    monkeypatch.setattr(shared_records, name, call)
    return calls


def test_what_was_sent_as_it_was_read_is_looked_at_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its identity is known. That of what the model wrote is found out, and counts as waiting."""
    one = Site(redis := FakeRedis())
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    one.answer(asked(SYSTEM, DO_IT, ECHO, AND), said("assistant", "More."))
    sent = asked(SYSTEM, DO_IT, ECHO, AND, said("assistant", "More."), DO_IT)
    looked: list[Message] = counted(monkeypatch, "canonicalise", 0.03)
    other = Site(redis)
    assert is_known(other.read(sent)) and other.shared.totals().num_messages == 5
    assert {message.role for message in looked} == {"assistant"}
    assert 0.06 <= other.shared.totals().longest_wait_seconds < 2.0


def test_a_row_that_is_too_large_is_counted_and_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its path is told; behind it nothing is known elsewhere."""
    one, other = Site(redis := FakeRedis()), Site(redis)
    monkeypatch.setattr(shared_records, "MAX_ROW_BYTES", 300)
    packed = counted(monkeypatch, "packed")
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    assert len(packed) == 3 and len(redis.keys("r")) == 2
    one.answer(asked(SYSTEM, DO_IT, ECHO, AND), None)
    assert len(packed) == 4 and one.shared.totals().num_unsendable == 1
    assert other.read(asked(SYSTEM, DO_IT, ECHO, AND)).messages[2] == ECHO
    assert other.shared.totals().num_messages == 2 and other.shared.totals().num_unsendable == 0


def test_a_place_with_too_many_readings_is_counted() -> None:
    """Nothing behind it is known, for as long as they are there."""
    one, other = Site(redis := FakeRedis()), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    for key in redis.keys("r"):
        redis.values[key] = {f"field{number}": b"x" for number in range(MAX_FIELDS + 1)}
    other.read(asked(SYSTEM, DO_IT, ECHO, AND))
    totals = other.shared.totals()
    assert (totals.num_crowded, totals.num_messages, totals.num_refused) == (1, 0, 0)
