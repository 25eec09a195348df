"""What arrives at the backend, and what comes back, through a real LiteLLM."""

import json
import time
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.fields_read import chat_fields, completion_fields
from tests.laws import sampled_cells
from tests.proxy.reached import Reached
from tests.proxy.stubs import ANSWER, KEY, LISTED, STREAM, USAGE, Backend, Client, Running, Script, chunk

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"
RECORDED = [f"pi-0.87-qwen/{number:02}" for number in range(1, 10)] + ["openclaw-2026.9.6/01", "openclaw-2026.9.6/06"]

EPHEMERAL = {"type": "ephemeral"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "rules", "cache_control": EPHEMERAL}]},
    {"role": "developer", "content": "more rules"},
    {"role": "user", "content": "look", "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a b",\n "n": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call1", "content": "text", "cache_control": EPHEMERAL},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "aha",
        "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
    },
    {"role": "assistant", "content": None, "reasoning_text": "oh", "refusal": "no"},
    {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}},
    {"role": "function", "name": "read", "content": "text"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "and \u00e9\u4e2d\U0001f600?"}, {"type": "other", "x": None}],
    },
]
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "reads",
        "strict": True,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": False},
    },
    "cache_control": EPHEMERAL,
}
FIELDS: dict[str, Any] = {
    "prediction": {"type": "content", "content": "x"},
    # what LiteLLM drops, refuses or takes for its own
    "thinking": {"type": "enabled", "budget_tokens": 64},
    "verbosity": "low",
    "user": "u1",
    "metadata": {"session_id": "s", "deep": {"list": [1, None]}, "user_api_key_x": "y"},
    "prompt_cache_key": "pck",
    "prompt_cache_retention": "24h",
    "service_tier": "auto",
    "timeout": 5,
    "cache": {"no-cache": True},
    "tags": ["t"],
    "fallbacks": ["x"],
    "num_retries": 3,
    "base_url": "u",
    "extra_body": {"inner": 1},
    "mock_response": "no",
    # sessions
    "session_id": "s1",
    "conversation_id": "c1",
    "thread_id": "t1",
    "chat_id": "h1",
    "cache_mode": "prefix",
    "ttl": 60,
    "speculation": False,
    "cache_control": EPHEMERAL,
    # thinking and templates
    "chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True},
    "enable_thinking": False,
    "preserve_thinking": True,
    "clear_thinking": False,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "none",
    "thinking_budget": 5,
    "thinking_token_budget": 5,
    # sampling
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "repetition_context_size": 32,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "seed": 3,
    "logit_bias": {"3": 1},
    "stop": ["END"],
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "max_tokens": 9,
    "max_completion_tokens": 7,
    # tools and form
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "functions": [TOOL["function"]],
    "function_call": "auto",
    "response_format": {"type": "json_object"},
    "store": False,
    "field_of_tomorrow": {"a": [1, 2.5, "x", True, None]},
}


COMPLETION_FIELDS: dict[str, Any] = {
    **{"max_tokens": 4, "top_k": 3, "user": "u", "session_id": "s"},
    **{"echo": False, "suffix": "", "best_of": 1},
}


def arrived(backend: Backend) -> dict[str, Any]:
    """The one body that the backend got."""
    assert len(backend.received) == 1
    return backend.received[0].body


def test_the_lists_name_every_field_that_the_server_reads() -> None:
    """What the server's parsers look up is sent through the proxy here, messages' own fields included."""
    of_messages = {f"messages[].{name}" for message in MESSAGES for name in message}
    assert chat_fields() <= {"model", "messages", "stream", "stream_options", *FIELDS, *of_messages}
    assert completion_fields() - chat_fields() <= {"prompt", *COMPLETION_FIELDS}


