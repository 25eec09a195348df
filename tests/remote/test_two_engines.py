"""What one engine computed, another one with a folder of its own reads from the shared cache: the same text, and no
byte of it believed before it is proved."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvserve.core.keeping import Scope
from kvserve.identity.owner import belongs_to
from kvserve.remote.redis_link import Command, LinkFailed
from tests.engine.engines import (
    MESSAGE_TOKENS,
    Result,
    assert_exact,
    cached,
    cold,
    generate,
    prompt_of,
    running_engine,
    turn,
)
from tests.laws import sampled
from tests.remote.fake_redis import FakeRedis
from tests.remote.shared_engines import settle, sharing_engine, stats_of

OWNER = "key.user/session"
CONVERSATION = prompt_of(6 * MESSAGE_TOKENS)
NUM_TOKENS = 12


def asked(tokens: Sequence[int], owner: str = OWNER, max_tokens: int = NUM_TOKENS):  # type: ignore[no-untyped-def]
    return replace(turn(list(tokens), max_tokens), owner=owner)


@cache
def _cold_tokens(family: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    with running_engine(family) as engine:
        return cold(engine, tokens, NUM_TOKENS)


def cold_tokens(family: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """What a server writes that has seen nothing."""
    return _cold_tokens(family, tuple(tokens))


def computed(redis: FakeRedis, folder: Path, family: str = "qwen3", owner: str = OWNER) -> list[int]:
    """A conversation of two turns that one engine has computed, and sent; returns the third turn's prompt."""
    with sharing_engine(redis, folder, family) as (engine, shared):
        [first] = generate(engine, asked(CONVERSATION, owner))
        second = [*CONVERSATION, *first.tokens, *prompt_of(MESSAGE_TOKENS, 7)]
        [answer] = generate(engine, asked(second, owner))
        settle(engine, shared)
    return [*second, *answer.tokens, *prompt_of(5, 9)]


def why(result: Result) -> str | None:
    """Why the shared cache gave a row no more."""
    unshared = result.progress[-1].reuse.unshared
    return unshared.reason if unshared is not None else None


@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5", "gemma3"), {"gemma3"}))
def test_another_server_goes_on_with_what_one_computed(family: str, tmp_path: Path) -> None:
    """It computes the new message and little more, writes what a server writes that remembers nothing, and sends
    nothing that is there already."""
    redis = FakeRedis()
    third = computed(redis, tmp_path / "one", family)
    num_sent = len(redis.keys("b"))
    assert num_sent and redis.keys("m") and redis.keys("i") and redis.keys("u")
    with sharing_engine(redis, tmp_path / "other", family) as (engine, shared):
        [warm] = generate(engine, asked(third))
        settle(engine, shared)
        stats = stats_of(engine)
        assert cached(warm) >= 0.9 * len(third)
        assert stats.fetched.num_found == 1 and stats.fetched.num_read > 0 and stats.faults == {}
        assert why(warm) is None
    sent = [command[1] for command in redis.commands if command[0] == "SET" and ":b:" in str(command[1])]
    assert len(sent) == len(set(sent)) == len(redis.keys("b")) > num_sent
    assert_exact(warm, cold_tokens(family, third))


def test_what_was_altered_there_is_computed(tmp_path: Path) -> None:
    """One byte in each part: the text is right, it is counted, and what is of no use is removed there."""
    redis = FakeRedis()
    third = computed(redis, tmp_path / "one")
    for key in redis.keys("b"):
        value = bytearray(redis.values[key])
        value[-40] ^= 1
        redis.values[key] = bytes(value)
    with sharing_engine(redis, tmp_path / "other") as (engine, shared):
        [answer] = generate(engine, asked(third))
        assert cached(answer) == 0 and stats_of(engine).faults == {"damaged": 1}
        assert stats_of(engine).fetched.num_given_up == 1
        assert why(answer) == "damaged"
        settle(engine, shared)
    assert_exact(answer, cold_tokens("qwen3", third))


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_server_that_fails_or_is_silent_costs_a_moment(is_silent: bool, tmp_path: Path) -> None:
    """The row goes on within its bound, and no other row waits for what did not answer the first."""
    redis = FakeRedis()
    third = computed(redis, tmp_path / "one")
    with sharing_engine(redis, tmp_path / "other") as (engine, shared):
        link = shared.server.asks_link

        def fail(commands: Sequence[Command]) -> None:
            if commands and commands[0][0] == "MGET":
                if is_silent:
                    link.wait_for_hang_up(30)  # type: ignore[attr-defined]
                raise LinkFailed("unreachable", "gone")

        redis.on_run = fail
        [answer] = generate(engine, asked(third))
        stats = stats_of(engine)
        assert cached(answer) == 0 and not shared.server.breaker.is_closed
        assert stats.fetched.longest_wait_seconds < 15.0 and sum(stats.faults.values()) > 0
        [after] = generate(engine, asked(prompt_of(3 * MESSAGE_TOKENS, 11)))
        assert (why(answer), why(after)) == ("silent", "away")
    assert_exact(answer, cold_tokens("qwen3", third))


def test_whoever_is_forgotten_here_is_gone_there(tmp_path: Path) -> None:
    """From the disk and from the shared cache, while the other's conversation stays."""
    redis, scope = FakeRedis(), Scope(session="session", principal="key.user")
    third = computed(redis, tmp_path / "one", owner="key.user/other")
    num_others = len(redis.keys("b"))
    with sharing_engine(redis, tmp_path / "one") as (engine, shared):
        generate(engine, asked([*CONVERSATION, *prompt_of(100, 3)]))
        settle(engine, shared)
        assert len(redis.keys("b")) > num_others
        with shared.forgetting(scope) as is_gone:
            engine.forget(lambda name: belongs_to(name, scope))
        assert is_gone and len(redis.keys("b")) == num_others
        [answer] = generate(engine, asked(third))
        assert cached(answer) >= 0.9 * len(third)


def test_what_comes_from_there_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that waits longer than the watchdog lets one stand still is not ended as long as parts arrive."""
    for module in ("remote_keys", "remote_fetch", "remote_sending"):
        monkeypatch.setattr(f"kvserve.cache.{module}.PART_BYTES", 4096)
    monkeypatch.setattr("kvserve.cache.remote_fetch.MAX_STEP_PARTS", 1)
    monkeypatch.setattr("kvserve.cache.remote_fetch.LOOK_SECONDS", 30.0)
    redis = FakeRedis()
    third, num_slow = computed(redis, tmp_path / "one"), [0]

    def read(commands: Sequence[Command]) -> None:
        if commands and commands[0][0] == "GET" and ":b:" in str(commands[0][1]) and num_slow[0] < 5:
            num_slow[0] += 1
            time.sleep(0.3)

    with sharing_engine(redis, tmp_path / "other") as (engine, _):
        engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 1.0))
        redis.on_run = read
        [answer] = generate(engine, asked(third))
        assert num_slow == [5] and stats_of(engine).fetched.longest_wait_seconds > 1.4
        assert answer.end is not None and answer.end.reason == "length" and cached(answer) >= 0.9 * len(third)
