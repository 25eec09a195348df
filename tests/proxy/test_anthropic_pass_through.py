"""Anthropic's endpoints through a real LiteLLM: what the client sent arrives whole, and the answer comes back whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.stubs import KEY, Backend, Client, Script

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"
RECORDED = [
    *(f"claude-code-2.1.119/{number:02}" for number in (1, 9, 11)),
    *(f"claude-code-2.1.330/{number:02}" for number in (1, 11)),
    *(f"pi-0.87-anthropic/{number:02}" for number in (1, 9)),
]
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MARK = {"type": "ephemeral", "ttl": "1h"}
BODY: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "rules", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "é中😀", "cache_control": MARK}]},
        {"role": "system", "content": "<total_tokens>5 tokens left</total_tokens>"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "kv1abc"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True}]},
    ],
    "metadata": {"user_id": '{"session_id":"1cb3ea4d-976d-4eea-8348-b2146025f9ef"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [{"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "speculation": False,
    "timeout": 5,
    "fallbacks": ["x"],
    "field_of_tomorrow": {"a": [1, 2.5, None]},
}
EVENTS = [{"type": "message_start", "message": {"id": "msg_r1"}}, {"type": "ping"}, {"type": "message_stop"}]
ANSWER = {"id": "msg_r1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "é"}]}
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "The model is still loading."}}


@pytest.mark.parametrize("path", [MESSAGES, COUNT, f"{MESSAGES}?beta=true", f"{COUNT}?beta=true"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_body_arrives_as_it_was_sent(client: Client, backend: Backend, path: str, stream: bool) -> None:
    """Every field, under the same path; the answer comes back as the backend wrote it."""
    backend.follow(Script(events=list(EVENTS), answer=ANSWER))
    body = {**BODY, **({"stream": True} if stream else {})}
    reply = client.post(path, body)
    assert reply.status == 200
    [received] = backend.received
    assert received.body == body
    assert received.path == path
    if stream:
        assert reply.events() == EVENTS
    else:
        assert reply.json() == ANSWER
    assert reply.headers["x-request-id"] == "r1"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_arrive_unchanged(client: Client, backend: Backend, name: str) -> None:
    """What real clients sent, with the headers that mean something to the backend."""
    file = RECORDINGS / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"needs the recordings in {RECORDINGS}")
    record = json.loads(file.read_text("utf-8"))
    own = ("host", "content-length", "connection", "accept-encoding")
    headers = {key: value for key, value in record["headers"] if key.lower() not in own}
    assert client.post(record["path"], record["body"], headers).status == 200
    [received] = backend.received
    assert received.body == record["body"]
    sent = {key.lower(): value for key, value in headers.items()}
    for key in ("anthropic-version", "anthropic-beta", "x-claude-code-session-id", "user-agent"):
        assert received.headers.get(key) == sent.get(key)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 529])
def test_errors_come_back_as_they_are(client: Client, backend: Backend, stream: bool, status: int) -> None:
    """Status, body and when to come back."""
    backend.follow(Script(status=status, error=OVERLOADED, retry_after="7"))
    reply = client.post(MESSAGES, {**BODY, **({"stream": True} if stream else {})})
    assert (reply.status, reply.json(), reply.headers["retry-after"]) == (status, OVERLOADED, "7")


def test_a_body_that_is_no_json_is_the_backends_to_refuse(client: Client, backend: Backend) -> None:
    """The proxy judges no bodies: what the backend would say of this one, it says."""
    backend.follow(Script(status=400, error=OVERLOADED))
    reply = client.send("POST", MESSAGES, b"[1]")
    assert (reply.status, reply.json()) == (400, OVERLOADED)


def test_the_proxys_own_errors_have_anthropics_form(client: Client, backend: Backend) -> None:
    """A wrong method, a foreign page, a body that is too large."""
    cases = {
        "invalid_request_error": client.send("GET", MESSAGES),
        "permission_error": client.post(MESSAGES, BODY, {"Origin": "https://foreign.example"}),
        "request_too_large": client.post(MESSAGES, {**BODY, "system": "x" * 5 * 2**20}),
    }
    for kind, reply in cases.items():
        assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind
        assert reply.status == {"permission_error": 403}.get(kind, reply.status)
    assert not backend.received


@pytest.mark.long
def test_a_wrong_key_is_refused_in_anthropics_form(keyed_client: Client, backend: Backend) -> None:
    """Before the backend."""
    reply = keyed_client.post(MESSAGES, BODY, {"x-api-key": "wrong"})
    assert reply.status == 401
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", "authentication_error")
    assert not backend.received


@pytest.mark.long
@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"Authorization": f"Bearer {KEY}"}])
def test_the_key_opens_the_door_in_both_spellings(
    keyed_client: Client, backend: Backend, headers: dict[str, str]
) -> None:
    """And it reaches the backend, which asks for it too."""
    assert keyed_client.post(MESSAGES, BODY, headers).status == 200
    assert KEY in " ".join(backend.received[0].headers.values())


def test_a_client_that_leaves_is_told_to_the_backend(client: Client, backend: Backend) -> None:
    """Once the headers are out, long before the answer's end."""
    backend.follow(Script(events=[*EVENTS[:2]] * 500, pause_seconds=0.2))
    connection = client.open({**BODY, "stream": True}, MESSAGES)
    assert connection.recv(64)
    connection.close()
    assert backend.wait_until_left(60) is not None
