"""Log-probabilities over HTTP on a real model: chats, completions and responses, streamed and not."""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.models import tiny_model
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    chat_body,
    chunks_of,
    serving_app,
    writing,
)
from tests.web.test_responses import events_of

THOUGHT_AND_CALLED = (
    "<think>\nThe user greets.\n</think>\n\nHello 🦜, dear reader."
    '\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKS = {"logprobs": True, "top_logprobs": 3}
NO_THINKING = {"enable_thinking": False}
RESPONSE_ASKS = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}

type Entries = list[dict[str, Any]]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("app"), max_kv_size=4096) as app:
        yield app


def text_of(entries: Entries) -> str:
    """The text whose UTF-8 the entries' bytes are."""
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def whole_chat(app: AppUnderTest, **fields: Any) -> tuple[Mapping[str, Any], Entries]:
    """The message and its tokens, of an answer that is not streamed."""
    response = app.post(CHAT_PATH, chat_body(**fields))
    assert response.status == 200, response.body
    [choice] = response.json["choices"]
    assert choice["logprobs"]["refusal"] is None
    return choice["message"], choice["logprobs"]["content"]


def streamed_chat(app: AppUnderTest, **fields: Any) -> tuple[str, Entries]:
    """The same of a stream: its content, and the tokens of its chunks. Tokens come with content only."""
    response = app.post(CHAT_PATH, chat_body(stream=True, **fields))
    assert response.status == 200, response.body
    content, entries = "", list[dict[str, Any]]()
    for chunk in chunks_of(response):
        for choice in chunk["choices"]:
            said = choice["delta"].get("content", "")
            content += said
            assert bool(choice["logprobs"]) == bool(said)
            entries += (choice["logprobs"] or {"content": []})["content"]
            # the chunk has the tokens of its text: put together so far they say no less than the content so far
            assert len(b"".join(bytes(entry["bytes"]) for entry in entries)) >= len(content.encode())
    return content, entries


