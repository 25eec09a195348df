"""Bad input over HTTP on the whole server: each is answered in OpenAI's form, and none costs the engine a step."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.fields_read import chat_fields, completion_fields, without_indices
from tests.laws import sampled_cells
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    Response,
    eventually,
    is_error_form,
    plain_body,
    serves,
    serving_app,
)

RESPONSES_PATH = "/v1/responses"
AGENTS_PATH = "/v1/agents"
CONTEXT = 512
BODY_LIMIT = 60_000
LITTLE_PATIENCE_SECONDS = 0.3
"""How long the server waits for the rest of a request that never comes."""
WORDS = "the user asks what the server should write before the file is read again "


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A strict server with a small context and small bodies."""
    folder = tmp_path_factory.mktemp("small")
    with serving_app(folder, model_strict=True, max_kv_size=CONTEXT, max_request_body_bytes=BODY_LIMIT) as app:
        yield app


@contextmanager
def patience_for(app: AppUnderTest, status: int) -> Iterator[None]:
    """Where a request is to end with 408, the server has little patience with the connections that begin meanwhile;
    everywhere else it has its own, since a busy machine may be slow with a whole request too."""
    listener = app.app._server._listener
    assert listener is not None
    changed = ("header_timeout_seconds", "body_timeout_seconds") if status == 408 else ()
    settings = replace(listener._front.settings, **dict.fromkeys(changed, LITTLE_PATIENCE_SECONDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "_front", replace(listener._front, settings=settings))
        yield


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def _tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "look", **function}}]


def _schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