@pytest.mark.parametrize("stream", [True, False])
def test_every_field_arrives_as_it_was_sent(client: Client, backend: Backend, stream: bool) -> None:
    """Of all fields only those may differ that LiteLLM adds harmlessly."""
    body = {"model": "org/name", "messages": MESSAGES, **FIELDS} | ({"stream": True} if stream else {})
    assert client.chat(body).status == 200
    added = {"stream_options": {"include_usage": True}} if stream else {}
    assert arrived(backend) == body | added


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_half_a_character_costs_nothing_but_itself(client: Client, backend: Backend, stream: bytes) -> None:
    """A history that a client cut in the middle of an emoji is served through the proxy as it is without it."""
    half = b'{"messages": [{"role": "user", "content": "a \\ud83d b"}], "stream": ' + stream + b"}"
    assert client.send("POST", "/v1/chat/completions", half).status == 200
    assert arrived(backend)["messages"] == [{"role": "user", "content": "a \ufffd b"}]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"include_usage": True}, {"include_usage": True}),
        ({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}),
        ("junk", "junk"),
    ],
)
def test_stream_options_are_only_completed(client: Client, backend: Backend, asked: object, expected: object) -> None:
    """LiteLLM asks for usage in every stream, keeps the client's other options, and leaves junk to the backend."""
    reply = client.chat({"model": "m", "messages": [], "stream": True, "stream_options": asked})
    assert reply.status == 200
    assert arrived(backend)["stream_options"] == expected


@pytest.mark.parametrize("asked", [True, False])
def test_usage_is_streamed_only_to_who_asked(client: Client, backend: Backend, asked: bool) -> None:
    """The usage that LiteLLM asked for on its own is not shown; the client's is, with cached_tokens."""
    options = {"stream_options": {"include_usage": True}} if asked else {}
    events = client.chat({"model": "m", "messages": [], "stream": True} | options).events()
    usages = [event["usage"] for event in events if event.get("usage")]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == ([3] if asked else [])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bodies_arrive_unchanged(client: Client, backend: Backend, name: str) -> None:
    """What real clients sent reaches the backend field by field."""
    if not RECORDINGS.is_dir():
        pytest.skip(f"needs the recordings in {RECORDINGS}")
    body = json.loads((RECORDINGS / f"{name}.json").read_text("utf-8"))["body"]
    assert client.chat(body).events()
    assert arrived(backend) == body


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (LISTED, "some-org/Model-4bit"),
        ("some-org/Model-4bit", "some-org/Model-4bit"),
        ("a/b/c:d@e f", "a/b/c:d@e f"),
        ("openai/x", "openai/x"),
        ("claude-opus-4-5", "claude-opus-4-5"),
        ("anthropic/claude-x", "anthropic/claude-x"),
        ("gpt-5-codex", "gpt-5-codex"),
        ("o1-pro", "o1-pro"),
        ("bedrock/x", "bedrock/x"),
        (None, "some-org/Model-4bit"),
        ("", "some-org/Model-4bit"),
    ],
)
def test_any_model_name_passes(client: Client, backend: Backend, name: object, expected: str) -> None:
    """Names that LiteLLM knows from elsewhere, names with slashes, and no name at all reach the one backend."""
    reply = client.chat({"model": name, "messages": [], "temperature": 0.2, "tools": [TOOL]})
    assert reply.status == 200
    assert arrived(backend)["model"] == expected
    assert backend.received[0].path == "/v1/chat/completions"


@pytest.mark.parametrize("name", [5, "a,b", "http://x/y"])
def test_what_is_no_model_name_is_refused(client: Client, backend: Backend, name: object) -> None:
    """LiteLLM would ask two models, or another machine."""
    reply = client.chat({"model": name, "messages": []})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "model")
    assert not backend.received


def test_only_the_served_model_is_listed(client: Client) -> None:
    """The list holds PROXY_MODEL_ID and none of LiteLLM's own catalogue, under both paths."""
    for path in ("/v1/models", "/models"):
        assert [model["id"] for model in client.send("GET", path).json()["data"]] == [LISTED]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["once", ["once", "twice"], [1, 2, 3], None])
def test_text_completions_pass(client: Client, backend: Backend, stream: bool, prompt: object) -> None:
    """/v1/completions carries every field, token ids too, and its text comes back."""
    choice = {"index": 0, "text": "upon", "finish_reason": None, "logprobs": None}
    text = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
    end = text | {"choices": [choice | {"text": "", "finish_reason": "length"}]}
    whole = text | {"choices": [choice | {"finish_reason": "length"}], "usage": USAGE}
    backend.follow(Script(answer=whole, events=[text, end]))
    body = {"model": "m", "prompt": prompt, **COMPLETION_FIELDS}
    reply = client.post("/v1/completions", body | ({"stream": True} if stream else {}))
    assert reply.status == 200, reply.raw
    got = arrived(backend)
    assert {name: got.get(name) for name in body} == body
    assert set(got) - set(body) <= {"stream", "stream_options"}
    answers = reply.events() if stream else [reply.json()]
    assert "".join(event["choices"][0].get("text") or "" for event in answers if event["choices"]) == "upon"


