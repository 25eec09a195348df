"""Records of conversations travel through a real Redis: another server writes the prompt that the first one would have
written, finds its KV, and is told nothing by whoever altered a row."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.sharing import (
    BOUND_SECONDS,
    OTHER_SESSION,
    SESSION,
    WORDS,
    _reading_pays,
    eventually,
    forget,
    is_open,
    is_up,
    prompt_tokens,
    redis,
    remote,
    server_on,
    settle,
)
from tests.redis_servers import RedisServer
from tests.serving import AppUnderTest, Chat, writing

__all__ = ["_reading_pays", "redis"]
pytestmark = pytest.mark.e2e

SECRET = "a-secret-of-all-these-servers"
NUM_TURNS = 8
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "depth": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class Told:
    """What the model writes in turn number so and so, and what requests say besides."""

    says: Callable[[int], str]
    fields: Mapping[str, Any]
    in_letters: bool = False


SAID = "Dog {0} barks, and the fox goes home."
CALL = '<tool_call>\n{{"name": "look",  "arguments": {{"depth": {0},   "place": "a  b"}}}}\n</tool_call>'
THOUGHT = "I think of dog number {0}.\n</think>\n\n"

THINKING = Told(("<think>\n" + THOUGHT + CALL).format, {"tools": [LOOK]})
"""Its template drops thinking before the last question of a user: the loop has one."""

OPENED = Told((THOUGHT + SAID).format, {})
"""Its template opens the thinking, and keeps all of it."""

IN_LETTERS = Told(SAID.format, {}, in_letters=True)
CALLS = Told(CALL.format, {"tools": [LOOK]})


def sharing(folder: Path, redis: RedisServer, family: str = "qwen3", **settings: Any):  # type: ignore[no-untyped-def]
    return server_on(folder, redis.url, family, **{"proxy_secret": SECRET, **settings})


def led(app: AppUnderTest, told: Told, headers: Mapping[str, str] = SESSION, first: str = "") -> list[Any]:
    """A conversation whose client sends no thinking back, and writes calls anew; then one more question."""
    messages: list[Any] = [{"role": "system", "content": f"{first}You help. " + 6 * WORDS}]
    for number in range(NUM_TURNS):
        if messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": f"Question {number}: {WORDS}"})
        with writing(app, told.says(number), in_letters=told.in_letters) as script:
            answer = app.chat(messages, headers=headers, max_tokens=200, **{**told.fields, **script})
        assert answer.finish_reason != "length" and bool(answer.reasoning) == ("</think>" in told.says(number))
        messages += echoed(answer, number)
    return messages if messages[-1]["role"] == "tool" else [*messages, {"role": "user", "content": "And now?"}]


def echoed(answer: Chat, number: int) -> list[Any]:
    if not answer.calls:
        assert answer.content
        return [{"role": "assistant", "content": answer.content}]
    calls = [
        {
            "id": f"call{number}{place:08d}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(json.loads(arguments), sort_keys=True, indent=1)},
        }
        for place, (name, arguments) in enumerate(answer.calls)
    ]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": f"Nothing: {WORDS}"} for each in calls]
    return [{"role": "assistant", "content": answer.content or None, "tool_calls": calls}, *results]


def records(app: AppUnderTest) -> dict[str, Any]:
    return dict(remote(app)["records"])


def share_computed(chat: Chat) -> float:
    return 1 - (chat.num_cached_tokens or 0) / prompt_tokens(chat)


def computed_without(told: Told, redis: RedisServer, folder: Path, messages: list[Any], family: str) -> float:
    """The share that a server computes to which no record comes: its secret is another one."""
    with sharing(folder, redis, family, proxy_secret="another-secret-of-others") as app:
        eventually(lambda: is_up(app), "no connection")
        return share_computed(app.chat(messages, headers=SESSION, **told.fields))


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("qwen3", THINKING),
        ("qwen3", IN_LETTERS),
        ("qwen3", CALLS),
        ("qwen3_next", IN_LETTERS),
        ("qwen3_5", OPENED),
    ],
    ids=["thinking", "other tokens", "calls", "hybrid", "hybrid that thinks"],
)
def test_another_server_goes_on_as_the_first_would_have(
    family: str, told: Told, redis: RedisServer, tmp_path: Path
) -> None:
    """At most 5 % of the prompt is computed there, the text is that of the first; and so in the next turn."""
    with sharing(tmp_path / "a", redis, family) as a, sharing(tmp_path / "b", redis, family) as b:
        eventually(lambda: is_up(a) and is_up(b), "no connection")
        messages = led(a, told)
        settle(a)
        moved = b.chat(messages, headers=SESSION, **told.fields)
        assert share_computed(moved) <= 0.05, (moved.num_cached_tokens, prompt_tokens(moved))
        stayed = a.chat(messages, headers=SESSION, **told.fields)
        assert moved == stayed
        assert records(b)["num_conversations"] == 1 and records(b)["num_refused"] == 0 and remote(b)["errors"] == {}
        if "tools" not in told.fields:  # there the template takes thinking away once its user asks on
            settle(b)
            back = [*messages, {"role": "assistant", "content": moved.content}, {"role": "user", "content": "Go on."}]
            assert share_computed(a.chat(back, headers=SESSION, **told.fields)) <= 0.05
    without = computed_without(told, redis, tmp_path / "c", messages, family)
    print(f"{family}: {prompt_tokens(moved)} tokens, {share_computed(moved):.3f}, without {without:.3f}")
    assert without > 0.3


def altered(redis: RedisServer, fault: str) -> None:
    """Alter the row of the first answer that is the session's, as the fault says."""
    client = redis.client
    rows = {key: client.hgetall(key) for key in redis.keys("r")}
    [mine, theirs] = sorted({":".join(key.split(":")[:5]) for key in rows})
    sizes = {key: sum(map(len, fields.values())) for key, fields in rows.items()}
    for key, fields in rows.items():
        if max(sizes[key], 300) == 300:
            continue
        [(field, body)] = fields.items()
        mirror = sorted(each for each in rows if each.startswith(theirs if key.startswith(mine) else mine))
        other = max((each for each in rows if each != key), key=lambda each: sizes[each])
        if fault == "flipped":
            client.hset(key, field, body[:-40] + bytes([body[-40] ^ 1]) + body[-39:])
        elif fault == "cut":
            client.hset(key, field, body[: len(body) // 2])
        elif fault == "another place's":
            client.hset(key, field, next(iter(rows[other].values())))
        elif fault == "another session's":
            client.delete(key)
            client.hset(key, mapping=rows[max(mirror, key=lambda each: sizes[each])])
        elif fault == "wrong type":
            client.delete(key)
            client.set(key, body)
        else:
            client.delete(key)


@pytest.mark.parametrize("fault", ["flipped", "cut", "another place's", "another session's", "wrong type", "gone"])
def test_what_was_altered_there_is_not_believed(fault: str, redis: RedisServer, tmp_path: Path) -> None:
    """Every answer's row, altered in every way: the prompt is the one that a server writes to which no record comes."""
    with sharing(tmp_path / "a", redis) as a:
        eventually(lambda: is_up(a), "no connection")
        messages = led(a, THINKING)
        led(a, THINKING, OTHER_SESSION)
        settle(a)
    altered(redis, fault)
    with sharing(tmp_path / "b", redis) as b:
        eventually(lambda: is_up(b), "no connection")
        answer = b.chat(messages, headers=SESSION, **THINKING.fields)
        assert (
            remote(b)["longest_wait_seconds"] <= BOUND_SECONDS and records(b)["longest_wait_seconds"] <= BOUND_SECONDS
        )
        assert records(b)["num_messages"] == 2, "the system's words and the first question"
        assert (records(b)["num_refused"] + remote(b)["num_errors"] > 0) == (fault != "gone")
    with server_on(tmp_path / "c", None) as alone:
        assert alone.chat(messages, headers=SESSION, **THINKING.fields) == answer


def test_whom_one_server_forgets_is_in_no_row(redis: RedisServer, tmp_path: Path) -> None:
    """Nor does another server know it after it has heard; another session's rows stay."""
    with sharing(tmp_path / "a", redis) as a, sharing(tmp_path / "b", redis) as b:
        eventually(lambda: is_up(a) and is_up(b), "no connection")
        kept = led(a, THINKING, OTHER_SESSION)
        settle(a)
        others = set(redis.keys("r"))
        messages = led(a, THINKING)
        settle(a)
        b.chat(messages, headers=SESSION, **THINKING.fields)
        settle(b)
        assert set(redis.keys("r")) > others > set()
        assert forget(a, "session=the-session")["is_done"] is True
        eventually(lambda: set(redis.keys("r")) == others, "rows are left")
        eventually(lambda: b.get("/v1/cache").json["num_messages"] == 0, "the other server has not heard of it")
        eventually(lambda: is_open(b), "it does not end")
        asked = b.chat(messages, headers=SESSION, **THINKING.fields)
        assert share_computed(asked) > 0.3 and records(b)["num_conversations"] == 1
        assert share_computed(b.chat(kept, headers=OTHER_SESSION, **THINKING.fields)) <= 0.05


def test_where_records_stay_a_start_says_so(redis: RedisServer, tmp_path: Path) -> None:
    """Without a secret, and where sessions are not kept apart; KV travels all the same."""
    for number, settings in enumerate(({"proxy_secret": None}, {"cache_session_partitioning": False})):
        with sharing(tmp_path / f"{number}", redis, **settings) as app:
            eventually(lambda: is_up(app), "no connection")
            assert "no records of conversations" in app.screen.getvalue()
            assert remote(app)["records"] is None
            led(app, THINKING)
            settle(app)
            assert redis.keys("r") == [] and redis.keys("b")