BAD_IDS = [True, [], {}, "x" * 513]
COMMON_MISTYPED: dict[str, list[Any]] = {
    "model": [1, [], {}, True],
    "stream": ["yes", 1, [], {}],
    "stream_options": [True, "usage", [1], 1, {"include_usage": "yes"}],
    "max_tokens": [-2, 0, 1.5, "10", True, [], {}, 10**30, 1e308],
    "max_completion_tokens": [-2, 0, 1.5, "10", True, [], {}],
    "temperature": [-0.1, 2.1, "hot", True, [], {}, 10**400],
    "top_p": [-0.1, 1.1, "x", True, []],
    "top_k": [-2, 1.5, "x", True, [], 10**30],
    "min_p": [-0.1, 1.1, "x", []],
    "repetition_penalty": [0, -1, "x", []],
    "repetition_context_size": [0, -1, "x", 1.5],
    "presence_penalty": [-2.1, 2.1, "x", []],
    "frequency_penalty": [-2.1, 2.1, "x", []],
    "seed": ["x", 1.5, [], True, 2**70],
    "logit_bias": ["x", [], 5, {"a": 1}, {"-1": 1}, {"5": "x"}, {"5": 101}, {"999999": 1}, {"5": 10**30}],
    "stop": [5, {}, True, [5], [None], ["x"] * 17, "x" * 513],
    "user": [5, [], {}],
    "store": ["x", 1, []],
    "service_tier": [5, True, []],
    "verbosity": [5, True, {}],
    "metadata": ["x", 5, []],
    "n": [2, 0, "1", [], True],
    "extra_body": [5, "x", []],
    **dict.fromkeys(("session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key"), BAD_IDS),
    "cache_mode": ["half", 5, []],
    "ttl": ["soon", -1, [], True],
    "speculation": ["off", 5, []],
    "chat_template_kwargs": [5, "x", [], {"enable_thinking": "perhaps"}],
    "enable_thinking": ["perhaps", 5, []],
    "thinking": ["perhaps", 5, [], {"type": "perhaps"}, {"type": "enabled", "budget_tokens": -1}],
    "thinking_budget": [-1, "many", 1.5, True, []],
    "thinking_token_budget": [-1, "many", 1.5, True, []],
    "reasoning": ["perhaps", 5, []],
    "reasoning_effort": ["perhaps", 5, []],
    "preserve_thinking": ["perhaps", 5, [], "high"],
    "clear_thinking": ["perhaps", 5, [], "high"],
    "response_format": [
        "json",
        5,
        [],
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        _schema(5),
        _schema([]),
        _schema({"type": "text"}),
        _schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}),
        _schema({"type": "string", "pattern": "(unclosed"}),
        _schema({"enum": []}),
    ],
}
CHAT_MISTYPED: dict[str, list[Any]] = {
    **COMMON_MISTYPED,
    "logprobs": [1, 5, "x", []],
    "top_logprobs": [1, 5, -1, 21, True, "x"],
    "prediction": [5, "x", {}, {"type": "x", "content": "a"}, {"type": "content"}, {"type": "content", "content": 5}],
    "messages": [None, [], "hello", 5, {}, [5], ["hi"], [None], [[]]],
    "messages[0].role": [[{"role": role, "content": "x"}] for role in ("wizard", "", 5, None, [], "User")],
    "messages[0].name": [[{"role": "user", "content": "x", "name": name}] for name in (5, True, [], {})],
    "messages[0].tool_call_id": [[{"role": "tool", "content": "x", "tool_call_id": name}] for name in (5, True, [])],
    **{
        f"messages[0].{field}": [[{"role": "assistant", "content": "x", field: said}] for said in (5, True, [], {})]
        for field in ("reasoning_content", "reasoning", "reasoning_text", "refusal")
    },
    "messages[0].function_call": [
        [{"role": "assistant", "function_call": call}] for call in (5, "x", [], {}, {"name": 5})
    ],
    "messages[0].content": [[{"role": "user", "content": content}] for content in (5, True, {}, [5])],
    "messages[0].content[0]": [
        [{"role": "user", "content": [part]}]
        for part in (
            {},
            {"type": "smell"},
            {"type": "text"},
            {"type": "text", "text": 5},
            {"type": "image_url"},
        )
    ],
    "messages[1].tool_calls": [
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
        for calls in (5, "x", [5], [{}], [{"function": {}}], [{"function": {"name": 5}}])
    ],
    "tools": [
        5,
        "x",
        {},
        [5],
        [{}],
        [{"type": "retrieval"}],
        [{"type": "function"}],
        _tool(name=None),
        _tool(name=""),
        _tool(description=5),
        _tool(strict="yes"),
        _tool(parameters=5),
        _tool(parameters=[]),
        _tool(parameters={"type": "string"}),
        _tool(parameters={"type": "object", "properties": 5}),
        _tool(parameters={"type": "object", "properties": {"a": {"type": "text"}}}),
        _tool(parameters={"type": "object", "required": "a"}),
    ],
    "tool_choice": ["sometimes", 5, [], {}, "required", {"type": "function", "function": {"name": "missing"}}],
    "parallel_tool_calls": ["x", 1, []],
    "functions": [5, "x", {}, [5], [{}], [{"name": 5}], [{"name": "look", "parameters": 5}]],
    "function_call": ["sometimes", 5, [], {}, {"name": 5}, {"name": "missing"}],
    "chat_template_kwargs": [*COMMON_MISTYPED["chat_template_kwargs"], {"messages": []}],
}
COMPLETION_MISTYPED: dict[str, list[Any]] = {
    **COMMON_MISTYPED,
    "logprobs": [-1, 21, 1.5, True, "x"],
    "prompt": [None, "", [], 5, True, {}, [True], ["a", "b"], [[]], [1.5], [-1], [999_999], [2**40], [[1], [2]]],
    "suffix": ["x", 5],
    "echo": [True, "x"],
    "best_of": [2, "x"],
}
FIELD_CASES = [
    *[(CHAT_PATH, field, value) for field, values in CHAT_MISTYPED.items() for value in values],
    *[(COMPLETION_PATH, field, value) for field, values in COMPLETION_MISTYPED.items() for value in values],
]


def test_every_field_that_is_read_has_wrong_values_here() -> None:
    """The tables above name what the parsers look up at the top level and in messages: no field is forgotten."""
    assert {without_indices(field) for field in CHAT_MISTYPED} - {"messages[].content[]"} == chat_fields()
    assert set(COMPLETION_MISTYPED) == completion_fields()