def test_headers_reach_the_backend(client: Client, backend: Backend) -> None:
    """x-* pass, the client's name and trace too, and a session header is there under the name that routing reads."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = {"x-anything": "1", "x-session-affinity": "aff", "user-agent": "agent/1.0", "traceparent": trace}
    assert client.chat({"model": "m", "messages": []}, sent | {"session_id": "sess-12345678"}).status == 200
    headers = backend.received[0].headers
    expected = sent | {"session_id": "sess-12345678", "x-session-id": "sess-12345678"}
    assert {name: headers.get(name) for name in expected} == expected


@pytest.mark.parametrize("name", ["session_id", "session-id", "thread-id", "thread_id", "conversation_id"])
def test_session_headers_are_mapped(client: Client, backend: Backend, name: str) -> None:
    """Each of the names that clients use ends up in x-session-id; an x-session-id of the client's own wins."""
    client.chat({"model": "m", "messages": []}, {name: "sess-12345678"})
    client.chat({"model": "m", "messages": []}, {name: "sess-12345678", "x-session-id": "own-12345678"})
    assert [received.headers["x-session-id"] for received in backend.received] == ["sess-12345678", "own-12345678"]


def test_an_answer_comes_back_whole(client: Client, backend: Backend) -> None:
    """Content, reasoning, tool calls, finish reason, usage and the request id survive."""
    call = {"id": "call9", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [call, call | {"id": "b"}],
    }
    answer = ANSWER | {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    backend.follow(Script(answer=answer))
    reply = client.chat({"model": "m", "messages": []})
    choice = reply.json()["choices"][0]
    assert {name: choice["message"].get(name) for name in message} == message
    assert choice["finish_reason"] == "tool_calls"
    assert reply.json()["id"] == "chatcmpl-r1"
    assert reply.json()["usage"] == USAGE
    assert reply.headers["x-request-id"] == "r1"


def test_a_stream_comes_back_whole(client: Client, backend: Backend) -> None:
    """Reasoning, content, tool calls in pieces and the finish reason arrive in order, delta by delta."""
    head = {"index": 0, "id": "call9", "type": "function", "function": {"name": "read", "arguments": ""}}
    tail = {"index": 0, "function": {"arguments": '{"path": "x"}'}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm "},
        {"reasoning_content": "so"},
        {"content": "I "},
        {"content": "read"},
        {"tool_calls": [head]},
        {"tool_calls": [tail]},
    ]
    backend.follow(Script(events=[*(chunk(delta) for delta in deltas), chunk({}, "tool_calls")]))
    reply = client.chat({"model": "m", "messages": [], "stream": True})
    choices = [event["choices"][0] for event in reply.events()]
    got = [choice["delta"] for choice in choices]
    assert [d["reasoning_content"] for d in got if d.get("reasoning_content")] == ["hm ", "so"]
    assert [d["content"] for d in got if d.get("content")] == ["I ", "read"]
    calls = [d["tool_calls"][0] for d in got if d.get("tool_calls")]
    assert (calls[0]["id"], calls[0]["function"]["name"]) == ("call9", "read")
    assert "".join(call["function"]["arguments"] or "" for call in calls) == '{"path": "x"}'
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["tool_calls"]
    assert {event["id"] for event in reply.events()} == {"chatcmpl-r1"}
    assert reply.headers["x-request-id"] == "r1"


STOPPED = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}


def token(text: str, *top: str) -> dict[str, Any]:
    """A token of a chat's log-probabilities."""
    entry = {"token": text, "logprob": -0.5, "bytes": [*text.encode()]}
    return {**entry, "top_logprobs": [{"token": each, "logprob": -0.5, "bytes": [*each.encode()]} for each in top]}