def test_a_stream_tells_what_a_whole_answer_tells(app: AppUnderTest) -> None:
    """Token by token, with the same numbers; joined they are the content, and the greedy draw is the likeliest."""
    message, entries = whole_chat(app, **ASKS, **NO_THINKING)
    content, streamed = streamed_chat(app, **ASKS, **NO_THINKING)
    assert streamed == entries and len(entries) > 3
    assert content == message["content"]
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 3 and top[0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert sum(np.exp([each["logprob"] for each in top])) <= 1 + 1e-5


def test_thinking_and_calls_are_no_content(app: AppUnderTest) -> None:
    """The entries are those of the text between them; characters of several tokens are told byte by byte."""
    with writing(app, THOUGHT_AND_CALLED) as script:
        fields = {**ASKS, **script, "tools": [LOOK], "max_tokens": 200}
        message, entries = whole_chat(app, **fields)
        content, streamed = streamed_chat(app, **fields)
    assert message["reasoning_content"] == "The user greets." and len(message["tool_calls"]) == 1
    assert content == message["content"] == text_of(entries) == "Hello 🦜, dear reader.\n"
    assert streamed == entries
    assert any("\\x" in entry["token"] for entry in entries), "no token holds a part of a character"
    assert all(entry["logprob"] < 0 for entry in entries)


def test_an_answer_of_calls_alone_tells_no_token(app: AppUnderTest) -> None:
    """It was asked, and there is nothing to tell."""
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    with writing(app, call) as script:
        fields = {**ASKS, **script, **NO_THINKING, "tools": [LOOK], "max_tokens": 200}
        message, entries = whole_chat(app, **fields)
        assert streamed_chat(app, **fields) == ("", [])
    assert entries == [] and len(message["tool_calls"]) == 1


def test_a_stop_string_ends_what_is_told(app: AppUnderTest) -> None:
    """Nothing behind it; a token that begins before it is told."""
    with writing(app, "One two three four.") as script:
        fields = {**ASKS, **script, **NO_THINKING, "stop": "three", "max_tokens": 50}
        message, entries = whole_chat(app, **fields)
        assert streamed_chat(app, **fields) == (message["content"], entries)
    assert message["content"] == "One two "
    assert text_of(entries).startswith("One two ") and "four" not in text_of(entries)


def test_without_a_number_there_are_no_alternatives(app: AppUnderTest) -> None:
    """`logprobs: true` alone."""
    _, entries = whole_chat(app, logprobs=True, **NO_THINKING)
    assert entries and all(entry["top_logprobs"] == [] for entry in entries)


def test_who_does_not_ask_gets_the_same_answer_without(app: AppUnderTest) -> None:
    """Asking changes no token."""
    message, _ = whole_chat(app, **ASKS, **NO_THINKING)
    assert app.both(**NO_THINKING).content == message["content"]
    plain = app.post(CHAT_PATH, chat_body(**NO_THINKING)).json["choices"][0]
    assert plain["logprobs"] is None


@pytest.mark.parametrize("prompt", ["Once upon a time", [300, 301, 302, 303, 304]])
def test_a_completion_tells_the_models_own_numbers(app: AppUnderTest, prompt: Any) -> None:
    """In the older form, streamed and not: those of one plain pass over prompt and answer."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "repetition_penalty": 1, "logprobs": 4}
    [choice] = app.post(COMPLETION_PATH, body).json["choices"]
    told = choice["logprobs"]
    merged: dict[str, list[Any]] = {name: [] for name in told}
    text = ""
    for chunk in chunks_of(app.post(COMPLETION_PATH, {**body, "stream": True})):
        [part] = chunk["choices"]
        for name, values in (part["logprobs"] or {}).items():
            merged[name] += values
        text += part["text"]
    assert (merged, text) == (told, choice["text"])
    assert len(told["tokens"]) == len(told["text_offset"]) == 12
    assert [max(top.values()) for top in told["top_logprobs"]] == told["token_logprobs"]
    assert {len(top) for top in told["top_logprobs"]} <= {3, 4}, "two of the likeliest may be spelt alike"
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert told["token_logprobs"] == pytest.approx(greedy_logprobs(app, prompt, 12), abs=1e-4)


def greedy_logprobs(app: AppUnderTest, prompt: Any, num_tokens: int) -> list[float]:
    """The log-probability of each greedy token, found by one pass without a cache per token."""
    model, _ = load_model(tiny_model("qwen3"))
    ids = list(app.served.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt)
    found: list[float] = []
    for _ in range(num_tokens):
        logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
        ids.append(int(mx.argmax(logits).item()))
        found.append(float((logits[ids[-1]] - mx.logsumexp(logits)).item()))
    return found


def test_a_response_tells_them_in_its_part_and_its_events(app: AppUnderTest) -> None:
    """Streamed and not the same; the next turn may send the item back."""
    body = {
        "input": "Hello there.",
        "temperature": 0,
        "repetition_penalty": 1,
        "max_output_tokens": 16,
        **NO_THINKING,
        **RESPONSE_ASKS,
    }
    response = app.post("/v1/responses", body).json
    [message] = [item for item in response["output"] if item["type"] == "message"]
    [part] = message["content"]
    assert response["top_logprobs"] == 3 and part["logprobs"]
    assert text_of(part["logprobs"]) == part["text"]
    events = events_of(app.post("/v1/responses", {**body, "stream": True}).body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [entry for delta in deltas for entry in delta["logprobs"]]
    assert [entry["logprob"] for entry in told] == [entry["logprob"] for entry in part["logprobs"]]
    assert events[-1]["response"]["output"][-1]["content"][0]["logprobs"] == part["logprobs"]
    history = [{"role": "user", "content": "Hello there."}, message, {"role": "user", "content": "And?"}]
    assert app.post("/v1/responses", {**body, "input": history}).status == 200