@sampled_cells(lambda path, stream: stream is (path == CHAT_PATH))
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_the_wrong_type_is_named_and_costs_no_step(small: AppUnderTest, path: str, stream: bool) -> None:
    """Each wrong value is a 400 in OpenAI's form that names its field, and the model computes nothing."""
    serves(small)
    before, wrong = small.num_forward_calls, []
    with small.connect() as client:
        for case_path, field, value in FIELD_CASES:
            if case_path != path or (stream and field == "stream"):
                continue
            body = plain_body(path, **({"stream": True} if stream else {}), **{field.partition("[")[0]: value})
            if "tool_choice" in body and isinstance(body["tool_choice"], dict):
                body["tools"] = [TOOL]
            response = client.request("POST", path, body)
            named = str(response.error["param"] if response.status >= 400 else None)
            if response.status != 400 or not is_error_form(response) or not named.startswith(field):
                wrong.append((field, value, response.status, named))
    assert not wrong
    assert small.num_forward_calls == before
    serves(small)


NESTED = b'{"messages": [{"role": "user", "content": ' + b"[" * 1000 + b"]" * 1000 + b"}]}"
BROKEN_BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n",
    "broken": b'{"messages": [',
    "trailing": b'{"messages": []} x',
    "single quotes": b"{'messages': []}",
    "array": b"[1, 2]",
    "string": b'"hello"',
    "null": b"null",
    "number": b"5",
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "beyond a double": b'{"temperature": 1e999}',
    "5,000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "1,000 levels": NESTED,
    "20,000 levels": b"[" * 20_000,
    "1,000 levels of objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
}


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_a_body_that_is_no_json_object_is_a_400(small: AppUnderTest, path: str, body: bytes) -> None:
    """What cannot be read is refused before anything computes, and the connection's next request is served."""
    before = small.num_forward_calls
    with small.connect() as client:
        response = client.request("POST", path, body)
        assert response.status == 400 and is_error_form(response), response.body
        assert small.num_forward_calls == before
        assert client.request("POST", path, plain_body(path)).status == 200


def _raw(small: AppUnderTest, data: bytes, *, half_close: bool = False) -> Response | None:
    """What comes back for these bytes; None for a connection that is closed without an answer."""
    with small.connect() as client:
        client.send(data)
        if half_close:
            client.socket.shutdown(socket.SHUT_WR)
        try:
            if not client.socket.recv(1, socket.MSG_PEEK):
                return None
        except ConnectionResetError:
            return None
        return client.read_response()