def test_log_probabilities_of_a_chat_come_back(client: Client, backend: Backend) -> None:
    """With the body and, chunk by chunk, with the text of a stream; bytes and alternatives included."""
    hel, lo = token("hel", "hel", "x"), token("lo")
    choice = {**STOPPED, "logprobs": {"content": [hel, lo], "refusal": None}}
    backend.follow(Script(answer=ANSWER | {"choices": [choice]}))
    body = {"model": "m", "messages": [], "logprobs": True, "top_logprobs": 2}
    assert client.chat(body).json()["choices"][0]["logprobs"]["content"] == [hel, lo]
    assert (arrived(backend)["logprobs"], arrived(backend)["top_logprobs"]) == (True, 2)

    told = [None, {"content": [hel], "refusal": None}, {"content": [lo], "refusal": None}, None]
    events = [
        {**event, "choices": [{**event["choices"][0], "logprobs": each}]}
        for event, each in zip(STREAM, told, strict=True)
    ]
    backend.follow(Script(events=events))
    choices = [event["choices"][0] for event in client.chat(body | {"stream": True}).events()]
    said = [choice for choice in choices if choice["delta"].get("content")]
    got = [(choice["delta"]["content"], choice["logprobs"]["content"]) for choice in said]
    assert got == [("hel", [hel]), ("lo", [lo])]


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_of_a_completion_come_back(client: Client, backend: Backend, stream: bool) -> None:
    """In the older form, which LiteLLM's own reader of streamed completions would drop."""
    told = {"tokens": ["up"], "token_logprobs": [-0.5], "top_logprobs": [{"up": -0.5, "x": -1.0}], "text_offset": [0]}
    choice = {"index": 0, "text": "up", "finish_reason": "length", "logprobs": told}
    text = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
    backend.follow(Script(answer=text | {"usage": USAGE}, events=[text]))
    reply = client.post("/v1/completions", {"model": "m", "prompt": "x", "logprobs": 2, "stream": stream})
    answer = reply.events()[0] if stream else reply.json()
    assert answer["choices"][0]["logprobs"] == told
    assert arrived(backend)["logprobs"] == 2


EMPTY_CHOICE = {"index": 0, "text": "", "finish_reason": None, "logprobs": None}
EMPTY_TEXT = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [EMPTY_CHOICE]}


@sampled_cells(lambda num_comments, path, **_: not path.endswith("/completions") or num_comments == 2)
@pytest.mark.parametrize(
    ("path", "script", "num_comments"),
    [
        ("/v1/chat/completions", Script(events=[STREAM[0], *[chunk({})] * 300], pause_seconds=0.3), 2),
        ("/v1/chat/completions", Script(hold_seconds=200), 1),
        ("/v1/completions", Script(events=[EMPTY_TEXT, EMPTY_TEXT], pause_seconds=200), 1),
    ],
    ids=["in a chat", "before its first piece", "in a completion"],
)
def test_a_silent_stream_is_kept_alive(
    client: Client, backend: Backend, path: str, script: Script, num_comments: int
) -> None:
    """A comment comes after each interval, although LiteLLM swallows what the backend sends to fill the silence."""
    backend.follow(script)
    body = {"model": "m", "messages": [], "prompt": "p", "stream": True}
    with client.open(body, path) as connection, connection.makefile("rb") as lines:
        begun = time.monotonic()
        comments = (line for line in lines if line.startswith(b":"))
        assert len(list(islice(comments, num_comments))) == num_comments
        assert time.monotonic() - begun < num_comments * 1.0 + 5, "the interval is a second"
        assert backend.wait_until_asked(60)  # on a busy machine LiteLLM's first comment may come before that
    assert backend.wait_until_left(60) is not None, "nothing of this is left for the next test"


