"""Servers that share a real Redis, for the tests of what travels between them: how they start, are talked to and are
waited for. It knows no test."""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.redis_servers import RedisServer, redis_server
from tests.serving import AppUnderTest, Chat, serving_app, writing

SESSION = {"x-session-id": "the-session"}
OTHER_SESSION = {"x-session-id": "another"}
NUM_TURNS = 6
WAIT_SECONDS = 60.0
BOUND_SECONDS = 2.5
"""A look of 0.5 s, and what a read may be silent, on a machine that does something else too."""


def eventually(check: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def remote(app: AppUnderTest) -> dict[str, Any]:
    return dict(app.get("/v1/cache").json["remote"])


def settle(app: AppUnderTest) -> None:
    """Wait until all that it computed is there."""

    def is_settled() -> bool:
        body = app.get("/v1/cache").json
        records = body["remote"].get("records")
        is_told = records is None or records["num_queued"] == 0
        return is_told and body["disk"]["num_queued_bytes"] == 0 and body["remote"]["num_queued"] == 0

    time.sleep(0.6)  # what was written last is offered once its user is noted
    eventually(is_settled, "what was computed is not sent")
    time.sleep(0.3)


def is_up(app: AppUnderTest) -> bool:
    return bool(app.health()["shared_cache"] == "up")


def is_open(app: AppUnderTest) -> bool:
    """Whether it asks now: while somebody is forgotten it does not."""
    shared = app.app._shared
    return shared is not None and shared.server.is_open


def server_on(folder: Path, url: str | None, family: str = "qwen3", **settings: Any):  # type: ignore[no-untyped-def]
    return serving_app(folder, family, remote_cache_url=url, **settings)


WORDS = "the quick brown fox jumps over the lazy dog and comes back to tell of it "


SAID = "The dog barks, and the fox goes home."
"""What the model writes: a text whose tokens are those that it is read back in."""


def conversation(
    app: AppUnderTest, num_turns: int = NUM_TURNS, headers: Mapping[str, str] = SESSION, first: str = ""
) -> list[Any]:
    """The messages of so many turns, the client sending back all that it was answered; then one more question."""
    messages: list[Any] = [{"role": "system", "content": f"{first}You help. " + 6 * WORDS}]
    with writing(app, SAID) as fields:
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"Question {number}: {WORDS}"})
            answer = app.chat(messages, headers=headers, **fields)
            messages.append({"role": "assistant", "content": answer.content})
    return [*messages, {"role": "user", "content": "And now?"}]


def forget(app: AppUnderTest, query: str) -> dict[str, Any]:
    with app.connect() as client:
        return dict(client.request("DELETE", f"/v1/cache?{query}", None, {"Connection": "close"}).json)


def ids_of(app: AppUnderTest, words: str) -> bytes:
    """Token ids of some words as blobs have them, without the first and the last, which may be other ones in a text."""
    return array("I", app.served.tokenizer.encode(words)[1:-1]).tobytes()


def prompt_tokens(chat: Chat) -> int:
    assert chat.usage is not None
    return int(chat.usage["prompt_tokens"])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models compute faster than many a disk reads; where the rule is the matter a test says so."""
    monkeypatch.setattr("kvserve.cache.remote_fetch.saved_seconds", lambda num_tokens, *_: float(num_tokens))
    monkeypatch.setattr("kvserve.cache.remote_tier.saved_seconds", lambda num_tokens, *_: float(num_tokens))
    monkeypatch.setattr("kvserve.cache.remote_tier.LOOKS_WORTH", 0.0)