HEAD = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN_REQUESTS: dict[str, tuple[bytes, int]] = {
    "body over the limit": (HEAD + f"Content-Length: {BODY_LIMIT + 1}\r\n\r\n".encode(), 413),
    "chunks over the limit": (CHUNKED + f"{BODY_LIMIT + 1:x}\r\n".encode(), 413),
    "chunked junk": (CHUNKED + b"hello\r\nworld\r\n0\r\n\r\n", 400),
    "a chunk that does not end": (CHUNKED + b"2\r\n{}junk\r\n0\r\n\r\n", 400),
    "negative chunk": (CHUNKED + b"-5\r\n{}\r\n", 400),
    "no length": (HEAD + b"\r\n", 411),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "a length that is none": (HEAD + b"Content-Length: two\r\n\r\n{}", 400),
    "half a head": (HEAD[:20], 408),
    "half a body": (HEAD + b'Content-Length: 100\r\n\r\n{"messages": [', 408),
    "half a chunk": (CHUNKED + b"50\r\n{", 408),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", BROKEN_REQUESTS)
def test_a_request_that_is_broken_on_the_wire_is_answered_and_forgotten(small: AppUnderTest, case: str) -> None:
    """Wrong framing, half requests and bodies that are too large have their status and cost no step."""
    before = small.num_forward_calls
    data, status = BROKEN_REQUESTS[case]
    with patience_for(small, status):
        response = _raw(small, data)
    assert response is not None and response.status == status and is_error_form(response)
    assert small.num_forward_calls == before
    serves(small)


@pytest.mark.parametrize("case", BROKEN_REQUESTS)
@pytest.mark.parametrize("path", [RESPONSES_PATH, AGENTS_PATH])
def test_other_endpoints_answer_broken_requests_alike(small: AppUnderTest, path: str, case: str) -> None:
    """Those of the other forms of OpenAI's errors."""
    before = small.num_forward_calls
    data, status = BROKEN_REQUESTS[case]
    with patience_for(small, status):
        response = _raw(small, data.replace(CHAT_PATH.encode(), path.encode()))
    assert response is not None and response.status == status and is_error_form(response)
    assert small.num_forward_calls == before


@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_responses_refuses_what_is_no_json_object(small: AppUnderTest, body: bytes) -> None:
    """And the connection's next request is served."""
    before = small.num_forward_calls
    with small.connect() as client:
        response = client.request("POST", RESPONSES_PATH, body)
        assert response.status == 400 and is_error_form(response), response.body
        assert small.num_forward_calls == before
        assert client.request("POST", RESPONSES_PATH, {"input": "x", "max_output_tokens": 1}).status == 200


@pytest.mark.parametrize("path", [RESPONSES_PATH, AGENTS_PATH])
def test_other_endpoints_refuse_pages_sizes_methods_and_models(small: AppUnderTest, path: str) -> None:
    """A foreign page, a body over the limit, a method that is not theirs, a model that a strict server has not."""
    before = small.num_forward_calls
    body = {"input": "x", "agent_id": "one", "model": "gpt-12"}
    cases: list[tuple[str, dict[str, Any], dict[str, str], int]] = [
        ("POST", body, {"Origin": "https://foreign.example"}, 403),
        ("PUT", body, {}, 405),
        ("POST", body, {}, 404),
        ("POST", {**body, "input": "x" * BODY_LIMIT}, {}, 413),
    ]
    for method, fields, headers, status in cases:
        with small.connect() as client:
            response = client.request(method, path, fields, headers)
        assert response.status == status, response.body
        assert response.error["type"] == "permission_error" if status == 403 else is_error_form(response)
    assert small.num_forward_calls == before
    serves(small)


def test_a_request_of_which_the_client_sends_half_and_leaves_costs_nothing(small: AppUnderTest) -> None:
    """Nobody is answered, nothing computes, the connection is gone."""
    before = small.num_forward_calls
    for data in (HEAD[:20], HEAD + b"Content-Length: 100\r\n\r\n{", CHUNKED + b"50\r\n{"):
        _raw(small, data, half_close=True)
    assert eventually(lambda: small.health()["num_open_connections"] <= 1)
    assert small.num_forward_calls == before
    serves(small)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field"), [(CHAT_PATH, "messages"), (COMPLETION_PATH, "prompt")])
def test_a_prompt_over_the_context_is_a_400_with_both_numbers(
    small: AppUnderTest, path: str, field: str, stream: bool
) -> None:
    """The message names the prompt's tokens and the limit, the code is OpenAI's; a prompt that just fits is served."""
    before = small.num_forward_calls
    said: Any = WORDS * 200 if path == COMPLETION_PATH else [{"role": "user", "content": WORDS * 200}]
    response = small.post(path, plain_body(path, stream=stream, **{field: said}))
    assert response.status == 400 and is_error_form(response)
    assert response.error["code"] == "context_length_exceeded"
    assert response.error["param"] == field
    num_tokens = len(small.served.tokenizer.encode(WORDS * 200))
    numbers = [int(word) for word in str(response.error["message"]).split() if word.isdigit()]
    assert numbers[1] == CONTEXT and num_tokens <= numbers[0] <= num_tokens + 20
    assert small.num_forward_calls == before
    exact = [5] * CONTEXT
    assert small.post(COMPLETION_PATH, plain_body(COMPLETION_PATH, prompt=exact)).status == 400
    assert small.post(COMPLETION_PATH, plain_body(COMPLETION_PATH, prompt=exact[1:])).status == 200


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
def test_a_strict_server_refuses_other_models(small: AppUnderTest, path: str) -> None:
    """An unknown name is a 404 that names `model`; the served one, the listed one and no name are served."""
    before = small.num_forward_calls
    response = small.post(path, plain_body(path, model="gpt-12"))
    assert response.status == 404 and is_error_form(response) and response.error["param"] == "model"
    assert small.num_forward_calls == before
    for name in (small.served.name, f"openai/{small.served.name}", None):
        assert small.post(path, plain_body(path, model=name)).status == 200