def test_after_its_comments_a_stream_goes_on(client: Client, backend: Backend) -> None:
    """What breaks the silence takes nothing away from the answer, which comes whole up to its end."""
    script = Script(hold_seconds=200)
    backend.follow(script)
    with client.open({"model": "m", "messages": [], "stream": True}) as connection, connection.makefile("rb") as lines:
        assert len(list(islice((line for line in lines if line.startswith(b":")), 1))) == 1
        script.go_on.set()
        data = (line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: "))
        events = [json.loads(line) for line in takewhile(lambda line: line != b"[DONE]", data)]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "hello"
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["stop"]


def test_empty_deltas_that_arrive(client: Client, backend: Backend) -> None:
    """An empty `reasoning_content` passes when it is sent; a delta without any field would not."""
    events = [STREAM[0], *(chunk({"reasoning_content": ""}) for _ in range(4)), *STREAM[1:]]
    backend.follow(Script(events=events))
    arrived = client.chat({"model": "m", "messages": [], "stream": True}).events()
    deltas = [choice["delta"] for event in arrived for choice in event["choices"]]
    assert [delta.get("reasoning_content") for delta in deltas].count("") == 4


def test_a_monotonous_stream_is_not_cut(client: Client, backend: Backend) -> None:
    """LiteLLM would end a stream after a hundred equal pieces; here it does not."""
    backend.follow(Script(events=[STREAM[0], *[chunk({"content": "| - |"})] * 300, chunk({}, "stop")]))
    events = client.chat({"model": "m", "messages": [], "stream": True}).events()
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "| - |" * 300


def test_text_that_looks_like_markup_is_not_touched(client: Client, backend: Backend) -> None:
    """Special tokens, tags and white space come through as content."""
    pieces = ["<s>", "</s>", "<|im_end|>", " ", "\n\n", "<think>", "\u2028", "a\x85b\x0bc\x1c", "[DONE]", "data: x\n"]
    backend.follow(Script(events=[STREAM[0], *(chunk({"content": piece}) for piece in pieces), chunk({}, "stop")]))
    events = client.chat({"model": "m", "messages": [], "stream": True}).events()
    assert [text for event in events if (text := event["choices"][0]["delta"].get("content"))] == pieces


def test_an_error_in_the_stream_keeps_its_message(client: Client, backend: Backend) -> None:
    """The message arrives as the stream's last event; LiteLLM replaces its type and code."""
    error = {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_failure"}}
    backend.follow(Script(events=[STREAM[0], STREAM[1], error]))
    reply = client.chat({"model": "m", "messages": [], "stream": True})
    last = [line for line in reply.raw.decode().split("\n") if line.startswith("data: {")][-1]
    assert "the engine died" in json.loads(last[6:])["error"]["message"]


ERRORS = [
    (400, "The prompt has 12 tokens, the context limit is 10 tokens.", "context_length_exceeded", None),
    (400, "temperature: rate limit 429 is a funny value, timeout", None, None),
    (401, "The API key is missing or wrong.", "invalid_api_key", None),
    (403, "This Origin may not call the server.", None, None),
    (404, "No such model.", "model_not_found", None),
    (413, "The body is too large.", None, None),
    (429, "The queue is full.", "queue_full", "7"),
    (500, "The model failed.", "engine_failure", None),
    (503, "The model is still loading.", "not_ready", "2"),
    (529, "Memory is exhausted.", "memory_exhausted", "30"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "message", "code", "retry_after"), ERRORS)
def test_errors_come_back_as_the_backend_gave_them(
    client: Client, backend: Backend, stream: bool, status: int, message: str, code: str | None, retry_after: str | None
) -> None:
    """Status, body, Retry-After and request id are the backend's own, and it was asked once."""
    error = {"error": {"message": message, "type": "some_error", "param": "messages", "code": code}}
    reply = None
    while reply is None or reply.raw.startswith(b":"):  # a second passed, so a comment has begun the stream already
        backend.follow(Script(status=status, error=error, retry_after=retry_after))
        reply = client.chat({"model": "m", "messages": [], "stream": stream})
    assert (reply.status, reply.json()) == (status, error)
    assert reply.headers.get("retry-after") == retry_after
    assert reply.headers["x-request-id"] == "r1"
    assert len(backend.received) == 1


def test_an_error_behind_a_comment_keeps_its_message(client: Client, backend: Backend) -> None:
    """Once a comment has broken the silence the status is 200; the last event has what the backend says."""
    error = {"error": {"message": "The prompt waited too long for room.", "type": "server_error", "code": "no_room"}}
    backend.follow(Script(status=503, error=error, hold_seconds=1.5))
    reply = client.chat({"model": "m", "messages": [], "stream": True})
    [last] = [json.loads(line[6:]) for line in reply.raw.decode().split("\n") if line.startswith("data: {")]
    assert (last["error"]["message"], last["error"]["code"]) == ("The prompt waited too long for room.", "503")


def test_errors_do_not_close_the_door(client: Client, backend: Backend) -> None:
    """After a burst of 429 and 503 the next request is served: no cool-down."""
    for status in (429, 503, 500, 401) * 3:
        backend.follow(Script(status=status, error={"error": {"message": "no"}}))
        assert client.chat({"model": LISTED, "messages": []}).status == status
    backend.follow(Script())
    assert client.chat({"model": LISTED, "messages": []}).status == 200


MISTYPED: list[dict[str, Any]] = [
    {"messages": "x"},
    {"messages": [1]},
    {"messages": [None]},
    {"messages": {"role": "user"}},
    {"messages": [{"role": "weird", "content": "x"}]},
    {"messages": [{"role": "user", "content": [1]}]},
    {"messages": [{"content": 5}]},
    {"messages": [], "stream_options": 5, "stream": "yes"},
    {"messages": [], "metadata": "x", "tools": 5, "temperature": "hot"},
    {"messages": [], "max_tokens": -1, "n": 1.5, "seed": 10**30},
    {},
]


@pytest.mark.parametrize("fields", MISTYPED)
def test_mistyped_fields_are_left_to_the_backend(client: Client, backend: Backend, fields: dict[str, Any]) -> None:
    """LiteLLM neither stumbles nor answers for the backend: the one refusal is the backend's."""
    error = {"error": {"message": "mistyped", "type": "invalid_request_error", "param": "p", "code": None}}
    backend.follow(Script(status=400, error=error))
    reply = client.chat({"model": "m"} | fields)
    assert (reply.status, reply.json()) == (400, error)
    got = arrived(backend)
    assert {name: got.get(name) for name in fields} == fields


def test_deep_nesting_is_answered(client: Client, backend: Backend) -> None:
    """A thousand levels cost an error answer at most, and the proxy serves on."""
    deep = "[" * 1000 + "]" * 1000
    reply = client.send("POST", "/v1/chat/completions", f'{{"model":"m","messages":[],"x":{deep}}}'.encode())
    assert reply.status in (200, 400)
    assert "error" in reply.json() or reply.status == 200
    assert client.chat({"model": "m", "messages": []}).status == 200


@pytest.mark.parametrize(
    ("body", "script"),
    [
        ({"stream": True}, Script(events=STREAM * 1000, pause_seconds=0.05)),
        ({"stream": True}, Script(hold_seconds=200)),
        ({}, Script(hold_seconds=200)),
    ],
    ids=["in the stream", "before the first event", "without a stream"],
)
def test_a_client_that_leaves_is_noticed(
    client: Client, backend: Backend, body: dict[str, Any], script: Script
) -> None:
    """LiteLLM drops its connection to the backend when the client dropped its own, long before the answer's end."""
    backend.follow(script)
    connection = client.open({"model": "m", "messages": []} | body)
    while not backend.received:
        time.sleep(0.01)
    time.sleep(0.2)
    connection.close()
    assert backend.wait_until_left(60) is not None


def test_a_backend_that_is_gone_is_an_error_answer(client: Client, backend: Backend) -> None:
    """A stream that breaks off ends with an error event, and the proxy serves on."""
    backend.follow(Script(events=[STREAM[0], STREAM[1], "not an object"]))
    reply = client.chat({"model": "m", "messages": [], "stream": True})
    assert reply.status == 200
    backend.follow(Script())
    assert client.chat({"model": "m", "messages": []}).status == 200


def test_any_key_or_none_works_without_a_key(client: Client, backend: Backend) -> None:
    """On loopback without API_KEY nobody is asked."""
    for headers in ({}, {"authorization": "Bearer whatever"}, {"x-api-key": "zzz"}, {"authorization": "Basic eA=="}):
        assert client.chat({"model": "m", "messages": []}, headers).status == 200


@pytest.mark.long
def test_the_key_is_asked_for_and_handed_on(keyed_client: Client, backend: Backend) -> None:
    """With API_KEY both spellings of the right key are served and the backend gets it; all else is a 401."""
    right = ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY})
    wrong = ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": f"Basic {KEY}"})
    for headers in right:
        assert keyed_client.chat({"model": "m", "messages": []}, headers).status == 200
    assert {received.headers["authorization"] for received in backend.received} == {f"Bearer {KEY}"}
    for headers in wrong:
        reply = keyed_client.chat({"model": "m", "messages": []}, headers)
        assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert keyed_client.send("GET", "/v1/models", headers={"x-api-key": KEY}).status == 200
    assert keyed_client.send("GET", "/v1/models").status == 401
    assert len(backend.received) == len(right)


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example"}, {"host": "evil.example:4000"}],
)
@pytest.mark.parametrize("method", ["POST", "OPTIONS", "GET"])
def test_foreign_pages_are_refused(client: Client, backend: Backend, method: str, headers: dict[str, str]) -> None:
    """A foreign Origin, its preflight and a Host that is not ours get a 403; the backend hears nothing."""
    preflight = {"access-control-request-method": "POST"} if method == "OPTIONS" else {}
    path = "/v1/models" if method == "GET" else "/v1/chat/completions"
    reply = client.send(method, path, b'{"model":"m","messages":[]}', headers | preflight)
    assert (reply.status, reply.json()["error"]["type"]) == (403, "permission_error")
    assert "access-control-allow-origin" not in reply.headers
    assert not backend.received


def test_allowed_pages_are_served(client: Client, backend: Backend) -> None:
    """An allowed Origin passes the preflight, may read the answer, and LiteLLM adds no wildcard."""
    origin = {"origin": "https://allowed.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = client.send("OPTIONS", "/v1/chat/completions", headers=origin | asked)
    assert (preflight.status, preflight.headers["access-control-allow-headers"]) == (204, "authorization")
    for reply in (
        preflight,
        client.chat({"model": "m", "messages": []}, origin),
        client.send("GET", "/models", None, origin),
    ):
        assert reply.headers["access-control-allow-origin"] == origin["origin"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "//", 404),
        ("POST", "/", 405),
        ("POST", "/key/generate", 404),
        ("POST", "/openai/v1/chat/completions", 404),
        ("POST", "/anthropic/v1/messages", 404),
        ("POST", "/config/update", 404),
        ("POST", "/model/new", 404),
        ("POST", "/v1/models/x:generateContent", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/health/readiness", 200),
        ("GET", "/health/liveliness", 200),
    ],
)
def test_only_the_paths_of_the_table_exist(
    client: Client, backend: Backend, method: str, path: str, status: int
) -> None:
    """LiteLLM's own administration and its ways to cloud providers are closed."""
    assert client.send(method, path, b"{}").status == status
    assert not backend.received


@pytest.mark.parametrize("raw", [b"", b"{bad", b"[1]", b'"x"', b"\xff", b'{"x": NaN}', b'{"x": 1e999}', b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(client: Client, backend: Backend, raw: bytes) -> None:
    """Broken bodies are refused in OpenAI's form before LiteLLM sees them."""
    reply = client.send("POST", "/v1/chat/completions", raw)
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not backend.received


def test_a_body_over_the_limit_is_a_413(client: Client, backend: Backend) -> None:
    """The limit holds for declared and for chunked bodies."""
    big = b'{"model":"m","messages":[],"x":"' + b"x" * (5 * 2**20) + b'"}'
    assert client.send("POST", "/v1/chat/completions", big).status == 413
    assert not backend.received


def test_nobody_but_the_backend_is_called(
    client: Client, backend: Backend, open_proxy: Running, reached: Reached
) -> None:
    """LiteLLM looks up no name and opens no connection outside this machine: not at its start, not for a request."""
    assert client.chat({"model": "gpt-5", "messages": MESSAGES, "tools": [TOOL]}).status == 200
    assert client.send("GET", "/v1/models").status == 200
    pid = open_proxy.proxy.state.pid
    assert pid is not None
    assert "127.0.0.1" in reached.hosts(pid), "the watch sees at least how the backend is called"
    assert reached.hosts(pid) <= {"127.0.0.1", "::1", "localhost", "a file"}


@pytest.mark.parametrize("name", ["open_proxy", pytest.param("keyed_proxy", marks=pytest.mark.long)])
def test_the_proxy_ran_undisturbed(request: pytest.FixtureRequest, name: str) -> None:
    """Nothing of all this killed it."""
    running: Running = request.getfixturevalue(name)
    assert running.proxy.state.status == "ready"
    assert running.reports == []
